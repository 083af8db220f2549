"""What is known of one request, and the forms in which it is handed out."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llmcache.arrays import Floats
from llmcache.banks.entry import Entry
from llmcache.matching.partition import IndexSlot
from llmcache.request.rows import Scope

KV = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class StoredState:
    """A stored state, decoded."""

    hidden: Tensor  # rows (R, D)
    kv: KV  # (H, n, D_h) of the valid tokens, by layer that it stands for
    padding: Tensor | None = None  # the other rows (T - n, D) where they are kept
    padding_kv: KV = field(default_factory=dict)  # (H, T - n, D_h) of these
    layout: bytes = b""  # digest of what these are made of, where the key does not cover that


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a saved block of tokens stands."""

    before: str | None  # key of the block before it; None for the first of a chain
    is_tail: bool  # it ends a request


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """All that is held of one request, or of one block of tokens, for saving and restoring."""

    key: str
    scope: Scope
    ids: bytes  # packed
    dtype: torch.dtype  # of its states as the model made them
    entries: dict[int, Entry]  # encoded, by layer; the tensors of a block are those of layer 0
    slots: tuple[IndexSlot, ...]  # where it is found
    answer: Floats | None = None  # signature (S,)
    is_pinned: bool = False
    layout: bytes = b""  # see `Row.layout`
    place: BlockPlace | None = None  # None for a request of the banks


@dataclass(slots=True, eq=False)
class StoredRequest:
    """What is known of one stored request besides its states; see `SavedRequest`."""

    scope: Scope
    ids: bytes
    dtype: torch.dtype
    layout: bytes = b""
    answer: Floats | None = None  # signature (S,), once the model has given it
    is_pinned: bool = False
    n_puts: int = 0  # how often its entries were put: of two reads with the same number in between, none was

    def within(self, record: SavedRequest) -> SavedRequest:
        """A record of its states, with what is known of it."""
        return replace(record, answer=self.answer, is_pinned=self.is_pinned)

    def record(self, key: str, entries: dict[int, Entry], slots: tuple[IndexSlot, ...]) -> SavedRequest:
        return SavedRequest(
            key, self.scope, self.ids, self.dtype, entries, slots, self.answer, self.is_pinned, self.layout
        )
