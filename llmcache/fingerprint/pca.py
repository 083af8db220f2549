"""PCA of the mean embedding: shorter, centred, and so less prone to find all requests alike."""

from collections.abc import Mapping, Sequence

import numpy as np

from llmcache.arrays import Floats, product
from llmcache.fingerprint.mean import MeanEmbedding, normalise


class PCAEmbedding(MeanEmbedding):
    """Mean embedding centred and projected on its first principal components.

    Fitted once, on the first `n_fit` requests; until then nothing is searched. Cosines are lower than those of the raw
    mean embedding, whose large common part is gone.
    """

    reads_states = True
    fits_any_layer = False  # centre and axes are those of the embedding output

    def __init__(self, dim: int = 128, fit_on: int = 512) -> None:
        """Choose the size.

        Args:
            dim: Components kept, at least 1; at most the hidden width and `fit_on` are used.
            fit_on: Requests to fit on, at least 2.
        """
        if dim < 1 or fit_on < 2:
            raise ValueError(f"dim={dim}, fit_on={fit_on}: dim must be at least 1 and fit_on at least 2")
        self.dim = dim
        self.fit_on = fit_on
        self._centre: Floats | None = None
        self._axes: Floats | None = None

    @property
    def n_fit(self) -> int:
        return self.fit_on if self._axes is None else 0

    def fit(self, features: Sequence[Floats], targets: Floats | None = None, outputs: Floats | None = None) -> None:
        from sklearn.decomposition import PCA

        seen = np.stack(features)
        pca = PCA(n_components=min(self.dim, *seen.shape), svd_solver="full").fit(seen)
        self._centre = pca.mean_.astype(np.float32)
        self._axes = np.ascontiguousarray(pca.components_.T, dtype=np.float32)

    def project(self, features: Floats) -> Floats:
        """Centred projections scaled to L2 norm 1, (B, dim)."""
        if self._centre is None or self._axes is None:
            raise RuntimeError("fit() comes first")
        return normalise(product(features - self._centre, self._axes))

    def state(self) -> dict[str, Floats]:
        if self._centre is None or self._axes is None:
            return {}
        return {"centre": self._centre, "axes": self._axes}

    def restore(self, state: Mapping[str, Floats]) -> None:
        if state:
            self._centre, self._axes = state["centre"], state["axes"]
