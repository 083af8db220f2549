"""(3) From what a search found to what is reused: pure functions of numbers, no torch, no I/O.

A decision looks at the nearest stored requests and says which of them would serve best, and how risky that is. The
request is served if the risk is within a limit. What the risk is, is the decision's own affair: a negated similarity,
or the estimated chance that reuse changes the answer.

Numbers are plain ones, of one request at a time: for so few, arrays cost ten times what is computed with them.

Sizes: n neighbours that were found, at most k.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from llmcache.arrays import Floats


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the nearest stored requests of one request.

    Attributes:
        similarity: To each, best first (n,).
        agree: Which pairs of them have the same answer (n, n); one without an answer agrees with none, not even itself.
            Empty where answers are not read.
        favour: How much the forecast of the request speaks for the answer of each (n,); zero without one.
    """

    similarity: Sequence[float]
    agree: Sequence[Sequence[bool]] = ()
    favour: Sequence[float] = ()


class Decision(ABC):
    """Chooses among neighbours. One method is each decision's own; the rest is for those that learn.

    Settings become keyword arguments of the constructor, checked against its annotations.

    Attributes:
        k: How many it looks at.
        reads_answers: It compares their answers, so entries without one are never served.
        max_risk: The largest risk that a calibration may allow.
        risk_range: Least and largest risk of one that may serve; by default those of similarities, negated.
    """

    k: int = 1
    reads_answers: bool = False
    max_risk: float = inf
    risk_range: tuple[float, float] = (-1.0, 1.0)

    @abstractmethod
    def choose(self, seen: Evidence) -> tuple[int, float]:
        """The number of the neighbour that would serve, and how risky that is; infinite where none may serve.

        Args:
            seen: Of one neighbour at least.
        """

    def fit(self, seen: Sequence[Evidence], is_right: Sequence[Sequence[bool]]) -> None:
        """Learn from requests whose own answers are known; by default nothing.

        Args:
            seen: Of N requests.
            is_right: Whether each of their neighbours has the request's own answer, N times (n,).
        """

    def state(self) -> dict[str, Floats]:
        """What was learned; empty where nothing is."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up what was learned."""


class Threshold(Decision):
    """The nearest one serves; the risk is its similarity, negated (Bansal 2025, Algorithm 1, with `>=` for `>`)."""

    def choose(self, seen: Evidence) -> tuple[int, float]:
        return 0, -seen.similarity[0]


class Consensus(Decision):
    """The nearest one serves if the `k` nearest all have its answer; the risk is its similarity, negated."""

    reads_answers = True

    def __init__(self, k: int = 3) -> None:
        """Choose how many must agree, at least 2."""
        if k < 2:
            raise ValueError(f"k={k}: one neighbour agrees with itself; give at least 2")
        self.k = k

    def choose(self, seen: Evidence) -> tuple[int, float]:
        return 0, -seen.similarity[0] if sum(seen.agree[0]) == self.k else inf


def deepest_layer(risk: float, limits: Mapping[int, float], held: Collection[int]) -> int | None:
    """The deepest layer held that has a limit, which the risk does not exceed; None for a miss."""
    return max((layer for layer in held if layer in limits and risk <= limits[layer]), default=None)


def share_of(risk: float, limit: float) -> float:
    """How much of the risk that is allowed there is, 0 to 1; 1 where risks are no chances and cannot be divided."""
    return min(1.0, risk / limit) if risk >= 0 and 0 < limit < inf else 1.0


def thresholds(tau: float | Mapping[int, float] | None, layers: Collection[int], depth: int) -> dict[int, float]:
    """Spread the `tau` setting over the stored layers; empty when nothing is reused approximately."""
    if tau is None:
        return {}
    if isinstance(tau, Mapping):
        by_layer = {layer + depth if layer < 0 else layer: value for layer, value in tau.items()}
        if stray := sorted(set(by_layer) - set(layers)):
            raise ValueError(f"tau names layers {stray} that are not stored; stored: {sorted(layers)}")
        return by_layer
    return dict.fromkeys(layers, tau)
