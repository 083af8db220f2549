"""The timing of calls in this process, for all measures: whole passes over a stream, and interleaved rounds.

| way of timing | what it shows |
|---|---|
| whole passes: each way answers all requests, back to back, before the next way begins | what a service sees |
| interleaved rounds: each kind of call is made once, in changing order, before the next round | a single call's cost |
| blocks: rounds of whole blocks of one kind of call | the cost of a call among others of its kind |

An interleaved call follows one of another kind, which has emptied the processor's caches. In passes, what one call does
to the next one is included.

Sizes: N requests.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.methods.base import BYPASSED, COMPUTED
from experiments.metrics.metrics import percentiles
from experiments.models.loading import Inputs
from experiments.support.clock import HOST, Clock, Spent
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer, Workload
from llmcache import LLMCache

WITH = ("exact_hit", "hit", "miss")
WITHOUT = ("nocache", "floor")

_Call = TypeVar("_Call")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Call:
    first: int  # number of its first request
    inputs: Inputs  # tensors (rows, T)
    n_rows: int = 1


@dataclass(frozen=True, slots=True)
class Pass:
    who: str  # name of the way
    number: int  # of the round
    seconds: float  # from the first request to the last answer, and until the queues are empty
    drained_s: float  # the part of it after the last answer
    ms: NDArray[np.float64]  # time of each call, from its inputs to its answers, ms
    served: NDArray[np.str_]  # rung that served each request, or computed or bypassed (N,)
    answers: Sequence[Answer]  # N

    @property
    def mean_ms(self) -> float:
        return 1e3 * self.seconds / len(self.answers)


class Way:
    """One way to answer the requests of a stream, in whole passes."""

    def __init__(self, name: str, ask: Callable[[Call], list[Answer]], cache: LLMCache | None = None) -> None:
        """Set up; `ask` returns the answers of a call's rows. A cache's queues are emptied within each pass."""
        self.name, self.ask, self.cache = name, ask, cache

    def begin(self) -> None:
        """Prepare a pass, before its time."""

    def served(self, call: Call) -> list[str]:
        """Return what served each row of the latest call."""
        if self.cache is None:
            return [COMPUTED] * call.n_rows
        return [BYPASSED if one.bypassed else one.rung or COMPUTED for one in self.cache.last]

    def go(self, calls: Sequence[Call], number: int, what: str) -> Pass:
        """Answer all calls in order, back to back; `what` labels the progress."""
        self.begin()
        ms: list[float] = []
        served: list[str] = []
        answers: list[Answer] = []
        gc.collect()
        with torch.inference_mode():
            started = perf_counter()
            for call in tracked(calls, what):
                begun = perf_counter()
                answers += self.ask(call)
                ms.append((perf_counter() - begun) * 1e3)
                served += self.served(call)
            answered = perf_counter()
            if self.cache is not None:
                self.cache.drain()
        ended = perf_counter()
        return Pass(self.name, number, ended - started, ended - answered, np.array(ms), np.array(served), answers)


def asking(workload: Workload, module: Callable[..., Any]) -> Callable[[Call], list[Answer]]:
    """Return the function that answers calls of a workload with a model."""

    def ask(call: Call) -> list[Answer]:
        output = module(**call.inputs)
        if call.n_rows == 1:
            return [workload.answer(output, call.first)]
        return [workload.answer(output[i : i + 1], call.first + i) for i in range(call.n_rows)]

    return ask


def calls_of(workload: Workload, batch: int = 1) -> list[Call]:
    """Return the requests of a workload as calls of up to `batch` rows, padded to the longest."""
    calls = []
    for first in range(0, len(workload.requests), batch):
        some = [request.inputs for request in workload.requests[first : first + batch]]
        inputs = some[0]
        if len(some) > 1:
            rows = [{name: value[0] for name, value in one.items()} for one in some]
            inputs = dict(workload.tokenizer.pad(rows, return_tensors="pt"))
        calls.append(Call(first, inputs, len(some)))
    return calls


def by_round(passes: Iterable[Pass]) -> list[float]:
    """Return the mean ms of a request, by round."""
    rounds: dict[int, list[float]] = {}
    for one in passes:
        rounds.setdefault(one.number, []).append(one.mean_ms)
    return [fmean(rounds[number]) for number in sorted(rounds)]


def speedup(base: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    """Return the median and range of the ratios of two ways' times, by round."""
    ratios = [alone / mine for alone, mine in zip(base, own, strict=True)]
    return {"speedup": median(ratios), "speedup_min": min(ratios), "speedup_max": max(ratios)}


@contextmanager
def on_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rotated(kinds: Sequence[str], by: int) -> Sequence[str]:
    """Return the kinds in an order that changes by round, so that no kind always follows the same one."""
    turned = [*kinds[by % len(kinds) :], *kinds[: by % len(kinds)]]
    return turned if by // len(kinds) % 2 == 0 else turned[::-1]


def interleaved(
    kinds: Sequence[str],
    numbers: Iterable[int],
    call: Callable[[str, int], _Made],
    order: Callable[[Sequence[str], int], Iterable[str]] = rotated,
    end: Callable[[Mapping[str, _Made]], None] = lambda made: None,
) -> dict[str, list[_Made]]:
    """Make one call of each kind a round, in the round's order; return the results by kind, one a round.

    `call` gets the kind and the number of the round, `end` a round's results after its last call.
    """
    results: dict[str, list[_Made]] = {kind: [] for kind in kinds}
    for number in numbers:
        made = {kind: call(kind, number) for kind in order(kinds, number)}
        end(made)
        for kind, result in made.items():
            results[kind].append(result)
    return results


def blocks(
    ask: Callable[[str, Sequence[_Call]], list[float]], fresh: Callable[[], _Call], numbers: Iterable[int], size: int
) -> dict[str, list[list[float]]]:
    """Return the ms of each call by kind and block, one block of each kind a round; `fresh` makes a call that misses.

    Even rounds have the blocks with the cache first (exact hits, hits, misses), then the model alone and the floor; odd
    rounds the reverse. These get the same requests as the misses. Their times do not depend on the tokens of a request
    of fixed length, so hits are compared with the same block.
    """
    kinds = (*WITH, *WITHOUT)
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for number in numbers:
        calls = [fresh() for _ in range(size)]
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            times[kind].append(ask(kind, calls))
    return times


def figures_of_blocks(times: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any] | None:
    """Return percentiles over all blocks, the fastest and slowest median, and ratios by round; None without rounds."""
    rounds = len(times["nocache"])
    if not rounds:
        return None
    told: dict[str, Any] = {"rounds": rounds, "ratios": {}}
    for kind, some in times.items():
        told[f"{kind}_ms"] = percentiles(np.concatenate(some)) | _range([np.median(one) for one in some])
        if kind != "nocache":
            ratios = [np.mean(one) / np.mean(base) for one, base in zip(some, times["nocache"], strict=True)]
            told["ratios"][f"{kind}/nocache"] = {"median": float(np.median(ratios)), **_range(ratios)}
    return told


def _range(values: Sequence[Any]) -> dict[str, float]:
    return {"min": float(min(values)), "max": float(max(values))}


def figures_of_rounds(spent: Mapping[str, Sequence[Spent]], base: str, clock: Clock) -> dict[str, Any]:
    """Return percentiles (`{kind}_ms`), `ratios` to the kind `base`, and times by the host's clock if it is another."""
    times = {kind: [one.ms for one in some] for kind, some in spent.items()}
    by_host = {f"{kind}_ms": percentiles([one.host_ms for one in some]) for kind, some in spent.items()}
    return {
        **{f"{kind}_ms": percentiles(some) for kind, some in times.items()},
        "ratios": ratios(times, base),
        "host": None if clock.name == HOST else by_host,
    }


def ratios(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Return the ratios of each kind to `base` in the same round, by `kind/base`: median, 5th and 95th percentile."""
    found = {}
    for kind in (kind for kind in times if kind != base):
        values = np.array(times[kind]) / np.array(times[base])
        p5, middle, p95 = (float(value) for value in np.percentile(values, (5, 50, 95)))
        found[f"{kind}/{base}"] = {"median": middle, "p5": p5, "p95": p95}
    return found
