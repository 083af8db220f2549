"""A block of tokens with what was computed for it, and slabs, in which blocks lie side by side.

What is stored of a prompt is copied into slabs, and a hit joins slabs: blocks in tensors of their own would be many
small copies.

Sizes: L layers, H K/V heads, n tokens of a slab, b of a block, D_h width of a head, D hidden width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from llmcache.request.rows import Scope

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

    def block(self, ids: bytes, scope: Scope, begin: int, n_tokens: int) -> "Block":
        """A block that lies here."""
        end = begin + n_tokens
        return Block(ids, scope, *self.cut(begin, end), slab=self, begin=begin, end=end)

    def place(self, block: "Block", begin: int) -> "Block":
        """A block that is copied here, with what it has besides."""
        end = begin + block.n_tokens
        keys, values, states = self.cut(begin, end)
        return replace(block, keys=keys, values=values, states=states, slab=self, begin=begin, end=end)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What was computed for b tokens. Normal tensors that nobody writes to."""

    ids: bytes  # packed
    scope: Scope
    keys: Tensor  # (L, H, b, D_h)
    values: Tensor  # (L, H, b, D_h)
    states: Tensor  # the trunk's output (1, b, D)
    is_tail: bool = False  # it ends a request; b is then any number
    padding: Mapping[str, Tensor] = field(default_factory=dict)  # likewise, of a tail's places that are not valid
    layout: bytes = b""  # of that padding; see `Row.layout`
    slab: Slab | None = None  # that its tensors lie in; None: in none
    begin: int = 0  # its first token's place there
    end: int = 0  # after its last token

    @classmethod
    def of(cls, ids: bytes, scope: Scope, tensors: Mapping[str, Tensor], is_tail: bool, layout: bytes) -> "Block":
        """The block that has these tensors; see `tensors`."""
        padding = {n.removeprefix(PADDING): one for n, one in tensors.items() if n.startswith(PADDING)}
        keys, values, states = (tensors[name] for name in NAMES)
        return cls(ids, scope, keys, values, states, is_tail, padding, layout)

    @property
    def n_tokens(self) -> int:
        return self.states.shape[-2] if self.slab is None else self.end - self.begin

    @property
    def tensors(self) -> dict[str, Tensor]:
        padding = {f"{PADDING}{name}": tensor for name, tensor in self.padding.items()}
        return {"keys": self.keys, "values": self.values, "states": self.states, **padding}

    @property
    def nbytes(self) -> int:
        """Its own share of a slab alone."""
        of_padding = sum(tensor.nbytes for tensor in self.padding.values())
        return self.keys.nbytes + self.values.nbytes + self.states.nbytes + of_padding

    def first(self, n_tokens: int) -> "Block":
        """What it has of its first tokens, not copied."""
        keys, values, states = (x[..., :n_tokens, :] for x in (self.keys, self.values, self.states))
        return replace(self, keys=keys, values=values, states=states, end=self.begin + n_tokens)

    def lies_before(self, other: "Block") -> bool:
        """Whether another one lies in the same slab, right after it."""
        return self.slab is not None and self.slab is other.slab and self.end == other.begin

    def is_equal(self, other: "Block") -> bool:
        """Whether another one holds the same, bit for bit."""
        mine, theirs = self.tensors, other.tensors
        is_alike = (self.ids, self.layout, mine.keys()) == (other.ids, other.layout, theirs.keys())
        return is_alike and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def first_tokens(blocks: Iterable[Block], n_tokens: int) -> list[Block]:
    """Of blocks, those that hold so many tokens; the last is cut, not copied."""
    found: list[Block] = []
    for block in blocks:
        if n_tokens < block.n_tokens:
            if n_tokens:
                found.append(block.first(n_tokens))
            break
        found.append(block)
        n_tokens -= block.n_tokens
    return found


def runs(blocks: Sequence[Block]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and states of blocks that follow one another; what lies side by side in a slab is one piece."""
    joined: list[list[Block]] = []
    for block in blocks:
        if joined and joined[-1][-1].lies_before(block):
            joined[-1].append(block)
        else:
            joined.append([block])
    return [_piece(run[0], run[-1]) for run in joined]


def lay_together(blocks: Sequence[Block]) -> tuple[Slab, list[Block]]:
    """A slab of their own for blocks that follow one another, and the same blocks in it."""
    with torch.inference_mode(False), torch.no_grad():
        slab = Slab(*(torch.cat(pieces, dim=-2) for pieces in zip(*runs(blocks), strict=True)))
    ends = accumulate(block.n_tokens for block in blocks)
    return slab, [slab.place(block, end - block.n_tokens) for block, end in zip(blocks, ends, strict=True)]


def _piece(first: Block, last: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and states of blocks of one slab, from the first to the last; or of one alone."""
    if first is last or first.slab is None:
        return first.keys, first.values, first.states
    return first.slab.cut(first.begin, last.end)
