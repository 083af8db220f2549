"""Computes prompts as a radix tree of their tokens: a beginning that several rows share is computed once.

    rows of tokens -> segments -> steps, each one forward of the trunk -> columns of K/V and states

A step runs consecutive segments in a batch of one row, without padding: a mask lets each token attend to its own
ancestors alone, and position ids say where it stands. So the trunk computes each different token once. The K/V of
ancestors comes from earlier steps, or from blocks of earlier calls. A trunk that cannot run several segments in one row
runs each in a step of its own.

Sizes: B rows, T tokens per row (padding included), n tokens of a segment, N tokens of a step, P columns of its K/V
cache, L layers, H K/V heads, D_h width of a head, D hidden width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from llmcache.calls.kv_fill import fill, last_states
from llmcache.memory.blocks.block import Slab, common_prefix
from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.segments import run_segments
from llmcache.support.arrays import Ids

#: Most tokens of a step that runs several segments. Attention is computed between all of them: the time of 1,628 tokens
#: of 24 documents was the same for 256 and 512, and 1.07 times that for 1,024 (SmolLM2-135M, one thread).
_STEP = {"cpu": 256}
_STEP_ON_DEVICE = 2048
#: Largest share of a batch's columns that is run as a tree: rows without common tokens take 1.15 times a batch's time.
PAYS = 0.85


@dataclass(eq=False, slots=True)
class Columns:
    """K/V and states of consecutive tokens. Not modified."""

    keys: Sequence[Tensor]  # by layer, (H, n, D_h)
    values: Sequence[Tensor]
    states: Tensor  # (1, n, D)

    @property
    def n_tokens(self) -> int:
        return self.states.shape[1]


#: Columns, computed or stored, the first that is meant, and how many.
Part = tuple[Columns | Slab, int, int]
#: Returns the columns of the tokens from a first to before a last one.
Known = Callable[[int, int], Sequence[Part]]


@dataclass(eq=False, slots=True)
class Segment:
    """Consecutive tokens that rows share, after those of its ancestors."""

    ids: Ids
    begin: int  # number of tokens before it
    origin: int  # position of the first token of its rows
    parent: "Segment | None"
    parts: Sequence[Part] | None = None  # that hold it; None: to be computed
    is_inner: bool = False  # others follow it, or its K/V is to be stored

    @property
    def end(self) -> int:
        return self.begin + len(self.ids)

    def path(self) -> list["Segment"]:
        """Return its ancestors and itself, first to last."""
        path: list[Segment] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    def split(self, at: int) -> "Segment":
        """Cut off the tokens before `at`, and return them as a segment, the new parent."""
        before = Segment(self.ids[: at - self.begin], self.begin, self.origin, self.parent, is_inner=True)
        self.ids, self.begin, self.parent = self.ids[at - self.begin :], at, before
        return before


@dataclass(eq=False, slots=True)
class Branch:
    """The tokens of one row, and what is known of them."""

    number: int  # of the row
    ids: Ids  # of its valid tokens
    packed: bytes  # the same
    origin: int  # position of the first token
    n_known: int = 0  # tokens at its beginning that `known` holds
    known: Known | None = None
    n_wanted: int = 0  # tokens at its beginning whose K/V is to be stored
    path: Sequence[Segment] = ()

    def parts(self, begin: int, end: int) -> list[Part]:
        """Return the columns of its tokens from `begin` to before `end`."""
        parts = [part for segment in self.path for part in segment.parts or ()]
        return cut_out(parts, begin, end) or [(*parts[-1][:2], 0)]  # an empty tail

    def n_kept(self) -> int:
        """Return how many tokens at its beginning have K/V."""
        return max((one.end for one in self.path if one.is_inner), default=0)


def cut_out(parts: Iterable[Part], begin: int, end: int) -> list[Part]:
    """Return the tokens of consecutive parts from `begin` to before `end`."""
    found, at = list[Part](), 0
    for columns, first, n in parts:
        low, high = max(begin - at, 0), min(end - at, n)
        if low < high:
            found.append((columns, first + low, high - low))
        at += n
    return found


class Tree:
    """The segments of some rows of a call."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        """Grow the tree from the rows' tokens; nothing is computed."""
        self.branches = {branch.number: branch for branch in branches}
        #: Depth first.
        self.segments = _split(_grow(branches), branches)
        for branch in branches:
            branch.path = branch.path[-1].path()

    @property
    def n_new(self) -> int:
        """Number of tokens to compute."""
        return sum(len(segment.ids) for segment in self.segments if segment.parts is None)

    def cost(self, of_segment: int) -> int:
        """Return what computing takes, in token columns of a batch, with what each segment adds."""
        return self.n_new + of_segment * sum(segment.parts is None for segment in self.segments)

    def served_tokens(self) -> dict[int, int]:
        """Return how many tokens of each row need not be computed, or are computed for an earlier row."""
        seen, served = set[Segment](), {}
        for number, branch in sorted(self.branches.items()):
            own = [one for one in branch.path if one.parts is None and one not in seen]
            served[number] = len(branch.ids) - sum(len(one.ids) for one in own)
            seen.update(own)
        return served

    def steps(self, most: int, packs: bool) -> Iterator[list[Segment]]:
        """Yield the segments to compute, by steps of `most` tokens, or of one segment."""
        step: list[Segment] = []
        for segment in self.segments:
            if segment.parts is not None:
                continue
            if step and (not packs or sum(len(one.ids) for one in step) + len(segment.ids) > most):
                yield step
                step = []
            step.append(segment)
        if step:
            yield step

    def compute(self, run: Callable[..., Any], trunk: Trunk, packs: bool, device: torch.device, keeps_kv: bool) -> Any:
        """Compute all segments; return the output of the last step.

        `run` runs the trunk with named arguments. Without `keeps_kv`, only the K/V of inner segments is kept.
        """
        output, most = None, _STEP.get(device.type, _STEP_ON_DEVICE)
        for step in self.steps(most, packs):
            output = _run(step, run, trunk, device, keeps_kv)
        return output


def _grow(branches: Sequence[Branch]) -> list[Segment]:
    """Return the segments of rows, depth first, and set the last segment of each row's path."""
    segments: list[Segment] = []
    path: list[Segment] = []  # of the row before
    before: Branch | None = None
    for branch in sorted(branches, key=lambda one: (one.origin, one.packed)):
        n_shared = 0
        if before is not None and before.origin == branch.origin:
            width = len(branch.packed) // len(branch.ids)
            n_shared = common_prefix(before.packed, branch.packed) // width
        while path and path[-1].begin >= n_shared:
            path.pop()
        if path and path[-1].end > n_shared:
            lower = path.pop()
            path.append(lower.split(n_shared))
            segments.insert(segments.index(lower), path[-1])
        if n_shared < len(branch.ids):
            if path:
                path[-1].is_inner = True
            path.append(Segment(branch.ids[n_shared:], n_shared, branch.origin, path[-1] if path else None))
            segments.append(path[-1])
        branch.path, before = path[-1:], branch
    return segments


def _split(segments: Sequence[Segment], branches: Iterable[Branch]) -> list[Segment]:
    """Give segments the columns that rows know; split those that are known, or wanted, in part."""
    known: dict[Segment, tuple[int, Branch]] = {}
    wanted: dict[Segment, int] = {}
    for branch in branches:
        for segment in branch.path[-1].path():
            if branch.n_known > known.get(segment, (segment.begin,))[0]:
                known[segment] = min(branch.n_known, segment.end), branch
            wanted[segment] = max(wanted.get(segment, 0), min(branch.n_wanted, segment.end))
    split = []
    for segment in segments:
        end, source = known.get(segment, (segment.begin, None))
        if source is not None and source.known is not None:
            upper = segment if end == segment.end else segment.split(end)
            upper.parts = source.known(upper.begin, end)
            split.append(upper)
        if segment.parts is None:
            if segment.begin < (end := wanted[segment]):
                upper = segment if end == segment.end else segment.split(end)
                upper.is_inner = True
                split += [upper] if upper is not segment else []
            split.append(segment)
    return split


def _run(step: Sequence[Segment], run: Callable[..., Any], trunk: Trunk, device: torch.device, keeps_kv: bool) -> Any:
    """Compute segments in one forward; return the trunk's output."""
    paths = {segment: segment.path() for segment in step}
    past = [*dict.fromkeys(one for path in paths.values() for one in path if one.parts is not None)]
    shown = (*past, *step)
    firsts = dict(zip(shown, accumulate((len(one.ids) for one in shown), initial=0), strict=False))
    n_past, kv_cache = sum(len(one.ids) for one in past), DynamicCache()
    parts = [part for one in past for part in one.parts or ()]
    for layer in range(trunk.depth if past else 0):
        keys, values = (
            [getattr(columns, name)[layer][None, :, first : first + n].to(device) for columns, first, n in parts]
            for name in ("keys", "values")
        )
        fill(kv_cache, layer, keys, values)
    ids = torch.from_numpy(np.concatenate([one.ids for one in step]))[None].to(device)
    places = [np.arange(one.origin + one.begin, one.origin + one.end) for one in step]
    positions = torch.from_numpy(np.concatenate(places))[None].to(device)
    if all(one.parent is before for one, before in zip(shown, (None, *shown), strict=False)):  # one text
        output = run(input_ids=ids, attention_mask=None, position_ids=positions, **{CACHE: kv_cache})
    else:
        sees = _sees(step, paths, firsts, n_past).to(device)
        output = run_segments(run, ids, positions, kv_cache, sees, trunk)
    layers, states = kv_cache.layers, last_states(output)
    if states is None:
        raise TypeError("the trunk returned another kind of output than states and K/V")
    kept = layers if keeps_kv or any(one.is_inner for one in step) else ()
    keys, values = ([_after(getattr(one, name)[0], n_past) for one in kept] for name in ("keys", "values"))
    columns = Columns(keys, values, states)
    for segment in step:
        segment.parts = [(columns, firsts[segment] - n_past, len(segment.ids))]
    return output


def _sees(
    step: Sequence[Segment], paths: Mapping[Segment, Sequence[Segment]], firsts: Mapping[Segment, int], n_past: int
) -> Tensor:
    """Return which columns each token of a step attends to, bool (N, P + N)."""
    n_new = sum(len(one.ids) for one in step)
    sees = torch.zeros(n_new, n_past + n_new, dtype=torch.bool)
    for segment in step:
        first, n = firsts[segment], len(segment.ids)
        rows = sees[first - n_past : first - n_past + n]
        for one in paths[segment][:-1]:
            rows[:, firsts[one] : firsts[one] + len(one.ids)] = True
        rows[:, first : first + n] = torch.ones(n, n, dtype=torch.bool).tril()
    return sees


def _after(columns: Tensor, n_past: int) -> Tensor:
    """Return K/V (H, n, D_h) without its first columns, which are then freed."""
    return columns[:, n_past:].clone() if n_past else columns


def stack(parts: Sequence[Part], name: str, depth: int) -> Tensor:
    """Return keys or values of consecutive parts in all layers, copied together (L, H, n, D_h)."""
    layers = (
        [getattr(columns, name)[layer][:, first : first + n] for columns, first, n in parts] for layer in range(depth)
    )
    return torch.stack([torch.cat(pieces, dim=1) for pieces in layers])


class Pool:
    """All columns of a call, each once, from which its rows are laid out."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """Begin with rows (B, T) of padding."""
        self.index = np.zeros(shape, np.int64)  # 0: padding
        self._firsts: dict[Columns | Slab, int] = {}  # index of the first of some columns
        self._n = 1

    def add(self, columns: Columns | Slab) -> int:
        """Return the index of the first of some columns, added if they are new."""
        if columns not in self._firsts:
            self._firsts[columns] = self._n
            self._n += columns.n_tokens
        return self._firsts[columns]

    def place(self, number: int, where: Any, parts: Iterable[Part]) -> None:
        """Lay parts one after another into positions `where` of a row."""
        places = [np.arange(at := self.add(columns) + first, at + n) for columns, first, n in parts]
        self.index[number, where] = np.concatenate(places)

    def states(self, device: torch.device) -> Tensor:
        """Return the different states (N, D), first a row of zeros for padding."""
        states = [one.states[0].to(device) for one in self._firsts]
        return torch.cat([states[-1].new_zeros(1, states[-1].shape[-1]), *(one.to(states[-1].dtype) for one in states)])

    def layer(self, name: str, layer: int, index: Tensor) -> Tensor:
        """Return keys or values of one layer, laid out by an index (B, T): (B, H, T, D_h)."""
        parts = [getattr(one, name)[layer] for one in self._firsts]
        like = parts[-1]
        zeros = like.new_zeros(like.shape[0], 1, like.shape[-1], device=index.device)
        distinct = torch.cat([zeros, *(part.to(zeros) for part in parts)], dim=-2)
        laid = distinct.index_select(1, index.flatten())  # half the time of `distinct[:, index]`
        return laid.view(len(zeros), *index.shape, -1).transpose(0, 1)
