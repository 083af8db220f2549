"""What a fingerprint is made from, and what fingerprints that learn nothing have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcache.arrays import Floats


@dataclass(frozen=True, slots=True)
class View:
    """What a fingerprint may read of a call, on the model's device.

    Attributes:
        states: States that enter a layer, (B, T, D), of layer 0 the embedding output; None at the trunk's door, where
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


class Unlearned:
    """A fingerprint that is ready at once, has nothing to save and forecasts nothing."""

    reads_attention = False
    reads_states = True
    fits_any_layer = False

    @property
    def n_fit(self) -> int:
        """Nothing to learn."""
        return 0

    def fit(self, features: Sequence[Floats], targets: Floats | None = None, outputs: Floats | None = None) -> None:
        """Nothing to learn."""

    def project(self, features: Floats) -> Floats:
        """Search vectors (B, F) from features (B, F0), each fingerprint in a way of its own."""
        raise NotImplementedError

    def foresee(self, features: Floats) -> tuple[Floats, Floats | None]:
        """Search vectors, and no forecast."""
        return self.project(features), None

    def state(self) -> dict[str, Floats]:
        """Nothing to save."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Nothing to take up."""
