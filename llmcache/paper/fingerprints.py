"""(1) Input fingerprint generator: one vector per request; the similarity of two requests is that of their vectors.

    call -> View   tokens, states that enter the layer, output of layer 0's self-attention
         -> features   on the model's device
         -> project    on the host, after one transfer: the search vector

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

from llmcache.support.arrays import Floats, normalise, product
from llmcache.support.registry import Registry


@dataclass(frozen=True, slots=True)
class View:
    """The data of a call that a fingerprint may read, on the model's device.

    Attributes:
        states: Hidden states (B, T, D) that enter a layer; for layer 0, the embedding output. None if not read.
        content: Mask of content tokens, neither special nor padding, bool (B, T).
        ids: Token ids, int64 (B, T).
        attention: Output of layer 0's self-attention (B, T, D); None if the fingerprint does not read it.
    """

    states: Tensor | None
    content: Tensor
    ids: Tensor
    attention: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """The states, for fingerprints that read them."""
        assert self.states is not None
        return self.states

    @property
    def content_ids(self) -> Tensor:
        """Ids of content tokens as float32 (B, T), -1 elsewhere; exact, as no vocabulary has 2**24 tokens."""
        return torch.where(self.content, self.ids, -1).float()


class Fingerprint(ABC):
    """Makes search vectors from a call. A fingerprint implements two methods; the others are for those that are fitted.

    Each row is independent of the other rows in the batch and of their number. Settings become keyword arguments of the
    constructor, checked against its annotations.

    Attributes:
        reads_attention: Whether `View.attention` is read; layer 0 then runs before the lookup.
        reads_states: Whether `View.hidden` is read.
        per_layer: Whether each layer is searched with a fingerprint of its input states, not of the embedding output.
    """

    reads_attention = False
    reads_states = True
    per_layer = False

    @property
    def n_fit(self) -> int:
        """Requests needed to fit; 0 once the fingerprint is ready."""
        return 0

    @abstractmethod
    def features(self, view: View) -> Tensor:
        """Return features, float32 (B, F0), on the view's device. F0 may vary between calls only if `n_fit` is 0."""

    def fit(self, features: Sequence[Floats]) -> None:
        """Fit on the features (F0,) of the first `n_fit` requests; by default do nothing."""

    @abstractmethod
    def project(self, features: Floats) -> Floats:
        """Return vectors, float32 (B, F), for features (B, F0): with L2 norm 1, except for the index `lsh`."""

    def state(self) -> dict[str, Floats]:
        """Return the arrays that `restore` needs; empty if nothing was learned."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Load a saved state."""


class MeanEmbedding(Fingerprint):
    """Mean over content tokens of the hidden states that enter a layer: the paper's fingerprint.

    Special and padding tokens are excluded (the paper does not say): they are in every request and only add similarity.
    """

    def __init__(self, per_layer: bool = False) -> None:
        """Average the embedding output or, with `per_layer`, the states that enter the searched layer."""
        self.per_layer = per_layer

    def features(self, view: View) -> Tensor:
        """Return the mean over content tokens, float32 (B, D); zeros for a row without any."""
        return content_mean(view.hidden, view.content)

    def project(self, features: Floats) -> Floats:
        return normalise(features)


class SimHash(MeanEmbedding):
    """Signs of `bits` random projections of the mean embedding, each +-1 / sqrt(bits) (Charikar 2002, section 3).

    Two requests at angle theta agree in a share 1 - theta / pi of the bits, so the inner product of two fingerprints is
    1 - 2 theta / pi: lower than the cosine at the same angle (cosine 0.85 is about 0.65 here). Choose tau accordingly.
    """

    def __init__(self, bits: int = 256, seed: int = 0, per_layer: bool = False) -> None:
        """Use `bits` random projections, a positive multiple of 8. Entries made with another `seed` do not compare."""
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
        return np.where(product(features, self._planes) >= 0, unit, -unit).astype(np.float32)


class PCAEmbedding(MeanEmbedding):
    """Mean embedding centred and projected on its first principal components.

    Fitted once, on the first `fit_on` requests; until then nothing is searched. Cosines are lower than those of the raw
    mean embedding, whose large common component is removed.
    """

    def __init__(self, dim: int = 128, fit_on: int = 512) -> None:
        """Set the size.

        Args:
            dim: Components kept, at least 1; limited to the hidden width and `fit_on`.
            fit_on: Requests to fit on, at least 2.
        """
        if dim < 1 or fit_on < 2:
            raise ValueError(f"dim={dim}, fit_on={fit_on}: dim must be at least 1 and fit_on at least 2")
        super().__init__()
        self.dim = dim
        self.fit_on = fit_on
        self._learned: Mapping[str, Floats] = {}

    @property
    def n_fit(self) -> int:
        return 0 if self._learned else self.fit_on

    def fit(self, features: Sequence[Floats]) -> None:
        from sklearn.decomposition import PCA

        seen = np.stack(features)
        pca = PCA(n_components=min(self.dim, *seen.shape), svd_solver="full").fit(seen)
        axes = np.ascontiguousarray(pca.components_.T, dtype=np.float32)
        self._learned = {"centre": pca.mean_.astype(np.float32), "axes": axes}

    def project(self, features: Floats) -> Floats:
        """Return centred projections scaled to L2 norm 1, (B, dim)."""
        if not self._learned:
            raise RuntimeError("fit() comes first")
        return normalise(product(features - self._learned["centre"], self._learned["axes"]))

    def state(self) -> dict[str, Floats]:
        return dict(self._learned)

    def restore(self, state: Mapping[str, Floats]) -> None:
        self._learned = {name: state[name] for name in ("centre", "axes")} if state else {}


class AttentionMean(MeanEmbedding):
    """Mean output of layer 0's self-attention beside the mean embedding (the paper's "prefix attention statistics").

    The paper names the statistics but not their form; this is our reading. Both means are over content tokens and are
    scaled to L2 norm 1 first, since otherwise the larger would dominate. The cosine of two fingerprints is then
    `weight` * cosine of the attention halves + (1 - `weight`) * cosine of the embedding halves.

    Layer 0 must run before the lookup, so a hit does not save it.
    """

    reads_attention = True

    def __init__(self, weight: float = 0.5) -> None:
        """Set `weight`, the share of the attention half, over 0 and at most 1."""
        if not 0 < weight <= 1:
            raise ValueError(f"weight={weight}: give a number over 0, at most 1; for 0 take fingerprint 'mean'")
        super().__init__()
        self._weight = weight

    def features(self, view: View) -> Tensor:
        """Return both halves (B, D + D), float32."""
        if view.attention is None:
            raise RuntimeError("no output of layer 0's attention: is the adapter's `attention` what the layer calls?")
        attended = normalize(content_mean(view.attention, view.content)) * self._weight**0.5
        embedded = normalize(content_mean(view.hidden, view.content)) * (1 - self._weight) ** 0.5
        return torch.cat([attended, embedded], dim=1)


# The lowest 24 bits of a hash are exact in float32; two different shingles collide once in 16 million.
_KEPT_BITS = np.uint32(2**24 - 1)


class ShingleMinHash(Fingerprint):
    """Signatures whose share of equal entries estimates the Jaccard similarity of two sets of shingles (Broder 1997).

    A shingle is `width` consecutive content tokens; a shorter request is one shingle. Order beyond a shingle,
    repetition, meaning and the model's states have no effect. Choose tau accordingly: one word replaced in a request of
    ten tokens leaves 7 of 11 pairs in common, a similarity of 0.64.
    """

    reads_states = False

    def __init__(self, width: int = 2, n_hashes: int = 128, seed: int = 1) -> None:
        """Set the shingles and the signature.

        Args:
            width: Tokens per shingle, at least 1. More make order count and lower the similarities.
            n_hashes: F, at least 2. The estimate's standard error is at most 0.5 / sqrt(F): 0.044 for 128.
            seed: Seed of the hash functions, 0 to 2**32 - 1. Signatures made with another seed do not compare.
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
        """Return signatures (B, F) of integers from 0 to 2**24 - 1, as float32."""
        from datasketch import MinHash

        rows = [self._shingles(row[row >= 0].astype(np.int32)) for row in features]
        sketches = MinHash.generator(rows, num_perm=self.n_hashes, seed=self._seed)
        return np.stack([sketch.hashvalues & _KEPT_BITS for sketch in sketches]).astype(np.float32)

    def _shingles(self, ids: NDArray[np.int32]) -> list[bytes]:
        """Return all runs of `width` token ids in ids (n,), as bytes."""
        width = min(self.width, len(ids))
        return [ids[i : i + width].tobytes() for i in range(len(ids) - width + 1)]


def content_mean(hidden: Tensor, content: Tensor) -> Tensor:
    """Return the mean of states (B, T, D) over content tokens, bool (B, T): float32 (B, D), zeros if there are none."""
    # One product reads the states once; a mask, a sum and a division would read them three times. In float32 despite
    # autocast: a sum of 700 values of 100 overflows float16.
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
