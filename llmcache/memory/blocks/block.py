"""A block of tokens with its K/V and states, and slabs: tensors in which blocks lie side by side, to be copied at once.

A block's key covers everything that its states depend on, every earlier block included. As in vLLM's automatic prefix
caching (block hash of parent hash, tokens and extra keys), except that only the root hash covers what is not tokens.

Sizes: L layers, H K/V heads, n tokens of a slab, b of a block, D_h width of a head, D hidden width.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llmcache.request.rows import Row, Scope, key_of

NAMES = ("keys", "values", "states")
PADDING = "padding."  # prefix, in stored files, of the names of tensors at padded positions


@dataclass(frozen=True, slots=True)
class Link:
    """One full block of a request, or its tail: the tokens after its last full block."""

    #: SHA-256 (base64) over scope, block size, first position and all tokens up to its end; of a tail, the exact key.
    key: str
    ids: bytes  # packed token ids; compared on a hit


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """K/V and states of n consecutive tokens. No inference tensors; never modified."""

    keys: Tensor  # (L, H, n, D_h)
    values: Tensor  # (L, H, n, D_h)
    states: Tensor  # the trunk's output (1, n, D)

    @property
    def n_tokens(self) -> int:
        return self.states.shape[-2]

    def cut(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of keys, values and states of the tokens from `begin` to before `end`."""
        places = slice(begin, end)
        return self.keys[..., places, :], self.values[..., places, :], self.states[..., places, :]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """K/V and states of b tokens: a part of a slab."""

    ids: bytes  # packed token ids
    scope: Scope
    slab: Slab
    begin: int  # position of its first token in the slab
    end: int  # position after its last token
    is_tail: bool = False  # whether it ends a request; b is then any number
    padding: Mapping[str, Tensor] = field(default_factory=dict)  # keys, values and states of a tail's padding
    layout: bytes = b""  # layout of that padding; see `Row.layout`

    @classmethod
    def of(cls, ids: bytes, scope: Scope, tensors: Mapping[str, Tensor], is_tail: bool, layout: bytes) -> "Block":
        """Make a block from its `tensors`, in a slab of its own."""
        padding = {n.removeprefix(PADDING): one for n, one in tensors.items() if n.startswith(PADDING)}
        slab = Slab(*(tensors[name] for name in NAMES))
        return cls(ids, scope, slab, 0, slab.n_tokens, is_tail, padding, layout)

    @property
    def n_tokens(self) -> int:
        return self.end - self.begin

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Views of its keys, values and states (..., b, width), and its padding."""
        own = dict(zip(NAMES, self.slab.cut(self.begin, self.end), strict=True))
        return own | {f"{PADDING}{name}": tensor for name, tensor in self.padding.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of its part of the slab and of its padding."""
        of_slab = self.slab.keys.nbytes + self.slab.values.nbytes + self.slab.states.nbytes
        of_padding = sum(tensor.nbytes for tensor in self.padding.values())
        return of_slab * self.n_tokens // max(1, self.slab.n_tokens) + of_padding

    def is_equal(self, other: "Block") -> bool:
        """Whether another block has the same tokens and layout and bit-identical tensors."""
        mine, theirs = self.tensors, other.tensors
        is_alike = (self.ids, self.layout, mine.keys()) == (other.ids, other.layout, theirs.keys())
        return is_alike and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def links(scope: Scope, row: Row, size: int, start: int) -> tuple[Link, ...]:
    """Return the keys and tokens of a request's full blocks, first to last, without an incomplete last block.

    Tokens that an activated LoRA applies to are left out. `start` is the position of the first token in the blocks.

    Two requests have the same first n links if and only if they have the same root (scope, block size, first position)
    and the same first n * size tokens.
    """
    key = hashlib.sha256(f"{start}:{size}:".encode() + scope.key).digest()
    all_ids, width = row.plain_ids, row.id_width * size
    chain = []
    for begin in range(0, len(all_ids) - width + 1, width):
        ids = all_ids[begin : begin + width]
        key = hashlib.sha256(key + ids).digest()
        chain.append(Link(key_of(key), ids))
    return tuple(chain)


def first_tokens(blocks: Iterable[Block], n_tokens: int) -> list[Block]:
    """Return the blocks of the first `n_tokens` tokens. The last block is shortened, not copied."""
    first: list[Block] = []
    for block in blocks:
        if n_tokens < block.n_tokens:
            if n_tokens:
                first.append(replace(block, end=block.begin + n_tokens))
            break
        first.append(block)
        n_tokens -= block.n_tokens
    return first


def runs(blocks: Sequence[Block]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return views of keys, values and states of consecutive blocks; neighbours in a slab are merged."""
    joined: list[tuple[Slab, int, int]] = []
    for block in blocks:
        if joined and joined[-1][0] is block.slab and joined[-1][2] == block.begin:
            joined[-1] = block.slab, joined[-1][1], block.end
        else:
            joined.append((block.slab, block.begin, block.end))
    return [slab.cut(begin, end) for slab, begin, end in joined]


def lay_together(blocks: Sequence[Block]) -> list[Block]:
    """Copy consecutive blocks side by side into a new slab."""
    with torch.inference_mode(False), torch.no_grad():
        slab = Slab(*(torch.cat(pieces, dim=-2) for pieces in zip(*runs(blocks), strict=True)))
    laid, begin = list[Block](), 0
    for block in blocks:
        laid.append(replace(block, slab=slab, begin=begin, end=begin + block.n_tokens))
        begin = laid[-1].end
    return laid


def common_prefix(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two byte strings."""
    n = min(len(one), len(other))
    differing = int.from_bytes(one[:n]) ^ int.from_bytes(other[:n])
    return n - (differing.bit_length() + 7) // 8
