"""What is known of one request, and the forms in which it is handed out."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmcache.arrays import Floats
from llmcache.banks.stores import Entry
from llmcache.matching.partition import IndexSlot
from llmcache.request.rows import Scope

KV = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class StoredState:
    """A stored state, decoded: hidden rows (R, D) and the K/V (H, n, D_h) of the layers it stands for.

    Attributes:
        hidden: Rows (R, D).
        kv: Of valid tokens.
        padding: The other rows (T - n, D) where they are kept, else None.
        padding_kv: K/V (H, T - n, D_h) of these.
        layout: Digest of what these are made of, where the key does not cover that.
    """

    hidden: Tensor
    kv: KV
    padding: Tensor | None = None
    padding_kv: KV = field(default_factory=dict)
    layout: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a saved block of tokens stands.

    Attributes:
        before: Key of the block before it; None for the first of a chain.
        is_tail: It ends a request.
    """

    before: str | None
    is_tail: bool


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """All that is held of one request, or of one block of tokens, for saving and restoring.

    Attributes:
        key: Its exact key.
        scope: Its scope.
        ids: Its packed token ids.
        dtype: Dtype of its states as the model made them.
        entries: Encoded states by layer.
        slots: Where it is found.
        answer: Signature of its answer (S,), where that is known.
        is_pinned: Nothing makes it leave.
        layout: Of the padding that its states hold; see `Row.layout`.
        place: Of a block, whose tensors are those of `entries[0]`; None for a request of the banks.
    """

    key: str
    scope: Scope
    ids: bytes
    dtype: torch.dtype
    entries: dict[int, Entry]
    slots: tuple[IndexSlot, ...]
    answer: Floats | None = None
    is_pinned: bool = False
    layout: bytes = b""
    place: BlockPlace | None = None


class StoredRequest:
    """What is known of one stored request besides its states."""

    __slots__ = ("answer", "dtype", "ids", "is_pinned", "layout", "n_puts", "scope")

    def __init__(self, scope: Scope, ids: bytes, dtype: torch.dtype, layout: bytes = b"") -> None:
        """What is known when it is stored.

        Args:
            scope: Its scope.
            ids: Its packed token ids.
            dtype: Dtype of its states as the model made them.
            layout: Of the padding that its states hold; see `Row.layout`.
        """
        self.scope = scope
        self.ids = ids
        self.dtype = dtype
        self.layout = layout
        self.answer: Floats | None = None  # signature (S,), once the model has given it
        self.is_pinned = False
        self.n_puts = 0  # how often its entries were put: of two reads with the same number in between, none was

    def record(self, key: str, entries: dict[int, Entry], slots: tuple[IndexSlot, ...]) -> SavedRequest:
        """All that is held of it.

        Args:
            key: Its exact key.
            entries: Its encoded states by layer.
            slots: Where it is found.
        """
        return SavedRequest(
            key, self.scope, self.ids, self.dtype, entries, slots, self.answer, self.is_pinned, self.layout
        )
