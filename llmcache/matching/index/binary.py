"""Exhaustive search over sign bits. N: rows, B: queries, F: dimensions."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from llmcache.arrays import Floats
from llmcache.matching.index.flat import FlatIndex


class BinaryIndex(FlatIndex):
    """One bit a dimension, for fingerprints whose entries are +1/sqrt(F) or -1/sqrt(F), such as SimHash.

    Exact for those: the similarity, 1 - 2 * (bits that differ) / F, is their inner product. Of any other row only the
    signs count (zero as negative). 32 times smaller than `FlatIndex` and otherwise the same.
    """

    _row_type: ClassVar[type[np.generic]] = np.uint8

    def __init__(self, dim: int) -> None:
        if dim % 8:
            raise ValueError(f"dim must be a multiple of 8, got {dim}")
        super().__init__(dim)

    def _open(self) -> Any:
        import faiss

        return faiss.IndexBinaryFlat(self.dim)

    def _memory(self) -> Any:
        return self._faiss.xb

    def _encode(self, x: Floats) -> npt.NDArray[Any]:
        return np.packbits(x > 0, axis=1)

    def _decode(self, codes: npt.NDArray[Any]) -> Floats:
        bits = np.unpackbits(codes, axis=1, count=self.dim)
        signs: Floats = ((2 * bits.astype(np.float32) - 1) / np.sqrt(self.dim)).astype(np.float32)
        return signs

    def _similarity(self, score: npt.NDArray[Any]) -> Floats:
        """Cosine of two sign vectors from the number of bits that differ."""
        return (1 - 2 * score / self.dim).astype(np.float32)
