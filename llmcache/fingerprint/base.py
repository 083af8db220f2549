"""What a fingerprint is made from, and what it has to do.

Sizes: B rows, T tokens, D hidden width, F0 features, F fingerprint width, N requests, C outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcache.arrays import Floats


@dataclass(frozen=True, slots=True)
class View:
    """What a fingerprint may read of a call, on the model's device.

    Attributes:
        states: States that enter a layer, (B, T, D), of layer 0 the embedding output; None before the trunk runs, where
            only fingerprints are made that do not read them.
        content: Which tokens carry content (are neither special nor padding), bool (B, T).
        ids: Token ids, int64 (B, T).
        attention: Output of layer 0's self-attention (B, T, D), or None where the fingerprint does not read it.
    """

    states: Tensor | None
    content: Tensor
    ids: Tensor
    attention: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """The states, for those that read them."""
        assert self.states is not None
        return self.states

    @property
    def content_ids(self) -> Tensor:
        """Content tokens as float32 (B, T), -1 elsewhere; exact, as no vocabulary has 2**24 tokens."""
        return torch.where(self.content, self.ids, -1).float()


class Fingerprint(ABC):
    """Turns what a call shows into search vectors. Two methods are each fingerprint's own; the rest is for learners.

    Each row counts by itself: what is beside it in the batch changes nothing, nor does the number of rows projected.
    Settings become keyword arguments of the constructor, checked against its annotations.

    Attributes:
        reads_attention: `View.attention` is read, so layer 0 is run before anything is looked up.
        reads_states: `View.hidden` is read; if not, requests can be looked up before the trunk has run.
        fits_any_layer: It may as well be taken from the states that enter a later layer.
    """

    reads_attention = False
    reads_states = True
    fits_any_layer = False

    @property
    def n_fit(self) -> int:
        """Requests it must see before it can project; 0 when it is ready."""
        return 0

    @abstractmethod
    def features(self, view: View) -> Tensor:
        """Float32 (B, F0) on the view's device; F0 may differ from call to call only if nothing is to be fitted."""

    def fit(self, features: Sequence[Floats], targets: Floats | None = None, outputs: Floats | None = None) -> None:
        """Learn from requests; by default nothing.

        Args:
            features: Of N requests, (F0,) each: of the first `n_fit` ones, or as many as a calibration gives.
            targets: What the model made of them (N, T), where a calibration knows it.
            outputs: What of it may be forecast (N, C), likewise.
        """

    @abstractmethod
    def project(self, features: Floats) -> Floats:
        """Float32 (B, F) from features (B, F0), as the index that goes with it takes them: all but `lsh`, L2 norm 1."""

    def project_with_forecast(self, features: Floats) -> tuple[Floats, Floats | None]:
        """The same fingerprints, and what they let expect of the outputs (B, C), or None."""
        return self.project(features), None

    def state(self) -> dict[str, Floats]:
        """Arrays that `restore` needs; empty when nothing was learned."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up a saved state."""
