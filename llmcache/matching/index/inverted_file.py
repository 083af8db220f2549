"""An inverted file that grows and shrinks by its lists. N: rows, B: queries, F: dimensions, n: of one list."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcache.arrays import Floats, Ids, product
from llmcache.matching.index.byte import ByteIndex, set_span

_MAX_LISTS = 1 << 16  # faiss takes 4 MB for their heads
_BLOCK = 4096  # rows
_AT_A_TIME = 64  # rows that are added before their lists are looked after
_SAME = 1e-6  # similarities that differ by less
_LONGEST = 128  # rows of a list, while there are less than a million
_NEAR = 48  # lists that a split arranges anew, for each half


class InvertedFile:
    """Lists of rows that are alike, each with a centroid; a search reads the lists of the nearest centroids.

    Centroids and lists are compared by 8 bits a dimension, the best candidates in full. There is no training: a list
    that is too long is split in two and one that is too short is dissolved, so no call moves more rows than some lists
    hold. After a split, the lists near it take one step of k-means, or rows would stay in lists that are no longer
    nearest (as in SPFresh, Xu et al. 2023, section 3.3, which moves single rows by two conditions instead). The same
    calls in the same order find the same rows. No call is safe beside another one: the caller holds a lock.
    """

    def __init__(self, sample: Floats, probes: int, candidates: int) -> None:
        """Start empty; the rows to come are like the sample (N, F), which tells where the first list is."""
        import faiss

        self.dim = int(sample.shape[1])
        self._probes = probes
        self._candidates = candidates
        span = min(1.0, 1.25 * float(np.abs(sample).max()))
        self._centroids = ByteIndex(self.dim, span)
        self._unused = list(range(_MAX_LISTS))[::-1]
        self._anything = faiss.IndexFlatIP(self.dim)  # faiss wants a quantizer, which is never asked
        kind = faiss.ScalarQuantizer.QT_8bit_uniform
        self._faiss: Any = faiss.IndexIVFScalarQuantizer(
            self._anything, self.dim, _MAX_LISTS, kind, faiss.METRIC_INNER_PRODUCT, False
        )
        set_span(self._faiss, span)
        self._lists: Any = self._faiss.invlists
        # Each row has a slot for as long as it is held.
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = Blocks(self.dim)
        self._ids: Ids = np.empty(0, np.int64)
        self._list_of: Ids = np.empty(0, np.int64)
        self._place_of: Ids = np.empty(0, np.int64)  # in its list
        self._open_list(normalised(sample.mean(axis=0)))

    def add(self, ids: Ids, x: Floats) -> None:
        """As `Index.add`, for arguments that were checked."""
        for start in range(0, len(ids), _AT_A_TIME):
            self._add(ids[start : start + _AT_A_TIME].tolist(), x[start : start + _AT_A_TIME])

    def remove(self, ids: Ids) -> None:
        """As `Index.remove`."""
        for name in ids.tolist():
            if name in self._slot_of:
                self._after_a_loss(self._vacate(self._slot_of.pop(name)))

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        """As `Index.search`, for arguments that were checked."""
        width = min(k, len(self))
        ids, similarity = np.full((len(x), width), -1, np.int64), np.full((len(x), width), -np.inf, np.float32)
        if not width or not len(x):
            return ids, similarity
        lists, alike = self._centroids.nearest(x, self._probes)
        self._faiss.nprobe = lists.shape[1]
        _, found = self._faiss.search_preassigned(x, max(self._candidates, 2 * width), lists, alike)
        for i, slots in enumerate(found):
            slots = slots[slots >= 0]
            exactly = product(self._rows.take(slots), x[i])
            best = np.argsort(-exactly, kind="stable")[:width]
            ids[i, : len(best)], similarity[i, : len(best)] = self._ids[slots[best]], exactly[best]
        return ids, similarity

    def vectors(self, ids: Ids) -> Floats:
        """As `Index.vectors`."""
        return self._rows.take(np.array([self._slot_of[name] for name in ids.tolist()], np.int64))

    def ids(self) -> Ids:
        """Ids held (N,), oldest first."""
        return np.fromiter(self._slot_of, np.int64)

    def __contains__(self, name: int) -> bool:
        return name in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, codes and slots, and of centroids."""
        return len(self) * (5 * self.dim + 4 * 8) + self._centroids.nbytes

    @property
    def _longest(self) -> int:
        """Most rows of a list. Short lists overlook less, but there are more centroids to compare."""
        return max(_LONGEST, int(0.12 * len(self) ** 0.5))

    def _add(self, names: Sequence[int], rows: Floats) -> None:
        nearest = self._centroids.nearest(rows, 1)[0][:, 0].tolist()
        codes = self._faiss.sq.compute_codes(rows)
        left = []
        for name, row, code, number in zip(names, rows, codes, nearest, strict=True):
            old = self._slot_of.get(name)
            self._insert(name, row, code, number)
            if old is not None:
                left.append(self._vacate(old))
        for number in dict.fromkeys(nearest):
            if self._lists.list_size(number) > self._longest:
                self._split(number)
        for number in left:
            self._after_a_loss(number)

    def _insert(self, name: int, row: Floats, code: npt.NDArray[Any], number: int) -> None:
        slot = self._free[-1] if self._free else len(self)
        if slot == len(self._ids):
            self._ids, self._list_of, self._place_of = (
                np.concatenate([held, np.empty(slot // 4 + 64, np.int64)])
                for held in (self._ids, self._list_of, self._place_of)
            )
        self._rows.put(slot, row)
        self._append(number, slot, code)
        # Last: if memory ran out before, the row is not held.
        self._ids[slot] = name
        del self._free[-1:]
        self._slot_of[name] = slot

    def _vacate(self, slot: int) -> int:
        """Free a slot; the last one of its list takes its place there. Return the list."""
        self._free.append(slot)
        number, hole = int(self._list_of[slot]), int(self._place_of[slot])
        slots, codes = self._contents(number)
        slots[hole], codes[hole] = slots[-1], codes[-1]
        self._place_of[slots[hole]] = hole
        self._lists.resize(number, len(slots) - 1)
        return number

    def _after_a_loss(self, number: int) -> None:
        """Dissolve a list that has become too short."""
        is_open = number in self._centroids
        if is_open and len(self._centroids) > 1 and self._lists.list_size(number) < self._longest // 8:
            self._dissolve(number)

    def _append(self, number: int, slot: int, code: npt.NDArray[Any]) -> None:
        place = self._lists.list_size(number)
        self._resize([(number, place, place + 1)])
        slots, codes = self._contents(number)
        slots[place], codes[place] = slot, code
        self._list_of[slot], self._place_of[slot] = number, place

    def _resize(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Lengthen lists: each with its length and the one to have. Where memory runs out, none is changed."""
        try:
            for number, _, length in changes:
                self._lists.resize(number, length)
        except MemoryError:
            for number, length, _ in changes:
                self._lists.resize(number, length)
            raise

    def _contents(self, number: int) -> tuple[Ids, npt.NDArray[Any]]:
        """Views of a list, until it changes: slots (n,) and codes (n, F)."""
        import faiss

        n, width = self._lists.list_size(number), self._lists.code_size
        if not n:
            return np.empty(0, np.int64), np.empty((0, width), np.uint8)
        slots: Ids = faiss.rev_swig_ptr(self._lists.get_ids(number), n)
        codes = faiss.rev_swig_ptr(self._lists.get_codes(number), n * width)
        return slots, codes.reshape(n, width)

    def _split(self, number: int) -> None:
        """Cut a list in two, and arrange the lists near both anew."""
        if not self._unused:
            return
        slots, codes = (part.copy() for part in self._contents(number))
        both = two_means(self._faiss.sq.decode(codes))
        new = self._open_list(both[0])
        if both[0] @ both[1] > 1 - _SAME:  # rows that are all alike: any half
            self._fill([number, new], slots, codes, np.arange(len(slots)) % 2)
            return
        self._centroids.add(np.array([number]), both[1:])
        near, _ = self._centroids.nearest(both, _NEAR)
        self._arrange(np.union1d(near, [number, new]))

    def _dissolve(self, number: int) -> None:
        """Give the rows of a list to those near it."""
        near, _ = self._centroids.nearest(self._centroids.vectors(np.array([number])), _NEAR)
        self._arrange(np.union1d(near, [number]), without=number)

    def _arrange(self, lists: Ids, without: int | None = None) -> None:
        """Move each row of some lists to the nearest of them, and each centroid to the middle of its rows."""
        contents = [self._contents(number) for number in lists.tolist()]
        slots = np.concatenate([slots for slots, _ in contents])
        codes = np.concatenate([codes for _, codes in contents])
        rows = self._faiss.sq.decode(codes)
        alike = rows @ self._centroids.vectors(lists).T
        if without is not None:
            alike[:, lists == without] = -np.inf
        nearest = alike.argmax(axis=1)
        own = np.repeat(np.arange(len(lists)), [len(held) for held, _ in contents])
        stays = alike[np.arange(len(rows)), own] > alike.max(axis=1) - _SAME
        nearest[stays] = own[stays]
        self._fill(lists.tolist(), slots, codes, nearest)
        for i, number in enumerate(lists.tolist()):
            if (nearest == i).any():
                self._centroids.add(lists[i : i + 1], normalised(rows[nearest == i].mean(axis=0))[None])
            else:
                self._close_list(number)

    def _fill(self, lists: Sequence[int], slots: Ids, codes: npt.NDArray[Any], into: Ids) -> None:
        """Let each list hold the slots and codes whose `into` is its place among the lists, and nothing else."""
        before = [self._lists.list_size(number) for number in lists]
        after = np.bincount(into, minlength=len(lists)).tolist()
        self._resize([(number, old, max(old, new)) for number, old, new in zip(lists, before, after, strict=True)])
        for i, (number, length) in enumerate(zip(lists, after, strict=True)):
            here = into == i
            self._lists.resize(number, length)
            held, packed = self._contents(number)
            held[:], packed[:] = slots[here], codes[here]
            self._list_of[slots[here]], self._place_of[slots[here]] = number, np.arange(length)

    def _open_list(self, centroid: Floats) -> int:
        self._centroids.add(np.array(self._unused[-1:]), centroid[None])
        return self._unused.pop()

    def _close_list(self, number: int) -> None:
        self._centroids.remove(np.array([number]))
        self._lists.resize(number, 0)
        self._unused.append(number)


class Blocks:
    """Rows by number. Growing moves none and takes a block more."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._blocks: list[Floats] = []

    def put(self, number: int, row: Floats) -> None:
        """Hold a row (F,); numbers come one by one."""
        if number == _BLOCK * len(self._blocks):
            self._blocks.append(np.empty((_BLOCK, self._dim), np.float32))
        self._blocks[number // _BLOCK][number % _BLOCK] = row

    def take(self, numbers: Ids) -> Floats:
        """Copies of rows, (n, F)."""
        rows = np.empty((len(numbers), self._dim), np.float32)
        for i, number in enumerate(numbers.tolist()):
            rows[i] = self._blocks[number // _BLOCK][number % _BLOCK]
        return rows


def normalised(x: Floats) -> Floats:
    """A vector (F,) at L2 norm 1; zeros stay."""
    scaled: Floats = x / np.float32(max(float(np.linalg.norm(x)), 1e-12))
    return scaled


def two_means(rows: Floats, steps: int = 4) -> Floats:
    """Centroids (2, F) of norm 1 that cut rows (N, F) in two, neither part less than a quarter of them."""
    first = rows[(rows @ rows.mean(axis=0)).argmin()]  # two that are far apart
    second = rows[(rows @ first).argmin()]
    least = max(1, len(rows) // 4)
    for _ in range(steps):
        margin = rows @ (first - second)
        order = np.argsort(margin, kind="stable")
        cut = min(max(int((margin < 0).sum()), least), len(rows) - least)
        first, second = normalised(rows[order[cut:]].mean(axis=0)), normalised(rows[order[:cut]].mean(axis=0))
    return np.stack([first, second])
