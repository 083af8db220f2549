"""A growing FAISS index that finds the nearest vector."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Nearest:
    """Flat inner-product search over vectors of L2 norm 1, each with a value of the caller's."""

    def __init__(self) -> None:
        self._index: Any = None
        self.kept: list[Any] = []

    def find(self, vector: NDArray[np.float32], threshold: float) -> tuple[Any | None, float | None]:
        """Return the value of the vector nearest to this one (F,), None below `threshold`, and the cosine."""
        if self._index is None:
            return None, None
        similarity, number = self._index.search(vector[None], 1)
        alike = float(similarity[0, 0])
        return (self.kept[int(number[0, 0])] if alike >= threshold else None), alike

    def add(self, vector: NDArray[np.float32], kept: Any) -> None:
        if self._index is None:
            import faiss

            self._index = faiss.IndexFlatIP(len(vector))
        self._index.add(vector[None])
        self.kept.append(kept)

    @property
    def nbytes(self) -> int:
        return 0 if self._index is None else 4 * self._index.d * self._index.ntotal


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale a vector (F,) to L2 norm 1; zero stays zero."""
    scaled: NDArray[np.float32] = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
    return scaled
