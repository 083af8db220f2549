"""The paper's fingerprint: mean of the embedding output (Bansal 2025, section on the Input Fingerprint Generator)."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from llmcache.arrays import Floats


class MeanEmbedding:
    """Mean of the hidden states that enter layer 0, over tokens that carry content.

    Special and padding tokens are left out (the paper does not say): they are the same in every request and only make
    all of them look alike.
    """

    @property
    def n_fit(self) -> int:
        """Nothing to learn: ready at once."""
        return 0

    def features(self, hidden: Tensor, content: Tensor) -> Tensor:
        """Mean over content tokens, float32 (B, D); zeros for a row without any."""
        # One product reads the hidden states once; a mask, a sum and a division would read them three times.
        total = torch.bmm(content.unsqueeze(1).to(hidden.dtype), hidden).squeeze(1)
        return total.float() / content.sum(dim=1, keepdim=True).clamp(min=1)

    def fit(self, features: Floats) -> None:
        """Nothing to learn."""

    def project(self, features: Floats) -> Floats:
        """Features scaled to L2 norm 1, (B, D)."""
        return normalise(features)

    def state(self) -> dict[str, Floats]:
        """Nothing to save."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Nothing to take up."""


def normalise(x: Floats) -> Floats:
    """Rows scaled to L2 norm 1; a zero row stays zero, so it is similar to nothing."""
    norm = np.sqrt(np.einsum("nd,nd->n", x, x))
    scaled: Floats = x / np.maximum(norm, np.float32(1e-12))[:, None]
    return scaled
