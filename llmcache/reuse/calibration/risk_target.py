"""The claim of a calibration: a metric, the largest loss, and the confidence."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

from llmcache.errors import ConfigError

Growth = Literal["frozen", "growing"]
MetricName = Literal["changed", "accuracy"]


@dataclass(frozen=True)
class Metric:
    """A score with a finite range, so that its mean loss can be bounded.

    Attributes:
        score: `(output, label) -> float`: how good an output of the model is for one request. `output` is its row (C,).
        low: Least possible score.
        high: Largest possible score.
        name: Its name in reports.
    """

    score: Callable[[Any, Any], float]
    low: float = 0.0
    high: float = 1.0
    name: str = "score"

    def __post_init__(self) -> None:
        """Refuse a score whose mean cannot be bounded.

        Raises:
            ConfigError: `score` is not callable, or the range is empty or not finite.
        """
        if not callable(self.score):
            raise ConfigError(f"metric {self.name!r}: score={self.score!r} is not a function of an output and a label")
        if not (isfinite(self.low) and isfinite(self.high) and self.low < self.high):
            raise ConfigError(
                f"metric {self.name!r}: scores from {self.low} to {self.high}; a bound on the mean needs a finite "
                "range: give low and high, or a metric that has them"
            )


@dataclass(frozen=True, slots=True)
class RiskTarget:
    """The claim of a calibration."""

    max_drop: float  # largest loss, a fraction of 1, or in units of the metric
    delta: float  # chance that the loss is larger than `max_drop`
    metric: MetricName | Metric
    sources: Growth  # `growing`: later misses serve, too
    seed: int  # of the draw of A, B and C

    def __post_init__(self) -> None:
        most = self.metric.high - self.metric.low if isinstance(self.metric, Metric) else 1.0
        for name, value, limit in (("max_drop", self.max_drop, most), ("delta", self.delta, 1.0)):
            if not isinstance(value, int | float) or not 0 < value < limit:
                raise ConfigError(f"{name}: give a number over 0, under {limit:g} (got {value!r})")
        if not isinstance(self.metric, Metric) and self.metric not in get_args(MetricName):
            names = " or ".join(map(repr, get_args(MetricName)))
            raise ConfigError(f"metric: give {names}, or llmcache.Metric(score, low=0, high=1) (got {self.metric!r})")
        if self.sources not in get_args(Growth):
            raise ConfigError(f"sources: give {' or '.join(map(repr, get_args(Growth)))} (got {self.sources!r})")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed: give a whole number, 0 or more (got {self.seed!r})")

    @property
    def name(self) -> str:
        return self.metric if isinstance(self.metric, str) else self.metric.name
