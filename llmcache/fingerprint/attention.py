"""Prefix attention statistics (Bansal 2025, section on the Input Fingerprint Generator)."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcache.fingerprint.base import View
from llmcache.fingerprint.mean import MeanEmbedding, content_mean


class AttentionMean(MeanEmbedding):
    """Mean output of the first self-attention beside the mean embedding.

    The paper names the statistics and not their form; this is our reading. Both means are over content tokens and each
    is scaled to L2 norm 1 first, or the larger would decide alone. The cosine of two fingerprints is then
    `weight` * cosine of the attention halves + (1 - `weight`) * cosine of the embedding halves.

    Layer 0 has to run before anything can be looked up, so no hit saves it.
    """

    reads_attention = True
    fits_any_layer = False

    def __init__(self, weight: float = 0.5) -> None:
        """Weigh the halves: `weight` is the share of the attention half, over 0, at most 1."""
        if not 0 < weight <= 1:
            raise ValueError(f"weight={weight}: give a number over 0, at most 1; for 0 take fingerprint 'mean'")
        self._weight = weight

    def features(self, view: View) -> Tensor:
        """Both halves (B, D + D), float32."""
        if view.attention is None:
            raise RuntimeError(
                "no output of layer 0's self-attention: is the adapter's `attention` what the layer calls?"
            )
        attended = normalize(content_mean(view.attention, view.content)) * self._weight**0.5
        embedded = normalize(content_mean(view.hidden, view.content)) * (1 - self._weight) ** 0.5
        return torch.cat([attended, embedded], dim=1)
