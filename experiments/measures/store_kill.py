"""Measure `store_kill`: a process is killed with SIGKILL while it writes to a disk store, and the next one opens it.

A life: a process begins with the folder that the last one left, and is asked for the latest prompts, one by one; each
answer is held against the model alone. Then it is asked for batches of new prompts, of two calls each. What the first
call computed is written while the second one computes; it says when all is written, purges a namespace now and then,
which every other prompt is in, and says when that has returned. After some batches it is killed, at a time drawn from
that which computing and writing one took last; some are through by then.

Lost is a prompt that was said to be written, or was found once, and is no exact hit later; waiting, one whose writing
was not over.
"""

import os
import random
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from experiments.measures.base import Experiment, Outcome
from experiments.models.architectures import build, check
from experiments.models.loading import find
from experiments.support.folders import Folders
from experiments.support.processes import begin
from experiments.support.progress import tracked
from llmcache import LLMCache

KEPT, PURGED = NAMESPACES = ("kept", "purged")
PURGES = 0.2  # of batches
MOST_BATCHES = 3  # of a life
EQUAL = 1e-5  # of the largest number of an output


class StoreKill(Experiment):
    """Settings of the measure."""

    # Heads by architecture of the benchmark, with random weights, or by prepared model or folder.
    models: dict[str, Literal["class", "token"]] = Field(min_length=1)
    kills: int = Field(default=100, ge=1)  # of each model
    tokens: int = Field(default=64, ge=8)  # of a prompt
    batch: int = Field(default=8, ge=2)  # prompts
    looks: int = Field(default=32, ge=1)  # the latest prompts that are asked for again


def run(experiment: StoreKill, folders: Folders) -> Outcome:
    """Let processes live and be killed."""
    rows = []
    for model, head in experiment.models.items():
        name = find(model, folders.models)
        check(name, experiment.tokens, head)
        with TemporaryDirectory() as folder:
            lives = _Lives(experiment, model, (name, head), Path(folder) / "store")
            for _ in tracked(range(experiment.kills), experiment.kills, f"{model}: kills"):
                lives.live()
            lives.live(is_last=True)
        rows += lives.rows
    points = [_point(rows, model) for model in experiment.models]
    return Outcome(rows, {"points": points, "summary": points})


@dataclass(slots=True)
class Known:
    """What became of prompts, by number, as far as processes have told."""

    asked: set[int] = field(default_factory=set)  # their writing may not be over
    written: set[int] = field(default_factory=set)
    purged: set[int] = field(default_factory=set)

    def hear(self, what: str, numbers: Sequence[int]) -> None:
        """Take in what a process said."""
        if what == "asked":
            self.asked |= set(numbers)
            self.purged -= set(numbers)
        elif what == "written":
            self.written |= self.asked
            self.asked.clear()
        elif what == "purges":  # which may happen at once, or not at all
            self.asked -= _in_purged(self.asked)
            self.written -= _in_purged(self.written)
        elif what == "purged":
            self.purged |= _in_purged(numbers)

    def compare(self, found: Sequence[tuple[int, bool, bool]]) -> dict[str, int]:
        """Hold prompts, whether they were hits and whether wrong against what is known; go on from what was found."""
        hits = {number for number, is_hit, _ in found if is_hit}
        misses = {number for number, is_hit, _ in found if not is_hit}
        counts = {
            "n_looked": len(found),
            "n_hits": len(hits),
            "n_lost": len(misses & self.written),
            "n_waiting": len(misses & self.asked),
            "n_after_purge": len(hits & self.purged),
            "n_wrong": sum(is_wrong for *_, is_wrong in found),
        }
        self.written = (self.written - misses) | hits
        self.purged -= hits | misses
        self.asked = misses  # they were computed again
        return counts


class _Lives:
    """The folder of a model, what it has to hold, and what became of each life."""

    def __init__(self, experiment: StoreKill, model: str, served: tuple[str, str], store: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self._experiment, self._model, self._served, self._store = experiment, model, served, store
        self._rng = random.Random(experiment.seed)
        self._known = Known()
        self._n_asked = 0
        self._batch_s = 0.01  # what a batch took last

    def live(self, is_last: bool = False) -> None:
        """Begin, look at what is there and, but for the last, write until killed."""
        looks = range(max(0, self._n_asked - self._experiment.looks), self._n_asked)
        left = self._half_written
        process, listen = begin(_live, self._experiment, *self._served, str(self._store), looks, is_last)
        seen = _received(listen)
        row = {"model": self._model, **self._known.compare(seen.pop("found")), **seen, "is_writing": False}
        n_batches = 0 if is_last else 1 + self._rng.randrange(MOST_BATCHES)
        while n_batches:
            n_batches -= self._hear(_received(listen))
        if not is_last:
            sleep(self._rng.random() * self._batch_s)
            os.kill(process.pid or 0, signal.SIGKILL)
        row["is_writing"] = self._is_writing(listen) and not is_last
        process.join()
        row["is_half_written"] = bool(self._half_written - left)
        self.rows.append(row)

    def _hear(self, told: Mapping[str, Any]) -> bool:
        """Take in what the process told; whether that was that a batch is being written."""
        self._known.hear(told["what"], told["numbers"])
        self._batch_s = told.get("took_s", self._batch_s)
        if told["what"] == "asked":
            self._n_asked = max(told["numbers"]) + 1
        return bool(told["what"] == "asked")

    def _is_writing(self, listen: Connection) -> bool:
        """Whether a batch was being written when the process ended, as what it told before shows."""
        is_writing = True
        while True:
            try:
                is_writing = self._hear(listen.recv())
            except (EOFError, OSError):
                return is_writing

    @property
    def _half_written(self) -> set[str]:
        """Files that were begun and not finished."""
        return {path.name for path in self._store.rglob("*.part")}


def _live(
    say: Connection, experiment: StoreKill, name: str, head: str, store: str, looks: range, is_last: bool
) -> None:
    """Look for prompts; then be asked for new ones for good."""
    torch.set_num_threads(1)
    rng = random.Random(f"{experiment.seed} {looks}")
    model: Any = build(name, experiment.seed, "cpu", head).model
    model.config.use_cache = head == "token"
    settings = {"store": {"name": "disk", "folder": store}, "store_least_tokens": 0, "auto_bypass": False}
    with LLMCache.wrap(model, **settings) as cache, torch.inference_mode():
        found = [_look(cache, experiment, number) for number in looks]
        stats = cache.stats()
        assert stats.store is not None
        say.send({"found": found, "n_errors": stats.errors, "n_damaged": sum(stats.store.n_mismatched.values())})
        number = looks.stop
        while not is_last:
            numbers = range(number, number + experiment.batch)
            say.send({"what": "asked", "numbers": numbers})  # what is computed first is written meanwhile
            started = perf_counter()
            for namespace in NAMESPACES:
                with cache.namespace(namespace):
                    cache(torch.cat([_prompt(cache, experiment, n) for n in numbers if _namespace(n) == namespace]))
            cache.drain()
            say.send({"what": "written", "numbers": (), "took_s": perf_counter() - started})
            number = numbers.stop
            if rng.random() < PURGES:
                say.send({"what": "purges", "numbers": ()})
                cache.purge(namespace=PURGED)
                say.send({"what": "purged", "numbers": range(number)})


def _look(cache: LLMCache, experiment: StoreKill, number: int) -> tuple[int, bool, bool]:
    """Number of a prompt, whether it was an exact hit, and whether its answer is not the model's own."""
    ids = _prompt(cache, experiment, number)
    with cache.namespace(_namespace(number)):
        with cache.disabled():
            plain = cache(ids)[0]
        output = cache(ids)[0]
    is_equal = (output - plain).abs().max() <= EQUAL * plain.abs().max()
    return number, cache.last[0].rung == "exact", not is_equal


def _prompt(cache: Any, experiment: StoreKill, number: int) -> Tensor:
    """Token ids (1, T) of a prompt, of its own."""
    draw, model = torch.Generator().manual_seed(1_000_003 * experiment.seed + number), cache.model
    return torch.randint(5, model.config.vocab_size, (1, experiment.tokens), generator=draw)


def _namespace(number: int) -> str:
    return NAMESPACES[number % 2]


def _in_purged(numbers: Iterable[int]) -> set[int]:
    return {number for number in numbers if _namespace(number) == PURGED}


def _received(listen: Connection) -> dict[str, Any]:
    """What a process tells next."""
    try:
        told: dict[str, Any] = listen.recv()
    except EOFError:
        raise RuntimeError("a process ended by itself") from None
    return told


def _point(rows: Sequence[Mapping[str, Any]], model: str) -> dict[str, Any]:
    found = [row for row in rows if row["model"] == model]
    names = ("n_looked", "n_hits", "n_waiting", "n_lost", "n_after_purge", "n_damaged", "n_errors", "n_wrong")
    return {
        "model": model,
        "n_kills": len(found) - 1,  # each with a start after it
        "n_writing": sum(row["is_writing"] for row in found),
        "n_half_written": sum(row["is_half_written"] for row in found),
        **{name: sum(row[name] for row in found) for name in names},
    }
