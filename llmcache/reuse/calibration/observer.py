"""Collects computed requests with their answers, for calibration and audit.

Sizes: n computed rows, D hidden width, S width of a signature, C logits.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from math import nan
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.errors import CalibrationError
from llmcache.models.weights import Weights
from llmcache.request.counters import Counters
from llmcache.request.reading import to_host
from llmcache.reuse.answers import Answers, Reading
from llmcache.reuse.calibration.inputs import n_rows
from llmcache.reuse.call import Call
from llmcache.reuse.draft import Draft
from llmcache.reuse.observation import Observation
from llmcache.support.arrays import Floats
from llmcache.support.context import scoped

_MOST = 1e18  # the square of a larger value overflows float32


class Observer:
    """Reads the answers of finished calls."""

    def __init__(self, answers: Answers, read: Reading, head: Weights, draft: Draft | None, counters: Counters) -> None:
        """Read answers by `read`; `head`: the weights outside the trunk; `draft` runs on what is learned from."""
        self.answers, self.draft, self._counters = answers, draft, counters
        #: While set, rows are computed and appended to this list instead of being stored.
        self.collected: ContextVar[list[Observation] | None] = ContextVar("llmcache_collected", default=None)
        self.is_drafted: ContextVar[bool] = ContextVar("llmcache_is_drafted", default=False)  # of collected rows
        self._read, self._head = read, head

    def see(self, call: Call, output: Any) -> None:
        """Collect the computed rows of a closed call; see `read`."""
        if (collected := self.collected.get()) is not None:
            with self._counters.guard("observe an answer"):
                collected += self.read(call, output, call.entries, self.is_drafted.get()).values()

    def read(self, call: Call, output: Any, wanted: Collection[int], is_drafted: bool) -> dict[int, Observation]:
        """Return observations of the computed rows among `wanted`, by number; `is_drafted`: with the draft's answers.

        `output` is the whole model's; None: of the trunk alone, where answers are read from payloads.
        """
        entries = call.entries
        if self.answers.reads_payload is not (output is None) or (call.is_coupled and len(call.rows) > 1):
            return {}
        numbers = [number for number in entries if number in wanted]
        if not numbers:
            return {}
        signatures, outputs, targets = self._answers_of(call, output, numbers)
        head, seconds = self._head.digest(), (perf_counter() - call.started_s) / len(call.rows)
        rows = [call.rows[number] for number in numbers]
        tokens = call.requests.tokens(rows)
        drafts: Sequence[tuple[Floats | None, float]] = [(None, 0.0)] * len(rows)
        drafted_by = "" if self.draft is None else self.draft.drafter_name
        if self.draft is not None and is_drafted:
            drafts = self.draft.observe(call, rows, head)
        return {
            number: Observation(
                entries[number].scope,
                call.rows[number],
                tokens[i],
                targets[i],
                signatures[i],
                outputs[i],
                entries[number],
                head,
                seconds,
                generation=call.generation,
                draft=drafts[i][0],
                draft_s=drafts[i][1],
                drafted_by=drafted_by,
            )
            for i, number in enumerate(numbers)
        }

    def _answers_of(self, call: Call, output: Any, numbers: Sequence[int]) -> list[Floats]:
        """Return signatures (n, S), outputs (n, C) and mean payloads (n, D) of computed rows."""
        targets = torch.stack([call.entries[number].fields[0].float().mean(dim=0) for number in numbers])
        logits = targets if self.answers.reads_payload else self._logits(call, output)[numbers]
        outputs, means = (array for array in to_host(logits.float(), targets) if array is not None)
        # An output with NaN has no answer, although a largest value may be found in it: it agrees with none.
        signed = np.where(np.isnan(outputs).any(axis=-1, keepdims=True), np.float32(nan), self.answers.sign(outputs))
        return [signed, outputs, means]

    def _logits(self, call: Call, output: Any) -> Tensor:
        logits = torch.as_tensor(self._read(output))  # of a callable, it may be an array
        if len(logits) != len(call.rows):
            raise ValueError(f"{len(logits)} answers for {len(call.rows)} requests")
        return logits


def collect(
    compute: Callable[[Mapping[str, Any]], Any],
    observer: Observer,
    requests: Iterable[Mapping[str, Any]],
    first: int = 0,
    *,
    is_learned_from: bool = False,
    is_drafted: bool = False,
) -> list[Observation]:
    """Compute requests, numbered from `first`, and return their observations in order; see `Observer.read`.

    Raises:
        CalibrationError: A request cannot be computed or observed, its states are not finite, or, with
            `is_learned_from`, it has a `flaw`.
    """
    seen: list[Observation] = []
    for number, inputs in enumerate(requests, start=first):
        n_seen = len(seen)
        try:
            with (
                scoped(observer.collected, seen),
                scoped(observer.is_drafted, is_learned_from or is_drafted),
            ):  # not while `requests` makes the next one: it may call the model
                compute(inputs)
        except Exception as error:
            raise CalibrationError(f"request {number} could not be computed: {error!r}") from error
        n = n_rows(inputs)
        if len(seen) != n_seen + n:
            raise CalibrationError(
                f"request {number}: {len(seen) - n_seen} of its {n} rows went through the cache; the log and "
                "stats().bypassed say why"
            )
        for case in seen[n_seen:]:
            case.number = number
            if (wrong := flaw(case)) and (is_learned_from or not np.isfinite(case.target).all()):
                raise CalibrationError(f"request {number}: {wrong}")
    return seen


def flaw(case: Observation) -> str:
    """Return why nothing can be learned from a request, or ""."""
    for name, values in (("states are", case.target), ("outputs are", case.output)):
        if not (np.abs(values) < _MOST).all():  # also if it is NaN
            found = values[~(np.abs(values) < _MOST)][0]
            return (
                f"the model's {name} not finite, or too large to be learned from ({found:g}): run it in a wider dtype, "
                "or leave the request out"
            )
    return ""


def targets(cases: Sequence[Observation], answers: Answers) -> Floats:
    """Return regression targets (N, T) of requests: final states and outputs, with equal weight."""
    kinds = [np.stack([case.target for case in cases])]
    if not answers.reads_payload:
        kinds.append(outputs(cases, answers))
    centred = [kind - kind.mean(axis=0) for kind in kinds]
    return np.concatenate([kind / max(float(np.sqrt((kind**2).sum(axis=1).mean())), 1e-6) for kind in centred], axis=1)


def outputs(cases: Sequence[Observation], answers: Answers) -> Floats:
    """Return the outputs (N, C) from which answers are made. Logits of classes are centred: only differences count."""
    if answers.reads_payload:
        return np.stack([case.target for case in cases])
    logits = np.stack([case.output for case in cases])
    return logits - logits.mean(axis=1, keepdims=True) if answers.name == "class" else logits
