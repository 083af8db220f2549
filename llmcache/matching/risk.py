"""Decisions whose risk is a chance: that reuse changes the answer, estimated from neighbours, a forecast, or both.

Sizes: n neighbours that were found, at most k; F features; M answers that could be given.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import exp, inf, log, log1p
from operator import itemgetter, mul

import numpy as np

from llmcache.arrays import Floats
from llmcache.matching.decision import Decision, Evidence

_HIGHEST = 700.0  # odds, as a logarithm: of more `exp` is no number
_SHARPNESS = np.array([[1.0], [2.0], [4.0]], np.float32)  # at which the rivals of an answer are summed
_LEAST = 1e-9  # of such a sum, before its logarithm


class _Chance(Decision):
    """Its risk is a chance, that of a logistic regression with `weights`: of the features (F,), and the constant."""

    weights: Sequence[float] = ()  # until learned
    reads_answers = True
    max_risk = 0.5  # what more likely changes than not is not served, be it so rare that the bound would allow it
    risk_range = (0.0, 1.0)

    def state(self) -> dict[str, Floats]:
        return {"weights": np.array(self.weights, np.float32)}

    def restore(self, state: Mapping[str, Floats]) -> None:
        self.weights = _rounded(state["weights"])

    def _learn(self, told: Sequence[tuple[Sequence[float], bool]]) -> None:
        """Learn from features, and whether the answer changed, of each that is told of."""
        if told:
            self.weights = _fitted([features for features, _ in told], [changed for _, changed in told])


@dataclass
class Risk(_Chance):
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

    def __post_init__(self) -> None:
        if not 3 <= self.k <= 64 or not self.width > 0:
            raise ValueError(f"k={self.k}, width={self.width}: k must be from 3 to 64, width over 0")

    def choose(self, seen: Evidence) -> tuple[int, float]:
        number, least = 0, inf
        for candidate, features in self._describe(seen) if self.weights else ():
            if (risk := _chance(self.weights, features)) < least:
                number, least = candidate, risk
        return number, least

    def fit(self, seen: Sequence[Evidence], is_right: Sequence[Sequence[bool]]) -> None:
        told = [
            (features, not right[number])
            for one, right in zip(seen, is_right, strict=True)
            for number, features in self._describe(one)
        ]
        self._learn(told)

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


class Student(_Chance):
    """The answer that the forecast favours is given; the risk is the chance that the request's own is another.

    No neighbour is searched for. The chance is a logistic regression on how far the forecast favours the answer above
    others, learned from requests whose own are known: a linear classifier, distilled from the model, that abstains.
    """

    k = 0
    reads_lead = True

    def choose(self, seen: Evidence) -> tuple[int, float]:
        is_ready = self.weights and seen.lead
        return len(seen.similarity), _chance(self.weights, seen.lead) if is_ready else inf

    def fit(self, seen: Sequence[Evidence], is_right: Sequence[Sequence[bool]]) -> None:
        self._learn([(one.lead, not right[-1]) for one, right in zip(seen, is_right, strict=True) if one.lead])


class Combined(_Chance):
    """Whoever is less risky serves: the neighbour that `Risk` chooses, or the answer that `Student` does.

    Both risks are chances of the same thing, so one limit holds for both.
    """

    reads_lead = True

    def __init__(self, k: int = 8, width: float = 0.05) -> None:
        self.k = k
        self._risk = Risk(k, width)
        self._student = Student()

    def choose(self, seen: Evidence) -> tuple[int, float]:
        return min(self._risk.choose(seen), self._student.choose(seen), key=itemgetter(1))

    def fit(self, seen: Sequence[Evidence], is_right: Sequence[Sequence[bool]]) -> None:
        self._risk.fit(seen, is_right)
        self._student.fit(seen, is_right)

    def state(self) -> dict[str, Floats]:
        return {"weights": self._risk.state()["weights"], "lead": self._student.state()["weights"]}

    def restore(self, state: Mapping[str, Floats]) -> None:
        self._risk.restore(state)
        self._student.restore({"weights": state["lead"]})


def lead_of(favour: Floats, spread: float, n_tokens: int) -> tuple[int, tuple[float, ...]]:
    """Which answer a forecast favours, given how much it speaks for each (M,), and how far above the others (F,)."""
    first = int(favour.argmax())
    rivals = favour - favour[first]
    rivals[first] = -_HIGHEST  # it is none of its own
    sums = [log(one + _LEAST) for one in np.exp(_SHARPNESS * rivals).sum(axis=1).tolist()]
    odds = [log1p(exp(one)) for one in sums]
    return first, (float(favour[first]), float(rivals.max()), *sums, *odds, spread, n_tokens**0.5)


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
