"""Exhaustive search over 8 bits a dimension. N: rows, B: queries, F: dimensions."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from llmcache.arrays import Floats, Ids
from llmcache.matching.index.flat import FlatIndex, search_faiss


class ByteIndex(FlatIndex):
    """As `FlatIndex` at a quarter of the memory, similarities off by some thousandths. Values beyond `span` are cut."""

    _row_type: ClassVar[type[np.generic]] = np.uint8

    def __init__(self, dim: int, span: float) -> None:
        self._span = span
        super().__init__(dim)

    def nearest(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        similarity, slots = search_faiss(self._faiss, x, min(k, len(self)))
        return self._ids[slots], similarity

    def _open(self) -> Any:
        import faiss

        index = faiss.IndexScalarQuantizer(self.dim, faiss.ScalarQuantizer.QT_8bit_uniform, faiss.METRIC_INNER_PRODUCT)
        set_span(index, self._span)
        return index

    def _encode(self, x: Floats) -> npt.NDArray[Any]:
        codes: npt.NDArray[Any] = self._faiss.sq.compute_codes(x)
        return codes

    def _decode(self, codes: npt.NDArray[Any]) -> Floats:
        rows: Floats = self._faiss.sq.decode(codes)
        return rows


def set_span(index: Any, span: float) -> None:
    """Let the 256 steps of a faiss index with uniform bytes go from -span to span, in place of training."""
    import faiss

    faiss.copy_array_to_vector(np.array([-span, 2 * span], np.float32), index.sq.trained)
    index.is_trained = True
