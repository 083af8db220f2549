"""The paper's fingerprint: mean of the embedding output (Bansal 2025, section on the Input Fingerprint Generator)."""

import numpy as np
import torch
from torch import Tensor

from llmcache.arrays import Floats
from llmcache.fingerprint.base import Fingerprint, View


class MeanEmbedding(Fingerprint):
    """Mean of the hidden states that enter layer 0, over tokens that carry content.

    Special and padding tokens are left out (the paper does not say): they are the same in every request and only make
    all of them look alike.
    """

    fits_any_layer = True

    def features(self, view: View) -> Tensor:
        """Mean over content tokens, float32 (B, D); zeros for a row without any."""
        return content_mean(view.hidden, view.content)

    def project(self, features: Floats) -> Floats:
        return normalise(features)


def content_mean(hidden: Tensor, content: Tensor) -> Tensor:
    """Mean of states (B, T, D) over tokens that carry content, bool (B, T): float32 (B, D), zeros where none does."""
    # One product reads the states once; a mask, a sum and a division would read them three times. In float32, whatever
    # autocast says: 700 tokens of 100 are more than float16 holds.
    with torch.autocast(hidden.device.type, enabled=False):
        total = torch.bmm(content.unsqueeze(1).float(), hidden.float()).squeeze(1)
    return total / content.sum(dim=1, keepdim=True).clamp(min=1)


def normalise(x: Floats) -> Floats:
    """Rows scaled to L2 norm 1; a zero row stays zero, so it is similar to nothing."""
    norm = np.sqrt(np.einsum("nd,nd->n", x, x))
    scaled: Floats = x / np.maximum(norm, np.float32(1e-12))[:, None]
    return scaled
