"""A queue of rows to recompute, taken in batches.

Sizes: T tokens of a row, L tasks of a batch.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmcache.models.arguments import DECIDING, take_row
from llmcache.request.rows import Row
from llmcache.reuse.audit.account import Audited
from llmcache.reuse.call import Call
from llmcache.support.threads import forkable

_MAX_BATCH, _MOST_TOKENS = 8, 256  # tasks, and tokens of all; a call that comes meanwhile waits for larger batches
_WIDTHS = (16, 1, 0)  # lengths that share a batch: 16, padded to the longest; 1, equal rows only; 0, each row alone


class Origin(NamedTuple):
    """Everything but the request that decides an answer."""

    weights: str  # digest of the trunk
    head: str  # digest of the weights outside the trunk, which make the answer
    attention: str  # its implementation


@dataclass(frozen=True, slots=True, eq=False)
class Recompute:
    """A served row that waits to be recomputed."""

    drawn: Audited  # its draw and its source
    key: str
    namespace: str
    inputs: Mapping[str, Tensor]  # copies (1, T), without trailing padding that its key does not cover
    autocast: tuple[str, torch.dtype, bool]  # device type, dtype, is enabled
    engine: str  # name of the engine that its key covers
    origin: Origin  # of the answer served: only the same model's answer tells whether it was right
    generation: int  # `Purges.generation` when it was served: what is forgotten later is recomputed, but not stored
    since_s: float = field(default_factory=monotonic)  # when it was served, monotonic


class RecomputeQueue:
    """A queue of rows to recompute. Thread-safe."""

    def __init__(self, pad_id: int, names: Collection[str] | None = None) -> None:
        """Begin empty. `pad_id`: padding token; `names`: the model's arguments (None: any)."""
        self._pad_id = pad_id
        self._names = names
        self._width = _WIDTHS[0]
        self._batchable: set[int] = set()  # widths at which a batch gave the same results as each row alone
        self._waiting: list[Recompute] = []
        self.parked: list[Recompute] = []  # until the model is as it was when they were served
        self._max_batch = _MAX_BATCH
        self._lock = forkable(threading.Lock())

    def __len__(self) -> int:
        """Number of waiting rows, parked ones included."""
        return len(self._waiting) + len(self.parked)

    def add(self, task: Recompute) -> None:
        with self._lock:
            self._waiting.append(task)

    def take(self) -> list[Recompute]:
        """Remove and return the oldest row, with those of nearest length that can share its batch."""
        with self._lock:
            taken = self._waiting[:1]
            if taken and self._width:
                kind = self._kind(taken[0])
                n_most = min(self._max_batch, max(1, _MOST_TOKENS // _length(taken[0])))
                alike = [task for task in self._waiting if self._kind(task) == kind]
                taken = sorted(alike, key=lambda task: abs(_length(task) - _length(taken[0])))[:n_most]  # less padding
                self._max_batch = min(2 * self._max_batch, _MAX_BATCH)
            self._waiting = [task for task in self._waiting if task not in taken]
            return taken

    def put_back(self, tasks: Sequence[Recompute]) -> None:
        """Put rows back at the front because a call has begun; the next batch is smaller."""
        with self._lock:
            self._waiting = [*tasks, *self._waiting]
            self._max_batch = max(1, len(tasks) // 4)

    def park(self, tasks: Sequence[Recompute]) -> None:
        """Set rows aside until the model is as it was; see `resume`."""
        with self._lock:
            self.parked += tasks

    def resume(self, origin: Origin, has_ended: Callable[[Origin], bool]) -> list[Recompute]:
        """Move the parked rows of an origin to the front and return them; drop those whose origin `has_ended`."""
        with self._lock:
            again = [task for task in self.parked if task.origin == origin]
            self.parked = [task for task in self.parked if not (task.origin == origin or has_ended(task.origin))]
            self._waiting = [*again, *self._waiting]
            return again

    def drop(self, namespace: str | None) -> None:
        with self._lock:
            self._waiting = [task for task in self._waiting if namespace not in (None, task.namespace)]
            self.parked = [task for task in self.parked if namespace not in (None, task.namespace)]

    def may_batch(self, tasks: Sequence[Recompute]) -> bool:
        """Whether rows like these are known to give the same results in a batch as alone."""
        return len(tasks) == 1 or self._width_of(tasks[0]) in self._batchable

    def note_trial(self, tasks: Sequence[Recompute], is_same: bool) -> None:
        """Note whether these rows gave the same results in a batch as alone."""
        width = self._width_of(tasks[0])
        if is_same:
            self._batchable.add(width)
        else:
            self._width = max((other for other in _WIDTHS if other < width), default=0)

    def inputs(self, tasks: Sequence[Recompute], is_trial: bool = False) -> dict[str, Tensor]:
        """Return arguments for a batch: tensors (L, T), padded to the longest row; in a masked trial, by one more."""
        longest = max(map(_length, tasks))
        longest += is_trial and self._width_of(tasks[0]) > 1
        fill = {"input_ids": self._pad_id}
        return {
            name: torch.cat([_padded(task.inputs[name], longest, fill.get(name, 0)) for task in tasks])
            for name in tasks[0].inputs
            if self._takes(name)
        }

    def _kind(self, task: Recompute) -> Hashable:
        """Return the kind of a row; rows of one kind can share a batch."""
        width = self._width_of(task)
        n_tokens = _length(task)
        return task.namespace, task.engine, task.origin, task.autocast, tuple(task.inputs), (n_tokens - 1) // width

    def _width_of(self, task: Recompute) -> int:
        """Return how many lengths share a kind: at most one if no mask marks padding."""
        return self._width if "attention_mask" in task.inputs and self._takes("attention_mask") else min(1, self._width)

    def _takes(self, name: str) -> bool:
        return self._names is None or name in self._names


def _length(task: Recompute) -> int:
    return task.inputs["input_ids"].shape[1]


def _padded(row: Tensor, n_tokens: int, fill: int) -> Tensor:
    return pad(row, (0, n_tokens - row.shape[1]), value=fill)


def copy_row(call: Call, row: Row, drawn: Audited, origin: Origin) -> Recompute:
    """Copy the arguments that recomputing a row needs from a finished call."""
    end = row.valid.stop if isinstance(row.valid, slice) else int(row.valid[-1]) + 1
    end = call.arguments["input_ids"].shape[1] if row.has_layout or call.is_coupled else end  # its key covers padding
    given = {name: call.arguments.get(name) for name in DECIDING}
    inputs = {name: take_row(value, row.number, end).clone() for name, value in given.items() if value is not None}
    device = inputs["input_ids"].device.type
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    engine = call.engine.name
    return Recompute(drawn, row.key, call.scope.namespace, inputs, autocast, engine, origin, call.generation)
