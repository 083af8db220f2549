"""What it takes to compute rows of calls again, later and elsewhere, several at once.

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
    """What decides an answer beside its request."""

    weights: str  # digest of the trunk
    head: str  # digest of what of the model makes answers of its states
    attention: str  # implementation


@dataclass(frozen=True, slots=True)
class Recompute:
    """A row that was served, to be computed."""

    drawn: Audited  # how, and what it was served from
    key: str
    namespace: str
    inputs: Mapping[str, Tensor]  # its own, copied (1, T), without the padding behind that its key leaves out
    autocast: tuple[str, torch.dtype, bool]  # device type, dtype and whether it was on
    origin: Origin  # of what was served: no other model's answer tells whether it was right
    since_s: float = field(default_factory=monotonic)  # when it was served, by a clock that never goes back


class RecomputeQueue:
    """Those that wait. Thread-safe."""

    def __init__(self, pad_id: int, names: Collection[str] | None = None) -> None:
        """Begin with none: `pad_id` pads rows, `names` is what the model may be passed (None: anything)."""
        self._pad_id = pad_id
        self._names = names
        self._width = _WIDTHS[0]
        self._tried: set[int] = set()  # widths at which rows together came out as they do alone
        self._waiting: list[Recompute] = []
        self._parked: list[Recompute] = []  # until the model is again as it was when they were served
        self._most = _MOST
        self._lock = forkable(threading.Lock())

    def __len__(self) -> int:
        """How many wait, those that cannot be computed now included."""
        return len(self._waiting) + len(self._parked)

    @property
    def has_parked(self) -> bool:
        """Whether some cannot be computed before the model is again as it was."""
        return bool(self._parked)

    def add(self, look: Recompute) -> None:
        with self._lock:
            self._waiting.append(look)

    def take(self) -> list[Recompute]:
        """The oldest one, and others that can be computed with it; none where none waits."""
        with self._lock:
            taken = self._waiting[:1]
            if taken and self._width:
                kind = self._kind(taken[0])
                taken = [look for look in self._waiting if self._kind(look) == kind][: self._most]
                self._most = min(2 * self._most, _MOST)
            self._waiting = [look for look in self._waiting if not any(look is one for one in taken)]
            return taken

    def put_back(self, looks: Sequence[Recompute]) -> None:
        """Have looks that were taken wait again, before all others: a call came. Next time fewer are taken."""
        with self._lock:
            self._waiting = [*looks, *self._waiting]
            self._most = max(1, len(looks) // 4)

    def park(self, looks: Sequence[Recompute]) -> None:
        """Have looks that were taken wait until the model is again as it was: see `resume`."""
        with self._lock:
            self._parked += looks

    def resume(self, origin: Origin, is_over: Callable[[Origin], bool]) -> list[Recompute]:
        """Have looks of an origin be taken again, before all others, and return them; forget those that are over."""
        with self._lock:
            again = [look for look in self._parked if look.origin == origin]
            self._parked = [look for look in self._parked if not (look.origin == origin or is_over(look.origin))]
            self._waiting = [*again, *self._waiting]
            return again

    def drop(self, namespace: str | None) -> None:
        with self._lock:
            self._waiting = [look for look in self._waiting if namespace not in (None, look.namespace)]
            self._parked = [look for look in self._parked if namespace not in (None, look.namespace)]

    def are_tried(self, looks: Sequence[Recompute]) -> bool:
        """Whether it is known that they come out the same together."""
        return len(looks) == 1 or self._width_of(looks[0]) in self._tried

    def tried(self, looks: Sequence[Recompute], is_same: bool) -> None:
        """Take note whether looks that were computed together came out as they do alone."""
        width = self._width_of(looks[0])
        if is_same:
            self._tried.add(width)
        else:
            self._width = max((other for other in _WIDTHS if other < width), default=0)

    def inputs(self, looks: Sequence[Recompute], is_trial: bool = False) -> dict[str, Tensor]:
        """What computes looks that were taken together: tensors (L, T), T of the longest, or one more for a trial."""
        longest = max(look.inputs["input_ids"].shape[1] for look in looks)
        longest += is_trial and self._width_of(looks[0]) > 1
        fill = {"input_ids": self._pad_id}
        return {
            name: torch.cat([_padded(look.inputs[name], longest, fill.get(name, 0)) for look in looks])
            for name in looks[0].inputs
            if self._takes(name)
        }

    def _kind(self, look: Recompute) -> Hashable:
        """Looks of the same kind can be computed together."""
        width = self._width_of(look)
        n_tokens = look.inputs["input_ids"].shape[1]
        return look.namespace, look.origin, look.autocast, tuple(look.inputs), (n_tokens - 1) // width

    def _width_of(self, look: Recompute) -> int:
        """Lengths that share a kind: one where the mask does not tell what is padding."""
        return self._width if "attention_mask" in look.inputs and self._takes("attention_mask") else min(1, self._width)

    def _takes(self, name: str) -> bool:
        return self._names is None or name in self._names


def _padded(row: Tensor, n_tokens: int, fill: int) -> Tensor:
    return pad(row, (0, n_tokens - row.shape[1]), value=fill)


def look_at(call: "Call", row: Row, drawn: Audited, origin: Origin) -> Recompute:
    """Take what a look needs from a call that has ended."""
    end = row.valid.stop if isinstance(row.valid, slice) else int(row.valid[-1]) + 1
    end = call.arguments["input_ids"].shape[1] if row.has_layout else end  # its key covers all of it
    given = {name: call.arguments.get(name) for name in DECIDING}
    inputs = {name: _row(tensor, row.number, end) for name, tensor in given.items() if tensor is not None}
    device = inputs["input_ids"].device.type
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    return Recompute(drawn, row.key, call.namespace, inputs, autocast, origin)


def _row(tensor: Any, number: int, end: int) -> Tensor:
    """One row (1, T) of an argument, which may be the same for all rows."""
    number = number if len(tensor) > 1 else 0
    row: Tensor = tensor[number : number + 1, :end].clone()
    return row
