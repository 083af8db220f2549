"""Takes a trunk's output apart into rows to keep, and makes outputs of rows that were kept.

A trunk returns a `ModelOutput`, a tuple, a list or a tensor. Each tensor in it has one row a request: hidden states
(B, T, D), of which the payload keeps what the head reads, or anything else (B, ...), which is kept as it is. What an
output looks like is learned from one that the trunk returned.

Sizes: B rows of a call, T tokens of a row (padding included), n of them valid, D hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from llmcache.models.kinds import name_of, type_of
from llmcache.models.payloads import Payload, padding_of, place_padding
from llmcache.request.rows import Row

#: What is kept of one row: one tensor for each field of the output, in order.
Fields = tuple[Tensor, ...]
STATES = "last_hidden_state"
_NAMED = (STATES, "pooler_output")


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of an output, as it is for a batch."""

    name: Any  # its key in a ModelOutput, its place in a tuple
    is_states: bool  # (B, T, D); else (B, *shape)
    shape: tuple[int, ...]  # (D,), or all but the first dimension
    dtype: torch.dtype


class Kept(Protocol):
    """What is kept of a row that is served."""

    fields: Fields
    padding: Fields  # of each field that holds states, those of its padding; empty: nothing


@dataclass(frozen=True, slots=True)
class Packing:
    """What a trunk returns for calls of one kind."""

    kind: type
    fields: tuple[Field, ...]
    payload: Payload

    @classmethod
    def learn(cls, output: Any, n_rows: int, n_tokens: int, payload: Payload) -> "Packing | None":
        """Describe an output for (B, T) tokens; None if it holds more than one row of numbers a request."""
        fields: list[Field] = []
        for name, value in parts_of(output).items():
            if not isinstance(value, Tensor) or value.ndim < 2 or len(value) != n_rows:
                return None
            is_states = value.ndim == 3 and value.shape[1] == n_tokens
            is_first = not fields  # hidden states come first in tuples
            if (name == STATES or is_first) and not is_states:
                return None
            if payload.fits_any_length and not is_first and (is_states or name not in (1, *_NAMED)):
                return None  # only states are known to be of any length
            fields.append(Field(name, is_states, tuple(value.shape[2:] if is_states else value.shape[1:]), value.dtype))
        return cls(type(output), tuple(fields), payload) if fields else None

    def describe(self) -> list[Any]:
        """What `read` makes the same of; JSON can hold it."""
        fields = [(one.name, one.is_states, one.shape, str(one.dtype).removeprefix("torch.")) for one in self.fields]
        return [name_of(self.kind), fields]

    @classmethod
    def read(cls, described: Any, payload: Payload) -> "Packing | None":
        """The reverse; None of a class that is not loaded, or no output of a model."""
        name, fields = described
        kind = type_of(name)
        if kind is None or not (kind in (tuple, list, Tensor) or issubclass(kind, ModelOutput)):
            return None
        made = (Field(name, is_states, tuple(shape), getattr(torch, dtype)) for name, is_states, shape, dtype in fields)
        return cls(kind, tuple(made), payload)

    def fits(self, output: Any, n_rows: int, n_tokens: int) -> bool:
        """Whether an output for (B, T) tokens is of this kind."""
        return self == Packing.learn(output, n_rows, n_tokens, self.payload)

    def take(self, output: Any, place: int, row: Row, device: torch.device) -> tuple[Fields, Fields]:
        """A copy, on a device, of what is kept of a request, whose row is at some place in an output of the trunk.

        Returns:
            Of each field what is kept; of each that holds states those of padding (T - n, D), where they are kept.
        """
        fields: list[Tensor] = []
        padding: list[Tensor] = []
        for field, value in zip(self.fields, parts_of(output).values(), strict=True):
            own = self.payload.take(value[place], row.valid) if field.is_states else value[place].clone()
            fields.append(_owned(own, device))
            if field.is_states and (row.has_layout or row.layout):
                places = torch.from_numpy(padding_of(row.valid, value.shape[1])).to(value.device)
                padding.append(_owned(value[place][places], device))
        return tuple(fields), tuple(padding)

    def join(
        self,
        rows: Sequence[Row],
        n_tokens: int,
        kept: Mapping[int, Kept],
        output: Any,
        places: Mapping[int, int],
        device: torch.device,
    ) -> Any:
        """Make the output of a call.

        Args:
            rows: All rows of the call.
            n_tokens: T.
            kept: What was kept of the rows that are served, and of their padding (empty: nothing), by number.
            output: Of the trunk for the other rows; None where all are served.
            places: Where each of these is in `output`, by number.
            device: Of the call's tensors.

        Returns:
            An output of the kind that the trunk returns, in tensors of its own. Rows in neither mapping are NaN.
        """
        computed = None if output is None else list(parts_of(output).values())
        made: list[Tensor] = []
        n_states = 0
        for number, field in enumerate(self.fields):
            shape = (len(rows), n_tokens, *field.shape) if field.is_states else (len(rows), *field.shape)
            whole = torch.empty(shape, dtype=field.dtype, device=device)
            if computed is not None:
                whole[list(places)] = computed[number][list(places.values())]
            for row in rows:
                if row.number in kept:
                    fields, padding = kept[row.number].fields, kept[row.number].padding
                    if not field.is_states:
                        whole[row.number] = fields[number].to(device)
                        continue
                    self.payload.place(fields[number].to(device), whole[row.number], row.valid)
                    if padding:
                        place_padding(padding[n_states], whole[row.number], row.valid)
                elif row.number not in places:
                    whole[row.number] = nan
            n_states += field.is_states
            made.append(whole)
        if self.kind in (tuple, list):
            return self.kind(made)
        if self.kind is Tensor:
            return made[0]
        return self.kind(**{field.name: value for field, value in zip(self.fields, made, strict=True)})


def _owned(field: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, normal and without gradient also in inference mode, with a storage of its own size."""
    if not field.is_inference():
        return field.detach().to(device)
    with torch.inference_mode(False):
        return torch.empty(field.shape, dtype=field.dtype, device=device).copy_(field)


def parts_of(output: Any) -> dict[Any, Any]:
    """What an output holds, by name or place."""
    if isinstance(output, Mapping):
        return dict(output)
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {0: output}
