"""Takes a trunk's output apart into rows to keep, and makes outputs of kept rows.

A trunk returns a `ModelOutput`, a tuple, a list or a tensor. Each tensor in it has one row per request: hidden states
(B, T, D), of which the payload keeps what the head reads, or anything else (B, ...), which is kept as it is.

A pooled head reads one vector, so the payloads `cls`, `last` and `mean` keep one row whatever the length; such an entry
fits any request. `sequence` keeps every valid token and fits only rows with as many. Tokens that are not valid come
back as zeros, unless their states are known. What `cls` and `last` do not keep comes back as NaN: the head does not
read it, and other code must not take it for a state.

Sizes: B rows of a call, T tokens of a row (padding included), n of them valid, D hidden width.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils.generic import ModelOutput

from llmcache.models.output_formats import name_of, type_of
from llmcache.support.arrays import Positions

#: The kept tensors of one row, one for each field of the output, in order.
Fields = tuple[Tensor, ...]
STATES = "last_hidden_state"
_NAMED = (STATES, "pooler_output")


class Payload(ABC):
    """How one row is taken from a layer's output and put back."""

    name: str
    fits_any_length = True
    after_norm = False
    has_states = True  # the output has hidden states (B, T, D), and they come first

    @abstractmethod
    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        """Return the rows (R, D) to keep of hidden states (T, D); they may be a view."""

    @abstractmethod
    def place(self, kept: Sequence[Tensor], valid: Sequence[Positions], n_tokens: int) -> Tensor:
        """Return hidden states (S, T, D) of S requests, from the kept rows (R, D) and valid positions of each."""


class EveryToken(Payload):
    """Every valid token: R = n."""

    name = "sequence"
    fits_any_length = False

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        return hidden[_index(valid, hidden)]

    def place(self, kept: Sequence[Tensor], valid: Sequence[Positions], n_tokens: int) -> Tensor:
        if all(len(one) == n_tokens for one in kept):
            return torch.stack([*kept])
        hidden = kept[0].new_zeros((len(kept), n_tokens, kept[0].shape[1]))
        for row, one, where in zip(hidden, kept, valid, strict=True):
            row[_index(where, row)] = one
        return hidden


class Cls(Payload):
    """The first row, which [CLS] heads read."""

    name = "cls"

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        return hidden[:1]

    def place(self, kept: Sequence[Tensor], valid: Sequence[Positions], n_tokens: int) -> Tensor:
        # A single PyTorch function for all requests: each is slow the first time after a model ran.
        rest = _nan(n_tokens - 1, kept[0].shape[1], kept[0].dtype, kept[0].device)
        hidden = torch.cat([part for one in kept for part in (one, rest)])
        return hidden[None] if len(kept) == 1 else hidden.view(len(kept), n_tokens, -1)


class Last(Payload):
    """The last valid row, which causal classifiers read."""

    name = "last"

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        row = last_valid(valid)
        return hidden[row : row + 1]

    def place(self, kept: Sequence[Tensor], valid: Sequence[Positions], n_tokens: int) -> Tensor:
        last = torch.cat([*kept])
        hidden = last.new_full((len(kept), n_tokens, last.shape[1]), torch.nan)
        hidden[list(range(len(kept))), list(map(last_valid, valid))] = last
        return hidden


class Mean(Payload):
    """The mean over valid tokens, after the final norm if there is one.

    It is put back on every valid token, so that the head's mean is the same for any length and mask. A mean before the
    norm would not do: a norm of a mean is not the mean of norms.
    """

    name = "mean"
    after_norm = True

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        return hidden[_index(valid, hidden)].mean(dim=0, keepdim=True)

    def place(self, kept: Sequence[Tensor], valid: Sequence[Positions], n_tokens: int) -> Tensor:
        means = torch.cat([*kept])
        hidden = means.new_zeros((len(kept), n_tokens, means.shape[1]))
        for row, mean, where in zip(hidden, means, valid, strict=True):
            row[_index(where, row)] = mean
        return hidden


@lru_cache(maxsize=8)
def _nan(n_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of NaN, shared: only read, never written to or returned to a caller."""
    with torch.inference_mode(False):
        return torch.full((n_rows, width), torch.nan, dtype=dtype, device=device)


class WholeRow(Payload):
    """A callable's output, which holds no states: every part is kept as it is."""

    name = "row"
    has_states = False

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        return hidden

    def place(self, kept: Sequence[Tensor], valid: Sequence[Positions], n_tokens: int) -> Tensor:
        return torch.stack([*kept])


PAYLOADS: dict[str, type[Payload]] = {payload.name: payload for payload in (EveryToken, Cls, Last, Mean, WholeRow)}


def last_valid(valid: Positions) -> int:
    return valid.stop - 1 if isinstance(valid, slice) else int(valid[-1])


def head_reads_padding(reads: str, valid: Positions, ids: NDArray[np.int64], *pad_ids: int | None) -> bool:
    """Whether the head would read another token than the payload keeps, with any of these padding ids.

    Heads that read the `first` row read position 0 even if it is padding. Causal classifiers of transformers read the
    `last` token whose id is not the padding id (the very last one if there is no padding id), whatever the mask says.
    """
    if reads == "first":
        return (valid.start if isinstance(valid, slice) else int(valid[0])) != 0
    if reads == "last":
        read = (np.arange(len(ids)) if one is None else np.flatnonzero(ids != one) for one in pad_ids)
        return any(len(columns) == 0 or int(columns[-1]) != last_valid(valid) for columns in read)
    return False


def cosine_distance(x: Tensor, y: Tensor) -> float:
    """Return the mean over rows of 1 - cosine, 0 to 2, of two payloads (R, D); 2 if a value is not finite.

    Computed on the host, as some devices lack float64.
    """
    cosine = torch.nn.functional.cosine_similarity(x.cpu().double(), y.cpu().double(), dim=-1)
    distance = 1.0 - float(cosine.mean())
    return max(0.0, distance) if math.isfinite(distance) else 2.0  # rounding may put a cosine over 1


def padding_of(valid: Positions, n_tokens: int) -> NDArray[np.int64]:
    """Return the positions of a row of T tokens that are not valid, in order."""
    is_padding = np.ones(n_tokens, np.bool_)
    is_padding[valid] = False
    return np.flatnonzero(is_padding)


def _index(valid: Positions, like: Tensor) -> slice | Tensor:
    return valid if isinstance(valid, slice) else torch.as_tensor(valid, device=like.device)


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of an output for a batch."""

    name: Any  # key in a ModelOutput, index in a tuple
    is_states: bool  # (B, T, D); else (B, *shape)
    shape: tuple[int, ...]  # (D,), or all but the first dimension
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Packing:
    """The form of a trunk's output for calls of one kind, learned from an output."""

    kind: type  # its class
    fields: tuple[Field, ...]  # its tensors, in order
    payload: Payload  # chooses what is kept of hidden states

    @classmethod
    def learn(cls, output: Any, n_rows: int, n_tokens: int, payload: Payload) -> "Packing | None":
        """Return the form of an output for (B, T) tokens; None if it cannot be stored by rows.

        Then a part is not a tensor with one row per request, states (B, T, D) do not come first, or a pooled payload
        could not restore a part for another length.
        """
        fields: list[Field] = []
        for name, value in parts_of(output).items():
            if not isinstance(value, Tensor) or value.ndim < 2 or len(value) != n_rows:
                return None
            is_states = payload.has_states and value.ndim == 3 and value.shape[1] == n_tokens
            is_first = not fields  # hidden states come first in tuples
            if payload.has_states and not is_states and (name == STATES or is_first):
                return None
            may_be_of_length = is_states or name not in (1, *_NAMED)
            if payload.has_states and payload.fits_any_length and may_be_of_length and not is_first:
                return None
            fields.append(Field(name, is_states, tuple(value.shape[2:] if is_states else value.shape[1:]), value.dtype))
        return cls(type(output), tuple(fields), payload) if fields else None

    def describe(self) -> list[Any]:
        """Return a description for `read`, as JSON values."""
        fields = [(one.name, one.is_states, one.shape, str(one.dtype).removeprefix("torch.")) for one in self.fields]
        return [name_of(self.kind), fields]

    @classmethod
    def read(cls, described: Any, payload: Payload) -> "Packing | None":
        """Return the packing that `describe` described; None if its class is not loaded, or is not a model's output."""
        name, fields = described
        kind = type_of(name)
        if kind is None or not (kind in (tuple, list, Tensor) or issubclass(kind, ModelOutput)):
            return None
        read = (Field(name, is_states, tuple(shape), getattr(torch, dtype)) for name, is_states, shape, dtype in fields)
        return cls(kind, tuple(read), payload)

    def fits(self, output: Any, n_rows: int, n_tokens: int) -> bool:
        """Whether an output for (B, T) tokens has this form."""
        parts = parts_of(output)
        if type(output) is not self.kind or [*parts] != [field.name for field in self.fields]:
            return False
        for field, value in zip(self.fields, parts.values(), strict=True):
            shape = (n_rows, n_tokens, *field.shape) if field.is_states else (n_rows, *field.shape)
            if not isinstance(value, Tensor) or value.shape != shape or value.dtype != field.dtype:
                return False
        return True

    def blank(self, n_valid: int, device: torch.device) -> Fields:
        """Return the fields of a row of `n_valid` tokens whose states are unknown: NaN, so that no answer is made."""
        n = 1 if self.payload.fits_any_length else n_valid
        shapes = [(n, *field.shape) if field.is_states else field.shape for field in self.fields]
        with torch.inference_mode(False):
            return tuple(
                torch.full(shape, torch.nan if field.dtype.is_floating_point else 0, dtype=field.dtype, device=device)
                for shape, field in zip(shapes, self.fields, strict=True)
            )

    def take(
        self, output: Any, place: int, valid: Positions, keeps_padding: bool, device: torch.device
    ) -> tuple[Fields, Fields]:
        """Copy the tensors to keep of one request, row `place` of the trunk's output, to `device`.

        Return a tensor for each field, and for each field of states the states (T - n, D) of padding, () if not kept.
        """
        fields: list[Tensor] = []
        padding: list[Tensor] = []
        # Copies are normal tensors without gradients, also in inference mode, with a storage of their own size.
        with torch._C._InferenceMode(False):  # Python's `torch.inference_mode` takes as long as the copies
            for field, value in zip(self.fields, parts_of(output).values(), strict=True):
                own = value[place]
                if field.is_states and keeps_padding:
                    places = torch.from_numpy(padding_of(valid, len(own))).to(value.device)
                    padding.append(_copy(own[places], device))
                fields.append(_copy(self.payload.take(own, valid) if field.is_states else own, device))
        return tuple(fields), tuple(padding)

    def join(
        self,
        valid: Sequence[Positions],
        n_tokens: int,
        kept: Mapping[int, Any],
        output: Any,
        places: Mapping[int, int],
        device: torch.device,
    ) -> Any:
        """Return the output of a call of (B, T) tokens, in new tensors on its device, from hits and computed rows.

        Args:
            valid: The valid positions of each row of the call.
            n_tokens: T.
            kept: The hits by row number, each with `fields` and `padding` as of `take`.
            output: The trunk's output for the other rows; None: every row has a hit.
            places: The index in `output` of each row without a hit, by row number. Equal rows may share one.
            device: Of the call's tensors.
        """
        served = [number for number in range(len(valid)) if number in kept]
        valid_of_served = [valid[number] for number in served]
        computed, order, n_states = [], None, 0
        if output is not None:
            computed, n_served = list(parts_of(output).values()), len(served)
            place_of = {number: place for place, number in enumerate(served)}
            place_of |= {number: n_served + place for number, place in places.items()}
            # Below, served rows come first, then computed ones; `order` brings them into the call's order.
            order = torch.tensor([*map(place_of.__getitem__, range(len(valid)))], device=device)
        joined: list[Tensor] = []
        for place, field in enumerate(self.fields):
            if not served:
                joined.append(computed[place][order])
                continue
            own: Sequence[Tensor] = [kept[number].fields[place] for number in served]
            if own[0].device != device:  # all in one transfer
                own = torch.split(torch.cat([*own]).to(device), [*map(len, own)])
            if field.is_states:
                whole = self.payload.place(own, valid_of_served, n_tokens)
                for row, number in zip(whole, served, strict=True):
                    if padding := kept[number].padding:
                        row[_index(padding_of(valid[number], n_tokens), row)] = padding[n_states].to(device)
                n_states += 1
            else:
                whole = torch.stack([*own])
            joined.append(whole if order is None else torch.cat([whole, computed[place]])[order])
        return make_output(self.kind, {field.name: value for field, value in zip(self.fields, joined, strict=True)})


def make_output(kind: type, values: Mapping[Any, Tensor]) -> Any:
    """Return an output with these parts, by name or index as of `parts_of`; other fields of a class are None."""
    if kind is Tensor:
        return next(iter(values.values()))
    if kind in (tuple, list):
        return kind(values.values())
    if (defaults := _defaults_of(kind)) is None:
        return kind(**values)
    # The same as its constructor, which loops over all fields of the class for each of them.
    output: Any = OrderedDict.__new__(kind)
    vars(output).update(defaults, **values)
    for name, value in values.items():
        OrderedDict.__setitem__(output, name, value)
    return output


@lru_cache(maxsize=64)
def _defaults_of(kind: type) -> dict[str, Any] | None:
    """Return the fields of an output class, all None; None if its constructor does more than set them."""
    is_plain = issubclass(kind, ModelOutput) and kind.__post_init__ is ModelOutput.__post_init__ and is_dataclass(kind)
    return dict.fromkeys(one.name for one in fields_of(kind)) if is_plain else None


def _copy(part: Tensor, device: torch.device) -> Tensor:
    return part.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def parts_of(output: Any) -> dict[Any, Any]:
    """Return the parts of an output by name or index."""
    if isinstance(output, Mapping):
        return dict(output.items())
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {0: output}
