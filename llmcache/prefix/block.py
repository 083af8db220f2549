"""A block of tokens with what was computed for it, and slabs, in which blocks lie side by side.

What is stored of a prompt is copied into slabs, and a hit joins slabs: blocks in tensors of their own would be many
small copies.

A block's key covers all that its states depend on, so also every block before it. As in vLLM's automatic prefix caching
(block hash of parent hash, tokens and extra keys), but that the root, not each block, takes in what is not tokens.

Sizes: L layers, H K/V heads, n tokens of a slab, b of a block, D_h width of a head, D hidden width.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llmcache.request.prefill import Link
from llmcache.request.rows import Row, Scope, key_of

NAMES = ("keys", "values", "states")
PADDING = "padding."  # begins the names of what lies at places that are not valid, in files


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """What was computed for n tokens in a row. Normal tensors that nobody writes to."""

    keys: Tensor  # (L, H, n, D_h)
    values: Tensor  # (L, H, n, D_h)
    states: Tensor  # the trunk's output (1, n, D)

    @property
    def n_tokens(self) -> int:
        return self.states.shape[-2]

    def cut(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and states of some of the tokens, not copied."""
        places = slice(begin, end)
        return self.keys[..., places, :], self.values[..., places, :], self.states[..., places, :]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What was computed for b tokens: a part of a slab."""

    ids: bytes  # packed
    scope: Scope
    slab: Slab
    begin: int  # its first token's place in the slab
    end: int  # after its last token
    is_tail: bool = False  # it ends a request; b is then any number
    padding: Mapping[str, Tensor] = field(default_factory=dict)  # likewise, of a tail's places that are not valid
    layout: bytes = b""  # of that padding; see `Row.layout`

    @classmethod
    def of(cls, ids: bytes, scope: Scope, tensors: Mapping[str, Tensor], is_tail: bool, layout: bytes) -> "Block":
        """The block that has these tensors, in a slab of its own; see `tensors`."""
        padding = {n.removeprefix(PADDING): one for n, one in tensors.items() if n.startswith(PADDING)}
        slab = Slab(*(tensors[name] for name in NAMES))
        return cls(ids, scope, slab, 0, slab.n_tokens, is_tail, padding, layout)

    @property
    def n_tokens(self) -> int:
        return self.end - self.begin

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its keys, values and states (..., b, width), not copied, and its padding."""
        own = dict(zip(NAMES, self.slab.cut(self.begin, self.end), strict=True))
        return own | {f"{PADDING}{name}": tensor for name, tensor in self.padding.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of its own share of the slab, and of its padding."""
        of_slab = self.slab.keys.nbytes + self.slab.values.nbytes + self.slab.states.nbytes
        of_padding = sum(tensor.nbytes for tensor in self.padding.values())
        return of_slab * self.n_tokens // max(1, self.slab.n_tokens) + of_padding

    def is_equal(self, other: "Block") -> bool:
        """Whether another one holds the same, bit for bit."""
        mine, theirs = self.tensors, other.tensors
        is_alike = (self.ids, self.layout, mine.keys()) == (other.ids, other.layout, theirs.keys())
        return is_alike and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def links(scope: Scope, row: Row, size: int) -> tuple[Link, ...]:
    """The full blocks of a request, first to last; tokens that do not fill a block are left out.

    The first n are those of another request exactly where both have the same root (scope, block size, first position)
    and the same first n * size tokens.
    """
    key = hashlib.sha256(f"{row.start}:{size}:".encode() + scope.key).digest()
    width = len(row.ids) // row.n_valid * size
    found = []
    for begin in range(0, len(row.ids) - width + 1, width):
        ids = row.ids[begin : begin + width]
        key = hashlib.sha256(key + ids).digest()
        found.append(Link(key_of(key), ids))
    return tuple(found)


def first_tokens(blocks: Iterable[Block], n_tokens: int) -> list[Block]:
    """The first blocks, with so many tokens together; the last one is cut, not copied."""
    found: list[Block] = []
    for block in blocks:
        if n_tokens < block.n_tokens:
            if n_tokens:
                found.append(replace(block, end=block.begin + n_tokens))
            break
        found.append(block)
        n_tokens -= block.n_tokens
    return found


def runs(blocks: Sequence[Block]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and states of blocks that follow one another; what lies side by side in a slab is one piece."""
    joined: list[tuple[Slab, int, int]] = []
    for block in blocks:
        if joined and joined[-1][0] is block.slab and joined[-1][2] == block.begin:
            joined[-1] = block.slab, joined[-1][1], block.end
        else:
            joined.append((block.slab, block.begin, block.end))
    return [slab.cut(begin, end) for slab, begin, end in joined]


def lay_together(blocks: Sequence[Block]) -> list[Block]:
    """Blocks that follow one another, side by side in a slab of their own."""
    with torch.inference_mode(False), torch.no_grad():
        slab = Slab(*(torch.cat(pieces, dim=-2) for pieces in zip(*runs(blocks), strict=True)))
    laid, begin = list[Block](), 0
    for block in blocks:
        laid.append(replace(block, slab=slab, begin=begin, end=begin + block.n_tokens))
        begin = laid[-1].end
    return laid
