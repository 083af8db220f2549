"""The decision whose risk is a chance: that reuse changes the answer, estimated from neighbours and a forecast.

Sizes: n neighbours that were found, at most k; F features.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import exp, inf, log
from operator import mul

import numpy as np

from llmcache.arrays import Floats
from llmcache.matching.decision import Decision, Evidence

_HIGHEST = 700.0  # odds, as a logarithm: of more `exp` is no number


@dataclass
class Risk(Decision):
    """The neighbour whose answer has the least risk serves; the risk is the chance that the request's own is another.

    Neighbours vote with weights that fall with similarity, and the forecast favours some of their answers. The chance
    is a logistic regression on what vote and forecast say of an answer, learned from requests whose own are known. Of
    neighbours with the same answer the nearest serves; none does where fewer than k were found.

    Attributes:
        k: Neighbours that vote, 3 to 64.
        width: Similarity lost at which a vote counts 1 / e, over 0.
        forecast: Whether the forecast has a say; if not, neighbours alone have.
    """

    k: int = 8
    width: float = 0.05
    forecast: bool = True

    reads_answers = True
    max_risk = 0.5  # what more likely changes than not is not served, be it so rare that the bound would allow it
    risk_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        self._weights: Sequence[float] = ()  # of the features (F,), and the constant; empty until learned
        if not 3 <= self.k <= 64 or not self.width > 0:
            raise ValueError(f"k={self.k}, width={self.width}: k must be from 3 to 64, width over 0")

    def choose(self, seen: Evidence) -> tuple[int, float]:
        number, least = 0, inf
        for candidate, features in self._describe(seen) if self._weights else ():
            if (risk := _chance(self._weights, features)) < least:
                number, least = candidate, risk
        return number, least

    def fit(self, seen: Sequence[Evidence], is_right: Sequence[Sequence[bool]]) -> None:
        told = [
            (features, not right[number])
            for one, right in zip(seen, is_right, strict=True)
            for number, features in self._describe(one)
        ]
        if told:
            self._weights = _fitted([features for features, _ in told], [changed for _, changed in told])

    def state(self) -> dict[str, Floats]:
        return {"weights": np.array(self._weights, np.float32)}

    def restore(self, state: Mapping[str, Floats]) -> None:
        self._weights = _rounded(state["weights"])

    def _describe(self, seen: Evidence) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Who may serve, and what vote and forecast say of its answer (F,)."""
        similarity, n = seen.similarity, len(seen.similarity)
        if n < self.k:
            return
        nearest, last = similarity[0], similarity[-1]
        votes = [exp((one - nearest) / self.width) for one in similarity]
        n_votes, mean = sum(votes), sum(similarity) / n
        for number, agrees in enumerate(seen.agree):
            if not agrees[number] or any(agrees[:number]):
                continue
            share = sum(compress(votes, agrees)) / n_votes
            others = (one for one, is_same in zip(similarity, agrees, strict=True) if not is_same)
            own = similarity[number]
            yield (
                number,
                (
                    own,
                    own - next(others, last - self.width / 2),
                    sum(agrees) / n,
                    share,
                    log(share + 1e-3),
                    similarity[2],
                    mean,
                    all(agrees[:3]),
                    own == nearest,
                    seen.favour[number] if self.forecast else 0.0,
                ),
            )


def _chance(weights: Sequence[float], features: Sequence[float]) -> float:
    odds = sum(map(mul, weights, features), weights[-1])
    return 1 / (1 + exp(min(-odds, _HIGHEST)))


def _fitted(features: Sequence[Sequence[float]], changes: Sequence[bool]) -> tuple[float, ...]:
    """Weights (F + 1,) of a logistic regression that tells from features, N times (F,), whether answers change."""
    from sklearn.linear_model import LogisticRegression

    known = np.array(features)
    centre, scale = known.mean(axis=0), known.std(axis=0) + 1e-6
    # Two made-up requests, one each way, let it learn from answers that all stayed, or all changed.
    shown = np.vstack([(known - centre) / scale, np.zeros((2, known.shape[1]))])
    fitted = LogisticRegression(max_iter=1000).fit(shown, [*changes, True, False])
    weights = fitted.coef_[0] / scale
    return _rounded([*weights, float(fitted.intercept_[0] - weights @ centre)])


def _rounded(weights: Iterable[float]) -> tuple[float, ...]:
    """Weights as they are saved, so that a cache that was loaded decides as the saved one did."""
    return tuple(np.array([*weights], np.float32).tolist())
