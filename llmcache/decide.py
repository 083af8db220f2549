"""(3) From what a search found to what is reused: pure functions of numbers, no torch, no I/O.

A decision looks at the nearest stored requests and says which of them would serve best, and how doubtful that is. The
request is served if the doubt is within a limit. What the doubt is, is the decision's own affair: a negated similarity,
or the estimated chance that reuse changes the answer.

Sizes: N requests, k neighbours, F features.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bools, Floats

Choice = tuple[NDArray[np.int64], Floats]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the nearest stored requests of N requests.

    Attributes:
        similarity: To each, best first, float32 (N, k); where fewer were found, the rest is -1.
        agree: Which pairs of them have the same answer, bool (N, k, k); those that were not found agree with none.
        favour: How much the forecast of the request speaks for the answer of each, float32 (N, k); zero without one.
    """

    similarity: Floats
    agree: Bools
    favour: Floats


class Decision(Protocol):
    """Chooses among neighbours.

    Attributes:
        k: How many it looks at.
        reads_answers: It compares their answers, so entries without one are never served.
        most: The largest doubt that a calibration may allow.
    """

    k: int
    reads_answers: bool
    most: float

    def choose(self, seen: Evidence) -> Choice:
        """The neighbour that would serve each request, and how doubtful that is.

        Returns:
            Its number (N,), and the doubt, float32 (N,); infinite where none may serve.
        """

    def fit(self, seen: Evidence, is_right: Bools) -> None:
        """Learn from requests whose own answers are known.

        Args:
            seen: Of these requests.
            is_right: Whether each neighbour has the request's own answer, (N, k).
        """

    def state(self) -> dict[str, Floats]:
        """What was learned."""

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up what was learned."""


class _Untaught:
    """A decision that learns nothing, and whose doubts are no chances."""

    most = inf

    def fit(self, seen: Evidence, is_right: Bools) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, Floats]:
        """Nothing to save."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Nothing to take up."""


class Threshold(_Untaught):
    """The nearest one serves; the doubt is its similarity, negated (Bansal 2025, Algorithm 1, with `>=` for `>`)."""

    k = 1
    reads_answers = False

    def choose(self, seen: Evidence) -> Choice:
        return np.zeros(len(seen.similarity), np.int64), -seen.similarity[:, 0]


class Consensus(_Untaught):
    """The nearest one serves if the `k` nearest all have its answer; the doubt is its similarity, negated."""

    reads_answers = True

    def __init__(self, k: int = 3) -> None:
        """Choose how many must agree.

        Args:
            k: At least 2.

        Raises:
            ValueError: `k` is less.
        """
        if k < 2:
            raise ValueError(f"k={k}: one neighbour agrees with itself; give at least 2")
        self.k = k

    def choose(self, seen: Evidence) -> Choice:
        doubt = np.where(seen.agree[:, 0].all(axis=1), -seen.similarity[:, 0], inf).astype(np.float32)
        return np.zeros(len(doubt), np.int64), doubt


@dataclass
class Risk:
    """The neighbour with the least doubtful answer serves; the doubt is the chance that the request's own is another.

    Neighbours vote with weights that fall with similarity, and the forecast favours some of their answers. The chance
    is a logistic regression on what vote and forecast say of an answer, learned from requests whose own are known.

    Attributes:
        k: Neighbours that vote, 3 to 64.
        width: Similarity lost at which a vote counts 1 / e, over 0.
        weights: Of the features, float32 (F + 1,), the constant last; empty until learned.
    """

    k: int = 8
    width: float = 0.05
    weights: Floats = field(init=False, default_factory=lambda: np.empty(0, np.float32))
    reads_answers = True
    most = 0.5  # what more likely changes than not is not served, even if it is so rare that the bound would allow it

    def __post_init__(self) -> None:
        """Refuse what cannot vote."""
        if not 3 <= self.k <= 64 or not self.width > 0:
            raise ValueError(f"k={self.k}, width={self.width}: k must be from 3 to 64, width over 0")

    def choose(self, seen: Evidence) -> Choice:
        n = len(seen.similarity)
        if not len(self.weights):
            return np.zeros(n, np.int64), np.full(n, inf, np.float32)
        odds = self._describe(seen) @ self.weights[:-1] + self.weights[-1]
        doubt = np.where(_is_candidate(seen), 1 / (1 + np.exp(-odds)), inf).astype(np.float32)
        chosen = doubt.argmin(axis=1)
        return chosen, doubt[np.arange(n), chosen]

    def fit(self, seen: Evidence, is_right: Bools) -> None:
        """Learn the chance; see `Decision.fit`."""
        from sklearn.linear_model import LogisticRegression

        told = _is_candidate(seen)
        features, changes = self._describe(seen)[told], ~is_right[told]
        if not len(features):
            return
        centre, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
        # Two made-up requests, one each way, let it learn from answers that all stayed, or all changed.
        shown = np.vstack([(features - centre) / scale, np.zeros((2, features.shape[1]))])
        fitted = LogisticRegression(max_iter=1000).fit(shown, np.append(changes, [True, False]))
        weights = fitted.coef_[0] / scale
        self.weights = np.append(weights, fitted.intercept_ - weights @ centre).astype(np.float32)

    def state(self) -> dict[str, Floats]:
        """Weights of the features."""
        return {"weights": self.weights}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up weights."""
        self.weights = state["weights"]

    def _describe(self, seen: Evidence) -> Floats:
        """What vote and forecast say of each neighbour's answer (N, k, F)."""
        similarity, agree = seen.similarity, seen.agree
        nearest, last = similarity[:, :1], similarity[:, -1:]
        votes = np.exp((similarity - nearest) / self.width)
        share = np.einsum("nij,nj->ni", agree, votes) / votes.sum(axis=1, keepdims=True)
        rival = np.where(agree, -1, similarity[:, None]).max(axis=2)
        rival = np.where(rival > -1, rival, last - self.width / 2)
        features = np.empty((*similarity.shape, 10), np.float32)
        features[..., 0] = similarity
        features[..., 1] = similarity - rival
        features[..., 2] = agree.mean(axis=2)
        features[..., 3] = share
        features[..., 4] = np.log(share + 1e-3)
        features[..., 5] = similarity[:, 2:3]
        features[..., 6] = similarity.mean(axis=1, keepdims=True)
        features[..., 7] = agree[..., :3].all(axis=2)
        features[..., 8] = similarity == nearest
        features[..., 9] = seen.favour
        return features


def _is_candidate(seen: Evidence) -> Bools:
    """Which neighbours may serve (N, k): of those with the same answer, the nearest; none where too few were found."""
    k = seen.similarity.shape[1]
    is_answered = seen.agree[:, range(k), range(k)]
    is_first = ~(seen.agree & np.tri(k, k=-1, dtype=np.bool_)).any(axis=2)
    may: Bools = is_answered & is_first & (seen.similarity[:, -1:] > -1)
    return may


DECISIONS: dict[str, type[Decision]] = {"threshold": Threshold, "consensus": Consensus, "risk": Risk}


def deepest_layer(doubt: float, limits: Mapping[int, float], held: Collection[int]) -> int | None:
    """The deepest layer whose bank holds the neighbour and whose limit the doubt keeps to.

    Args:
        doubt: About the neighbour.
        limits: Largest doubt by layer; a layer without one never reuses.
        held: Layers whose bank still holds the neighbour.

    Returns:
        The layer, or None for a miss.
    """
    return max((layer for layer in held if layer in limits and doubt <= limits[layer]), default=None)


def share_of(doubt: float, limit: float) -> float:
    """How much of the doubt that is allowed there is, 0 to 1; 1 where doubts are no chances and cannot be divided."""
    return min(1.0, doubt / limit) if doubt >= 0 and 0 < limit < inf else 1.0


def thresholds(tau: float | Mapping[int, float] | None, layers: Collection[int], depth: int) -> dict[int, float]:
    """Spread the `tau` setting over the stored layers.

    Args:
        tau: One threshold, one a layer (negative layers count from the end), or None.
        layers: Stored layers.
        depth: Number of layers of the model.

    Returns:
        Threshold by stored layer; empty when nothing is reused approximately.

    Raises:
        ValueError: A threshold is given for a layer that is not stored.
    """
    if tau is None:
        return {}
    if isinstance(tau, Mapping):
        by_layer = {layer + depth if layer < 0 else layer: value for layer, value in tau.items()}
        if stray := sorted(set(by_layer) - set(layers)):
            raise ValueError(f"tau names layers {stray} that are not stored; stored: {sorted(layers)}")
        return by_layer
    return dict.fromkeys(layers, tau)
