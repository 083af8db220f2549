"""(1) Input fingerprint generator: one vector a request; how like two requests are is told from theirs.

    call -> View       what a fingerprint may read: states, tokens, attention
         -> features   on the model's device
         -> project    on the host, after the one transfer: the vector that is searched
         -> project_with_forecast   the same, with a forecast of the model's output where it was learned

Search, storage and decision see only the projected vectors.
"""

from llmcache.fingerprint.attention import AttentionMean
from llmcache.fingerprint.base import Fingerprint, View
from llmcache.fingerprint.learned import Learned
from llmcache.fingerprint.mean import MeanEmbedding
from llmcache.fingerprint.minhash import ShingleMinHash
from llmcache.fingerprint.pca import PCAEmbedding
from llmcache.fingerprint.simhash import SimHash
from llmcache.registry import Registry

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

FINGERPRINTS: Registry[Fingerprint] = Registry(
    "fingerprint",
    Fingerprint,
    {
        "mean": MeanEmbedding,
        "simhash": SimHash,
        "pca": PCAEmbedding,
        "minhash": ShingleMinHash,
        "attention": AttentionMean,
        "learned": Learned,
    },
)
