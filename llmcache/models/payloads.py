"""What an entry keeps of one row's hidden states, and how it is put back.

A pooled head reads one vector, so `cls`, `last` and `mean` keep one row whatever the length; such an entry fits any
request. `sequence` keeps every valid token and fits only rows with as many. Tokens that are not valid come back as
zeros, unless their states are known; all that `cls` and `last` do not keep comes back as NaN: the head does not read
it, and whatever else does shall not take it for a state.

Sizes: T tokens of the row, n valid ones, D hidden width.
"""

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcache.arrays import Positions


class Payload(ABC):
    """How one row is taken from, and put back into, a layer's output."""

    name: str
    fits_any_length = True
    after_norm = False

    @abstractmethod
    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        """A copy of the rows (R, D) to keep of hidden states (T, D): later layers may write to theirs in place."""

    @abstractmethod
    def place(self, kept: Tensor, hidden: Tensor, valid: Positions) -> None:
        """Write kept rows (R, D) into hidden states (T, D), and something into every other row."""


class Sequence(Payload):
    """Every valid token: R = n."""

    name = "sequence"
    fits_any_length = False

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        return hidden[_index(valid, hidden)].clone()

    def place(self, kept: Tensor, hidden: Tensor, valid: Positions) -> None:
        if len(kept) < len(hidden):
            hidden.zero_()
        hidden[_index(valid, hidden)] = kept


class Cls(Payload):
    """The first row, which [CLS] heads read."""

    name = "cls"

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        return hidden[:1].clone()

    def place(self, kept: Tensor, hidden: Tensor, valid: Positions) -> None:
        hidden.fill_(torch.nan)
        hidden[:1] = kept


class Last(Payload):
    """The last valid row, which causal classifiers read."""

    name = "last"

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        row = last_valid(valid)
        return hidden[row : row + 1].clone()

    def place(self, kept: Tensor, hidden: Tensor, valid: Positions) -> None:
        hidden.fill_(torch.nan)
        hidden[last_valid(valid)] = kept[0]


class Mean(Payload):
    """The mean over valid tokens, after the final norm where there is one.

    Put back on every valid token, so that the mean comes out the same for any length and mask. Taken before the norm
    it would not: a norm of a mean is not the mean of norms.
    """

    name = "mean"
    after_norm = True

    def take(self, hidden: Tensor, valid: Positions) -> Tensor:
        return hidden[_index(valid, hidden)].mean(dim=0, keepdim=True)

    def place(self, kept: Tensor, hidden: Tensor, valid: Positions) -> None:
        hidden.zero_()
        hidden[_index(valid, hidden)] = kept


PAYLOADS: dict[str, type[Payload]] = {payload.name: payload for payload in (Sequence, Cls, Last, Mean)}


def last_valid(valid: Positions) -> int:
    return valid.stop - 1 if isinstance(valid, slice) else int(valid[-1])


def head_reads_padding(reads: str, valid: Positions, ids: NDArray[np.int64], pad_id: int | None) -> bool:
    """Whether the head would read a token that is not kept, or not the one that is.

    Heads that read the `first` row read place 0 even where that is padding. Causal classifiers of transformers read the
    `last` token whose id is not the padding id (the very last one when there is no padding id), whatever the mask says.
    """
    if reads == "first":
        return (valid.start if isinstance(valid, slice) else int(valid[0])) != 0
    if reads == "last":
        not_pad = np.arange(len(ids)) if pad_id is None else np.flatnonzero(ids != pad_id)
        return len(not_pad) == 0 or int(not_pad[-1]) != last_valid(valid)
    return False


def cosine_distance(x: Tensor, y: Tensor) -> float:
    """Mean over rows of 1 - cosine, 0 to 2, of two payloads (R, D) on any devices; a row of zeros is 1 from all.

    2 where a value is not finite: such states stand for nothing. Computed on the host, as some devices lack float64.
    """
    cosine = torch.nn.functional.cosine_similarity(x.cpu().double(), y.cpu().double(), dim=-1)
    distance = 1.0 - float(cosine.mean())
    return max(0.0, distance) if math.isfinite(distance) else 2.0  # rounding may put a cosine over 1


def padding_of(valid: Positions, n_tokens: int) -> NDArray[np.int64]:
    """The places of a row of T tokens that are not valid, in order."""
    is_padding = np.ones(n_tokens, np.bool_)
    is_padding[valid] = False
    return np.flatnonzero(is_padding)


def place_padding(padding: Tensor | None, hidden: Tensor, valid: Positions) -> None:
    """Write the states (T - n, D) of places that are not valid into hidden states (T, D), if they are known."""
    if padding is not None:
        hidden[_index(padding_of(valid, len(hidden)), hidden)] = padding.to(hidden.device)


def _index(valid: Positions, like: Tensor) -> slice | Tensor:
    return valid if isinstance(valid, slice) else torch.as_tensor(valid, device=like.device)
