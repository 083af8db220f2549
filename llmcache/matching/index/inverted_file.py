"""An inverted file that grows and shrinks by its lists. N: rows, B: queries, F: dimensions, n: of one list."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from llmcache.arrays import Floats, Ids, product
from llmcache.matching.index.byte import ByteIndex
from llmcache.matching.index.lists import MOST, BitLists

_BLOCK = 4096  # rows
_AT_A_TIME = 64  # rows that are added before their lists are looked after
_SAME = 1e-6  # similarities that differ by less
_LONGEST = 128  # rows of a list, while there are few
_NEAR = 64  # lists that may be nearer to a row than its own
_REVISED = 48  # rows of lists that are revised for each one that is added


class InvertedFile:
    """Lists of rows that are alike, each with a centroid; a search reads the lists of the nearest centroids.

    Centroids are compared by 8 bits a dimension, rows of the lists by one, as in `RefinedIndex`, the best in full.
    There is no training: a list that is too long is split in two, one that is too short is dissolved, and with every
    few rows that are added one list is revised, in turn, those just split before others. Its rows move to lists near
    it whose centroids are nearer, and its centroid to their middle: k-means in small steps, which follows rows that
    come to differ from earlier ones. (SPFresh, Xu et al. 2023, section 3.3, moves rows around a split alone, by two
    conditions.) So no call reads more rows than a few lists hold. The same calls in the same order find the same rows.
    No call is safe beside another one: the caller holds a lock.
    """

    def __init__(self, sample: Floats, probes: int, candidates: int) -> None:
        """Start empty; the rows to come are like the sample (N, F), which tells where the first list is."""
        self.dim = int(sample.shape[1])
        self._probes = probes
        self._candidates = candidates
        span = min(1.0, 1.25 * float(np.abs(sample).max()))
        self._centroids = ByteIndex(self.dim, span)
        self._lists = BitLists(sample.mean(axis=0))
        self._unused = list(range(MOST))[::-1]
        self._to_revise: OrderedDict[int, None] = OrderedDict()  # all lists, the next one first
        self._allowed = 0  # rows that may be revised by now
        # Each row has a slot for as long as it is held.
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = Blocks(self.dim)
        self._ids: Ids = np.empty(0, np.int64)
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
        lists, _ = self._centroids.nearest(x, self._n_probed)
        for i, slots in enumerate(self._lists.search(x, max(self._candidates, 2 * width), lists)):
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
        return len(self) * (4 * self.dim + self._lists.code_size + 4 * 8) + self._centroids.nbytes

    @property
    def _longest(self) -> int:
        """Most rows of a list. Short lists overlook less, but there are more centroids to compare."""
        return max(_LONGEST, int(0.7 * len(self) ** 0.5))

    @property
    def _n_probed(self) -> int:
        """Lists that a search reads: about one in eight."""
        return max(self._probes, int(0.26 * len(self) ** 0.5))

    def _add(self, names: Sequence[int], rows: Floats) -> None:
        nearest = self._centroids.nearest(rows, 1)[0][:, 0].tolist()
        left = []
        for name, row, code, number in zip(names, rows, self._lists.encode(rows), nearest, strict=True):
            old = self._slot_of.get(name)
            slot = self._free[-1] if self._free else len(self)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty(slot // 4 + 64, np.int64)])
            self._rows.put(slot, row)
            self._lists.append(number, slot, code)
            # Last: if memory ran out before, the row is not held.
            self._ids[slot] = name
            del self._free[-1:]
            self._slot_of[name] = slot
            if old is not None:
                left.append(self._vacate(old))
        for number in dict.fromkeys(nearest):
            if self._is_long(number):
                self._split(number)
        for number in left:
            self._after_a_loss(number)
        self._allowed += _REVISED * len(names)
        while self._allowed > 0:
            self._revise_next()

    def _vacate(self, slot: int) -> int:
        """Free a slot. Return the list that it was in."""
        self._free.append(slot)
        return self._lists.leave(slot)

    def _after_a_loss(self, number: int) -> None:
        """Dissolve a list that has become too short."""
        if number in self._centroids and self._is_short(number):
            self._revise(number)

    def _is_long(self, number: int) -> bool:
        return bool(self._unused) and self._lists.length(number) > self._longest

    def _is_short(self, number: int) -> bool:
        return self._lists.length(number) < self._longest // 8

    def _split(self, number: int) -> None:
        """Cut a list in two, to be revised before others."""
        rows = self._rows.take(self._lists.slots(number))
        both = two_means(rows)
        margin = product(rows, both[1] - both[0])
        if both[0] @ both[1] > 1 - _SAME:  # rows that are all alike: any half
            margin = np.where(np.arange(len(rows)) % 2, np.float32(1), np.float32(-1))
        new = self._open_list(both[1])
        to_new = np.flatnonzero(margin > 0)
        self._lists.move(number, to_new, np.full(len(to_new), new))
        self._centroids.add(np.array([number]), both[:1])
        for half in (number, new):
            self._to_revise.move_to_end(half, last=False)

    def _revise_next(self) -> None:
        """Revise the list whose turn it is."""
        number = next(iter(self._to_revise))
        self._to_revise.move_to_end(number)
        self._allowed -= max(1, self._lists.length(number))
        if self._is_long(number):
            self._split(number)
        else:
            self._revise(number)

    def _revise(self, number: int) -> None:
        """Move rows of a list to lists nearer to them, all if they are too few, and its centroid to their middle."""
        if len(self._centroids) == 1:
            return
        rows = self._rows.take(self._lists.slots(number))
        goes = np.full(len(rows), self._is_short(number))
        if len(rows):
            middle = normalised(rows.mean(axis=0))[None]
            near = self._centroids.nearest(middle, _NEAR + 1)[0][0]
            near = near[near != number]
            alike = product(rows, self._centroids.vectors(near).T)
            best = alike.argmax(axis=1)
            goes |= alike[np.arange(len(rows)), best] > product(rows, middle[0]) + _SAME
            self._lists.move(number, np.flatnonzero(goes), near[best[goes]])
        if goes.all():
            self._close_list(number)
        else:
            self._centroids.add(np.array([number]), normalised(rows[~goes].mean(axis=0))[None])

    def _open_list(self, centroid: Floats) -> int:
        number = self._unused[-1]
        self._centroids.add(np.array([number]), centroid[None])
        self._to_revise[number] = None
        return self._unused.pop()

    def _close_list(self, number: int) -> None:
        self._centroids.remove(np.array([number]))
        del self._to_revise[number]
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
