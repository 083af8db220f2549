"""What it takes to compute rows of calls again, later and elsewhere, several at once: that costs a third of one by one.

Sizes: T tokens of a row, L looks that are taken together.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmcache.context import Call, Drawn
from llmcache.rows import Row

# Of the trunk's arguments, those that decide a row's states; a model with a head takes them by the same names.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_MOST = 8  # looks that are taken together: more make a call that comes meanwhile wait for longer
_WIDTHS = (16, 1, 0)  # tokens that share a kind: rows are padded to the longest; only equal ones; each is taken alone


@dataclass(frozen=True, slots=True)
class Look:
    """A row that was served, to be computed.

    Attributes:
        drawn: How it was drawn, and what it was served from.
        key: The row's exact key.
        namespace: Of its call.
        inputs: Its own, copied: tensors (1, T), without the padding behind its last token.
        autocast: Device type, dtype and whether autocast was on.
    """

    drawn: Drawn
    key: str
    namespace: str
    inputs: Mapping[str, Tensor]
    autocast: tuple[str, torch.dtype, bool]

    def kind(self, width: int) -> Hashable:
        """Looks of the same kind can be computed together."""
        n_tokens = self.inputs["input_ids"].shape[1]
        width = width if "attention_mask" in self.inputs else 1
        return self.namespace, self.autocast, tuple(self.inputs), (n_tokens - 1) // width, width


class Looks:
    """Those that wait. Thread-safe.

    Whether a model answers the same when rows come together, padded, is tried with the first of them: heads of one's
    own may read padding, and some decoders refuse batches.
    """

    def __init__(self, pad_id: int) -> None:
        """Begin with none.

        Args:
            pad_id: The token that pads rows.
        """
        self.is_tried = False
        self._pad_id = pad_id
        self._widths = list(_WIDTHS)
        self._waiting: list[Look] = []
        self._lock = threading.Lock()

    def add(self, look: Look) -> None:
        """Have one wait."""
        with self._lock:
            self._waiting.append(look)

    def take(self) -> list[Look]:
        """The oldest one, and others that can be computed with it; none where none waits."""
        with self._lock:
            taken, width = self._waiting[:1], self._widths[0]
            if taken and width:
                kind = taken[0].kind(width)
                taken = [look for look in self._waiting if look.kind(width) == kind][:_MOST]
            self._waiting = [look for look in self._waiting if not any(look is one for one in taken)]
            return taken

    def tried(self, is_same: bool) -> None:
        """Take note whether looks that were computed together came out as they do alone."""
        self.is_tried = is_same
        if not is_same and len(self._widths) > 1:
            del self._widths[0]

    def drop(self, namespace: str | None) -> None:
        """Forget those of a namespace, or all."""
        with self._lock:
            self._waiting = [look for look in self._waiting if namespace not in (None, look.namespace)]

    def inputs(self, looks: Sequence[Look]) -> dict[str, Tensor]:
        """What computes looks that were taken together: tensors (L, T), T of the longest."""
        longest = max(look.inputs["input_ids"].shape[1] for look in looks)
        fill = {"input_ids": self._pad_id}
        return {
            name: torch.cat([_padded(look.inputs[name], longest, fill.get(name, 0)) for look in looks])
            for name in looks[0].inputs
        }


def look_at(call: Call, row: Row, drawn: Drawn) -> Look:
    """Take what a look needs from a call that has ended."""
    end = row.valid.stop if isinstance(row.valid, slice) else int(row.valid[-1]) + 1
    given = {name: call.arguments.get(name) for name in _INPUTS}
    inputs = {name: _row(tensor, row.number, end) for name, tensor in given.items() if tensor is not None}
    device = inputs["input_ids"].device.type
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    return Look(drawn, row.key, call.namespace, inputs, autocast)


def _row(tensor: Any, number: int, end: int) -> Tensor:
    """One row (1, T) of an argument, which may be the same for all rows."""
    number = number if len(tensor) > 1 else 0
    row: Tensor = tensor[number : number + 1, :end].clone()
    return row


def _padded(row: Tensor, n_tokens: int, fill: int) -> Tensor:
    """A row (1, T) with more tokens behind."""
    return pad(row, (0, n_tokens - row.shape[1]), value=fill)
