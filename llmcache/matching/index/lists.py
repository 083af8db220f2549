"""Sign bits of rows, in lists. N: rows, B: queries, F: dimensions, n: rows of one list."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcache.arrays import Floats, Ids, product

MOST = 1 << 14  # lists, of 70 million rows; faiss takes 1 MB for their heads
_NARROW, _DIRECTIONS = 256, 384  # dimensions


class BitLists:
    """Lists of slots with one bit a dimension, in memory of faiss, which searches them. Each slot is in one list.

    Rows of few dimensions, whose signs would tell too little, have bits for directions drawn at random (SimHash).
    """

    def __init__(self, centre: Floats) -> None:
        """Start with all lists empty; bits tell where a row is beyond the centre (F,)."""
        import faiss

        self._centre = centre
        self._directions: Floats | None = None
        if len(centre) < _NARROW:
            drawn = np.random.default_rng(0).standard_normal((len(centre), _DIRECTIONS), dtype=np.float32)
            self._directions, self._centre = drawn, product(centre[None], drawn)[0]
        width = -(-len(self._centre) // 8) * 8
        self._anything = faiss.IndexBinaryFlat(width)  # faiss wants a quantizer, which is never asked
        self._faiss: Any = faiss.IndexBinaryIVF(self._anything, width, MOST)
        self._faiss.is_trained = True
        self._held: Any = self._faiss.invlists
        self._list_of: Ids = np.empty(0, np.int64)  # by slot
        self._place_of: Ids = np.empty(0, np.int64)  # in its list

    @property
    def code_size(self) -> int:
        """Bytes of a row's bits."""
        return int(self._faiss.code_size)

    def encode(self, x: Floats) -> npt.NDArray[np.uint8]:
        """Bits of rows (N, F)."""
        along = x if self._directions is None else product(x, self._directions)
        return np.packbits(along > self._centre, axis=1)

    def length(self, number: int) -> int:
        return int(self._held.list_size(number))

    def slots(self, number: int) -> Ids:
        """The slots of a list, (n,): a view, until it changes."""
        return self._contents(number)[0]

    def search(self, x: Floats, k: int, lists: Ids) -> Ids:
        """Slots (B, k) of the rows whose bits differ least, in some lists of each query (B, probes); -1: no more."""
        self._faiss.nprobe = lists.shape[1]
        _, found = self._faiss.search_preassigned(self.encode(x), k, lists, np.zeros(lists.shape, np.int32))
        slots: Ids = found
        return slots

    def append(self, number: int, slot: int, code: npt.NDArray[np.uint8]) -> None:
        """Put a slot into a list; if memory runs out, it is in none."""
        if slot >= len(self._list_of):
            more = np.empty(slot // 4 + 64, np.int64)
            self._list_of, self._place_of = (
                np.concatenate([self._list_of, more]),
                np.concatenate([self._place_of, more]),
            )
        place = self.length(number)
        self._held.resize(number, place + 1)
        slots, codes = self._contents(number)
        slots[place], codes[place] = slot, code
        self._list_of[slot], self._place_of[slot] = number, place

    def leave(self, slot: int) -> int:
        """Take a slot out of its list, whose last one gets its place. Return the list."""
        number, hole = int(self._list_of[slot]), int(self._place_of[slot])
        slots, codes = self._contents(number)
        slots[hole], codes[hole] = slots[-1], codes[-1]
        self._place_of[slots[hole]] = hole
        self._held.resize(number, len(slots) - 1)
        return number

    def move(self, number: int, places: Ids, into: Ids) -> None:
        """Move rows of a list, given by their places (n,), to other lists (n,). If memory runs out, none is moved."""
        others = np.unique(into).tolist()
        before = [self.length(other) for other in others]
        self._lengthen(others, before, [int((into == other).sum()) for other in others])
        slots, codes = (part.copy() for part in self._contents(number))
        for other, length in zip(others, before, strict=True):
            here = places[into == other]
            held, packed = self._contents(other)
            held[length:], packed[length:] = slots[here], codes[here]
            self._list_of[slots[here]], self._place_of[slots[here]] = other, np.arange(length, len(held))
        stay = np.delete(np.arange(len(slots)), places)
        self._held.resize(number, len(stay))
        held, packed = self._contents(number)
        held[:], packed[:] = slots[stay], codes[stay]
        self._place_of[held] = np.arange(len(stay))

    def _lengthen(self, lists: Sequence[int], lengths: Sequence[int], by: Sequence[int]) -> None:
        """Make room in lists. If memory runs out, none is changed."""
        try:
            for number, length, more in zip(lists, lengths, by, strict=True):
                self._held.resize(number, length + more)
        except MemoryError:
            for number, length in zip(lists, lengths, strict=True):
                self._held.resize(number, length)
            raise

    def _contents(self, number: int) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """Views of a list, until it changes: slots (n,) and codes (n, code_size)."""
        import faiss

        n, width = self.length(number), self.code_size
        if not n:
            return np.empty(0, np.int64), np.empty((0, width), np.uint8)
        slots: Ids = faiss.rev_swig_ptr(self._held.get_ids(number), n)
        codes: npt.NDArray[np.uint8] = faiss.rev_swig_ptr(self._held.get_codes(number), n * width)
        return slots, codes.reshape(n, width)
