"""Rows of calls that wait to be recomputed, and how several are computed together.

Sizes: T tokens of a row, L looks that are taken together.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmcache.audit.account import Audited
from llmcache.models.arguments import DECIDING
from llmcache.request.rows import Row
from llmcache.threads import forkable

if TYPE_CHECKING:
    from llmcache.request.call import Call

_MOST = 8  # looks that are taken together: more make a call that comes meanwhile wait for longer
_WIDTHS = (16, 1, 0)  # tokens that share a kind: rows are padded to the longest; only equal ones; each is taken alone


class Origin(NamedTuple):
    """Everything but the request that decides an answer."""

    weights: str  # digest of the trunk
    head: str  # digest of what of the model makes answers of its states
    attention: str  # implementation


@dataclass(frozen=True, slots=True)
class Recompute:
    """A served row that waits to be recomputed."""

    drawn: Audited  # how, and what it was served from
    key: str
    namespace: str
    inputs: Mapping[str, Tensor]  # its own, copied (1, T), without the padding behind that its key leaves out
    autocast: tuple[str, torch.dtype, bool]  # device type, dtype and whether it was on
    engine: str  # name of the one that keyed it
    origin: Origin  # of what was served: no other model's answer tells whether it was right
    since_s: float = field(default_factory=monotonic)  # when it was served, by a clock that never goes back


class RecomputeQueue:
    """Rows that wait to be recomputed. Thread-safe."""

    def __init__(self, pad_id: int, names: Collection[str] | None = None) -> None:
        """Begin empty. `pad_id` pads rows; `names` are the model's arguments (None: any)."""
        self._pad_id = pad_id
        self._names = names
        self._width = _WIDTHS[0]
        self._tried: set[int] = set()  # widths at which rows together came out as they do alone
        self._waiting: list[Recompute] = []
        self.parked: list[Recompute] = []  # until the model is again as it was when they were served
        self._most = _MOST
        self._lock = forkable(threading.Lock())

    def __len__(self) -> int:
        """Number of waiting rows, those that cannot be computed now included."""
        return len(self._waiting) + len(self.parked)

    def add(self, look: Recompute) -> None:
        with self._lock:
            self._waiting.append(look)

    def take(self) -> list[Recompute]:
        """Remove and return the oldest row, with others that can be computed together with it."""
        with self._lock:
            taken = self._waiting[:1]
            if taken and self._width:
                kind = self._kind(taken[0])
                taken = [look for look in self._waiting if self._kind(look) == kind][: self._most]
                self._most = min(2 * self._most, _MOST)
            self._waiting = [look for look in self._waiting if not any(look is one for one in taken)]
            return taken

    def put_back(self, looks: Sequence[Recompute]) -> None:
        """Put rows back at the front, since a call has begun. Next time fewer are taken."""
        with self._lock:
            self._waiting = [*looks, *self._waiting]
            self._most = max(1, len(looks) // 4)

    def park(self, looks: Sequence[Recompute]) -> None:
        """Set rows aside until the model is again as it was; see `resume`."""
        with self._lock:
            self.parked += looks

    def resume(self, origin: Origin, is_over: Callable[[Origin], bool]) -> list[Recompute]:
        """Put rows of an origin back at the front and return them; drop those that are over."""
        with self._lock:
            again = [look for look in self.parked if look.origin == origin]
            self.parked = [look for look in self.parked if not (look.origin == origin or is_over(look.origin))]
            self._waiting = [*again, *self._waiting]
            return again

    def drop(self, namespace: str | None) -> None:
        with self._lock:
            self._waiting = [look for look in self._waiting if namespace not in (None, look.namespace)]
            self.parked = [look for look in self.parked if namespace not in (None, look.namespace)]

    def are_tried(self, looks: Sequence[Recompute]) -> bool:
        """Whether rows like these are known to come out the same together as alone."""
        return len(looks) == 1 or self._width_of(looks[0]) in self._tried

    def tried(self, looks: Sequence[Recompute], is_same: bool) -> None:
        """Note whether rows that were computed together came out as they do alone."""
        width = self._width_of(looks[0])
        if is_same:
            self._tried.add(width)
        else:
            self._width = max((other for other in _WIDTHS if other < width), default=0)

    def inputs(self, looks: Sequence[Recompute], is_trial: bool = False) -> dict[str, Tensor]:
        """Return the arguments for rows that were taken together: tensors (L, T), padded to the longest row."""
        longest = max(look.inputs["input_ids"].shape[1] for look in looks)
        longest += is_trial and self._width_of(looks[0]) > 1
        fill = {"input_ids": self._pad_id}
        return {
            name: torch.cat([_padded(look.inputs[name], longest, fill.get(name, 0)) for look in looks])
            for name in looks[0].inputs
            if self._takes(name)
        }

    def _kind(self, look: Recompute) -> Hashable:
        """Return the kind of a row; rows of one kind can be computed together."""
        width = self._width_of(look)
        n_tokens = look.inputs["input_ids"].shape[1]
        return look.namespace, look.engine, look.origin, look.autocast, tuple(look.inputs), (n_tokens - 1) // width

    def _width_of(self, look: Recompute) -> int:
        """Return how many lengths share a kind: one where no mask tells padding."""
        return self._width if "attention_mask" in look.inputs and self._takes("attention_mask") else min(1, self._width)

    def _takes(self, name: str) -> bool:
        return self._names is None or name in self._names


def _padded(row: Tensor, n_tokens: int, fill: int) -> Tensor:
    return pad(row, (0, n_tokens - row.shape[1]), value=fill)


def look_at(call: "Call", row: Row, drawn: Audited, origin: Origin) -> Recompute:
    """Copy from a call that has ended the arguments that recomputing a row needs."""
    end = row.valid.stop if isinstance(row.valid, slice) else int(row.valid[-1]) + 1
    end = call.arguments["input_ids"].shape[1] if row.has_layout else end  # its key covers all of it
    given = {name: call.arguments.get(name) for name in DECIDING}
    inputs = {name: _row(tensor, row.number, end) for name, tensor in given.items() if tensor is not None}
    device = inputs["input_ids"].device.type
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    engine = "" if call.engine is None else call.engine.name
    return Recompute(drawn, row.key, call.namespace, inputs, autocast, engine, origin)


def _row(tensor: Any, number: int, end: int) -> Tensor:
    """Return one row (1, T) of an argument, which may be the same for all rows."""
    number = number if len(tensor) > 1 else 0
    row: Tensor = tensor[number : number + 1, :end].clone()
    return row
