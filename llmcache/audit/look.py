"""What it takes to compute one row of a call again, later and elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcache.context import Call, Drawn, Row

# Of the trunk's arguments, those that decide a row's states; a model with a head takes them by the same names.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


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
