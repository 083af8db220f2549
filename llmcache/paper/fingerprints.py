"""(1) Input fingerprint generator: one vector a request; how alike two requests are is told from their vectors.

    call -> View   tokens, states that enter the layer, output of the first self-attention
         -> features   on the model's device
         -> project    on the host, after one transfer: the vector that is searched

Sizes: B rows, T tokens, D hidden width, F0 features, F fingerprint width, N requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from llmcache.arrays import Floats, normalise, product
from llmcache.registry import Registry


@dataclass(frozen=True, slots=True)
class View:
    """What a fingerprint may read of a call, on the model's device.

    Attributes:
        states: States that enter a layer, (B, T, D), of layer 0 the embedding output.
        content: Tokens that carry content: neither special nor padding, bool (B, T).
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
        reads_states: `View.hidden` is read.
        per_layer: Each layer is searched by a fingerprint of the states that enter it, not of the embedding output.
    """

    reads_attention = False
    reads_states = True
    per_layer = False

    @property
    def n_fit(self) -> int:
        """Requests it must see before it can project; 0 when it is ready."""
        return 0

    @abstractmethod
    def features(self, view: View) -> Tensor:
        """Float32 (B, F0) on the view's device; F0 may differ from call to call only if nothing is to be fitted."""

    def fit(self, features: Sequence[Floats]) -> None:
        """Learn from the features (F0,) of each of the first `n_fit` requests; by default nothing."""

    @abstractmethod
    def project(self, features: Floats) -> Floats:
        """Float32 (B, F) from features (B, F0), as the index that goes with it takes them: all but `lsh`, L2 norm 1."""

    def state(self) -> dict[str, Floats]:
        """Arrays that `restore` needs; empty when nothing was learned."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up a saved state."""


class MeanEmbedding(Fingerprint):
    """Mean of the hidden states that enter a layer, over tokens that carry content: the paper's fingerprint.

    Special and padding tokens are left out (the paper does not say): they are the same in every request and only make
    all of them look alike.
    """

    def __init__(self, per_layer: bool = False) -> None:
        """`per_layer`: of the states that enter the layer that is searched, not of the embedding output."""
        self.per_layer = per_layer

    def features(self, view: View) -> Tensor:
        """Mean over content tokens, float32 (B, D); zeros for a row without any."""
        return content_mean(view.hidden, view.content)

    def project(self, features: Floats) -> Floats:
        return normalise(features)


class SimHash(MeanEmbedding):
    """Signs of `bits` random projections of the mean embedding, each +-1 / sqrt(bits) (Charikar 2002, section 3).

    Two requests at angle theta agree in a share 1 - theta / pi of the bits, so the inner product of two fingerprints is
    1 - 2 theta / pi: lower than the cosine at the same angle (cosine 0.85 is about 0.65 here). Choose tau accordingly.
    """

    def __init__(self, bits: int = 256, seed: int = 0, per_layer: bool = False) -> None:
        """Choose `bits` random projections, a positive multiple of 8; entries of another `seed` are not comparable."""
        if bits <= 0 or bits % 8:
            raise ValueError(f"bits={bits}: give a positive multiple of 8")
        super().__init__(per_layer)
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


class PCAEmbedding(MeanEmbedding):
    """Mean embedding centred and projected on its first principal components.

    Fitted once, on the first `fit_on` requests; until then nothing is searched. Cosines are lower than those of the raw
    mean embedding, whose large common part is gone.
    """

    def __init__(self, dim: int = 128, fit_on: int = 512) -> None:
        """Choose the size.

        Args:
            dim: Components kept, at least 1; at most the hidden width and `fit_on` are used.
            fit_on: Requests to fit on, at least 2.
        """
        if dim < 1 or fit_on < 2:
            raise ValueError(f"dim={dim}, fit_on={fit_on}: dim must be at least 1 and fit_on at least 2")
        super().__init__()
        self.dim = dim
        self.fit_on = fit_on
        self._centre: Floats | None = None
        self._axes: Floats | None = None

    @property
    def n_fit(self) -> int:
        return self.fit_on if self._axes is None else 0

    def fit(self, features: Sequence[Floats]) -> None:
        from sklearn.decomposition import PCA

        seen = np.stack(features)
        pca = PCA(n_components=min(self.dim, *seen.shape), svd_solver="full").fit(seen)
        self._centre = pca.mean_.astype(np.float32)
        self._axes = np.ascontiguousarray(pca.components_.T, dtype=np.float32)

    def project(self, features: Floats) -> Floats:
        """Centred projections scaled to L2 norm 1, (B, dim)."""
        if self._centre is None or self._axes is None:
            raise RuntimeError("fit() comes first")
        return normalise(product(features - self._centre, self._axes))

    def state(self) -> dict[str, Floats]:
        if self._centre is None or self._axes is None:
            return {}
        return {"centre": self._centre, "axes": self._axes}

    def restore(self, state: Mapping[str, Floats]) -> None:
        if state:
            self._centre, self._axes = state["centre"], state["axes"]


class AttentionMean(MeanEmbedding):
    """Mean output of the first self-attention beside the mean embedding (the paper's "prefix attention statistics").

    The paper names the statistics and not their form; this is our reading. Both means are over content tokens and each
    is scaled to L2 norm 1 first, or the larger would decide alone. The cosine of two fingerprints is then
    `weight` * cosine of the attention halves + (1 - `weight`) * cosine of the embedding halves.

    Layer 0 has to run before anything can be looked up, so no hit saves it.
    """

    reads_attention = True

    def __init__(self, weight: float = 0.5) -> None:
        """Weigh the halves: `weight` is the share of the attention half, over 0, at most 1."""
        if not 0 < weight <= 1:
            raise ValueError(f"weight={weight}: give a number over 0, at most 1; for 0 take fingerprint 'mean'")
        super().__init__()
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


# The lowest 24 bits of a hash are a float32 exactly, and equal for different shingles once in 16 million.
_KEPT_BITS = np.uint32(2**24 - 1)


class ShingleMinHash(Fingerprint):
    """Signatures whose share of equal entries estimates the Jaccard similarity of two sets of shingles (Broder 1997).

    A shingle is `width` content tokens in a row; a request shorter than that has one, of all its tokens. Order beyond a
    shingle, repetition, meaning and what the model makes of the words play no part. Choose tau accordingly: one word
    replaced in a request of ten tokens leaves 7 of 11 pairs in common, a similarity of 0.64.
    """

    reads_states = False

    def __init__(self, width: int = 2, n_hashes: int = 128, seed: int = 1) -> None:
        """Choose the shingles and the signature.

        Args:
            width: Tokens of a shingle, at least 1. More make order count and similarities lower.
            n_hashes: F, at least 2. The estimate's standard error is at most 0.5 / sqrt(F): 0.044 for 128.
            seed: Of the hash functions, 0 to 2**32 - 1; signatures made with another one are not comparable.
        """
        if width < 1 or n_hashes < 2 or not 0 <= seed < 2**32:
            raise ValueError(
                f"width={width}, n_hashes={n_hashes}, seed={seed}: width must be at least 1, n_hashes at least 2, "
                "seed 0 to 2**32 - 1"
            )
        self.width = width
        self.n_hashes = n_hashes
        self._seed = seed

    def features(self, view: View) -> Tensor:
        return view.content_ids

    def project(self, features: Floats) -> Floats:
        """Signatures (B, F) of whole numbers from 0 to 2**24 - 1."""
        from datasketch import MinHash

        rows = [self._shingles(row[row >= 0].astype(np.int32)) for row in features]
        sketches = MinHash.generator(rows, num_perm=self.n_hashes, seed=self._seed)
        signatures: Floats = np.stack([sketch.hashvalues & _KEPT_BITS for sketch in sketches]).astype(np.float32)
        return signatures

    def _shingles(self, ids: NDArray[np.int32]) -> list[bytes]:
        """Runs of `width` tokens of ids (n,), packed."""
        width = min(self.width, len(ids))
        return [ids[i : i + width].tobytes() for i in range(len(ids) - width + 1)]


def content_mean(hidden: Tensor, content: Tensor) -> Tensor:
    """Mean of states (B, T, D) over tokens that carry content, bool (B, T): float32 (B, D), zeros where none does."""
    # One product reads the states once; a mask, a sum and a division would read them three times. In float32, whatever
    # autocast says: 700 tokens of 100 are more than float16 holds.
    with torch.autocast(hidden.device.type, enabled=False):
        total = torch.bmm(content.unsqueeze(1).float(), hidden.float()).squeeze(1)
    return total / content.sum(dim=1, keepdim=True).clamp(min=1)


FINGERPRINTS: Registry[Fingerprint] = Registry(
    "fingerprint",
    Fingerprint,
    {
        "mean": MeanEmbedding,
        "simhash": SimHash,
        "pca": PCAEmbedding,
        "minhash": ShingleMinHash,
        "attention": AttentionMean,
    },
)
