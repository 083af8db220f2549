"""(1) Input Fingerprint Generator: one vector a request; how like two requests are is told from theirs.

A fingerprint has two halves. `features` runs on the model's device, on what a call shows (`View`); `project` runs on
the host, on what came back. Search, storage and decision see only the projected vectors.

Sizes: B rows, T tokens, D hidden width, F fingerprint width.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from llmcache.arrays import Floats
from llmcache.fingerprint.attention import AttentionMean
from llmcache.fingerprint.learned import Learned
from llmcache.fingerprint.mean import MeanEmbedding
from llmcache.fingerprint.minhash import ShingleMinHash
from llmcache.fingerprint.pca import PCAEmbedding
from llmcache.fingerprint.simhash import SimHash
from llmcache.fingerprint.view import View

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


class Fingerprint(Protocol):
    """Turns what a call shows into search vectors.

    Attributes:
        reads_attention: `View.attention` is read, so layer 0 is run before anything is looked up.
        reads_states: `View.hidden` is read; if not, requests can be looked up before the trunk has run.
        fits_any_layer: It may as well be taken from the states that enter a later layer.
    """

    reads_attention: bool
    reads_states: bool
    fits_any_layer: bool

    @property
    def n_fit(self) -> int:
        """Requests it must see before it can project; 0 when it is ready."""

    def features(self, view: View) -> Tensor:
        """Float32 (B, F0) on the view's device; F0 may differ from call to call only if nothing is to be fitted."""

    def fit(self, features: Sequence[Floats], targets: Floats | None = None, outputs: Floats | None = None) -> None:
        """Learn from requests.

        Args:
            features: Of N requests, (F0,) each: of the first `n_fit` ones, or as many as a calibration gives.
            targets: What the model made of them (N, T), where a calibration knows it.
            outputs: What of it may be forecast (N, C), likewise.
        """

    def project(self, features: Floats) -> Floats:
        """Float32 (B, F) from features (B, F0), as the index that goes with it takes them: all but `lsh`, L2 norm 1."""

    def foresee(self, features: Floats) -> tuple[Floats, Floats | None]:
        """The same fingerprints, and what they let expect of the outputs (B, C), or None."""

    def state(self) -> dict[str, Floats]:
        """Arrays that `restore` needs; empty when nothing was learned."""

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up a saved state."""


FINGERPRINTS: dict[str, type[Fingerprint]] = {
    "mean": MeanEmbedding,
    "simhash": SimHash,
    "pca": PCAEmbedding,
    "minhash": ShingleMinHash,
    "attention": AttentionMean,
    "learned": Learned,
}
