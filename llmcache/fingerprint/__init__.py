"""The learned fingerprint, beside those of `llmcache.paper`."""

from llmcache.fingerprint.learned import Learned
from llmcache.paper.fingerprints import (
    FINGERPRINTS,
    AttentionMean,
    Fingerprint,
    MeanEmbedding,
    PCAEmbedding,
    ShingleMinHash,
    SimHash,
    View,
)

__all__ = [
    "FINGERPRINTS",
    "AttentionMean",
    "Fingerprint",
    "Learned",
    "MeanEmbedding",
    "PCAEmbedding",
    "ShingleMinHash",
    "SimHash",
    "View",
]

FINGERPRINTS["learned"] = Learned
