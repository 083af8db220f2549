"""(1) Input Fingerprint Generator: one vector a request, whose cosine says how alike two requests are.

A fingerprint has two halves. `features` runs on the model's device, on the hidden states that enter layer 0; `project`
runs on the host, on what came back. Search, storage and decision see only the projected vectors.

Sizes: B rows, T tokens, D hidden width, F fingerprint width.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from llmcache.arrays import Floats
from llmcache.fingerprint.mean import MeanEmbedding
from llmcache.fingerprint.pca import PCAEmbedding
from llmcache.fingerprint.simhash import SimHash


class Fingerprint(Protocol):
    """Turns the embedding output into a search vector."""

    @property
    def n_fit(self) -> int:
        """Requests it must see before it can project; 0 when it is ready."""

    def features(self, hidden: Tensor, content: Tensor) -> Tensor:
        """Float32 (B, F0) from hidden states (B, T, D) and which tokens carry content, bool (B, T)."""

    def fit(self, features: Floats) -> None:
        """Learn from features (N, F0) of the first `n_fit` requests."""

    def project(self, features: Floats) -> Floats:
        """Float32 (B, F) of L2 norm 1 from features (B, F0)."""

    def state(self) -> dict[str, Floats]:
        """Arrays that `restore` needs; empty when nothing was learned."""

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up a saved state."""


FINGERPRINTS: dict[str, type[Fingerprint]] = {"mean": MeanEmbedding, "simhash": SimHash, "pca": PCAEmbedding}
