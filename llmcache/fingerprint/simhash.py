"""SimHash: signs of random projections (Charikar 2002, section 3), searched as bits."""

import numpy as np

from llmcache.arrays import Floats, product
from llmcache.fingerprint.mean import MeanEmbedding


class SimHash(MeanEmbedding):
    """Signs of `bits` random projections of the mean embedding, each +-1 / sqrt(bits).

    Two requests at angle theta agree in a share 1 - theta / pi of the bits, so the inner product of two fingerprints is
    1 - 2 theta / pi: lower than the cosine at the same angle (cosine 0.85 is about 0.65 here). Choose tau accordingly.
    """

    def __init__(self, bits: int = 256, seed: int = 0) -> None:
        """Choose `bits` random projections, a positive multiple of 8; entries of another `seed` are not comparable."""
        if bits <= 0 or bits % 8:
            raise ValueError(f"bits={bits}: give a positive multiple of 8")
        self.bits = bits
        self._seed = seed
        self._planes: Floats | None = None

    def project(self, features: Floats) -> Floats:
        if self._planes is None:
            rng = np.random.default_rng(self._seed)
            self._planes = rng.standard_normal((features.shape[1], self.bits), dtype=np.float32)
        unit = np.float32(1 / np.sqrt(self.bits))
        signs: Floats = np.where(product(features, self._planes) >= 0, unit, -unit).astype(np.float32)
        return signs
