"""Measure `audit`: how much each rule of drawing hits recomputes, and how late its alarm rings.

    recorded decisions   of a stream (`results/decisions`): which requests were hits, and each one's share of the
                         allowed risk
    `runs` accounts      hits are drawn from them by each rule; which answers change, a scenario says

The alarm, its suspicion and its weights are the library's code. A verdict comes at once, and no source is quarantined.
Only requests whose answer changed are drawn one by one, since no others move the alarm; recomputations are counted in
expectation.

Sizes: N hits, M changed answers of an account.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from experiments import decisions
from experiments.measures.base import Experiment, Outcome
from experiments.support.files import Folders
from experiments.support.progress import tracked
from llmcache import ConfigError
from llmcache.lab import BY_RISK, CLOSER, WATCH, Alarm, Doubles, epoch_of

N_FIRST = 500  # requests that a larger beginning covers
N_PASS, N_RIGHT = 3_500, 50_000  # requests without a fault: of a short pass, and of a long one
LATE = 20_000  # requests before a fault that does not exist from the start


class Hits(NamedTuple):
    """Recorded hits of one calibration."""

    max_drop: float
    n: int  # requests
    rate: float  # of all requests that are hits
    changed: float  # share of all requests whose answer changed
    share: Doubles  # of the allowed risk, 0 to 1 (N,)
    share_changed: Doubles  # of the hits whose answer changed

    @classmethod
    def read(cls, stream: str, max_drop: float) -> "Hits":
        """Read the decisions of a calibration with frozen sources."""
        decided = decisions.read(decisions.FOLDER)[stream]["decided"]
        recorded = {one["max_drop"]: one for one in decided if one["sources"] == "frozen"}
        if max_drop not in recorded:
            raise ConfigError(f"max_drop={max_drop}: recorded are {', '.join(map(str, recorded))}")
        found = recorded[max_drop]
        served = np.array([*found["served"]])
        risk = np.array([inf if risk is None else decisions.UNIT * risk for risk in found["risks"]])
        share = np.minimum(1.0, risk / found["limit"])
        is_hit, is_changed = np.isin(served, ["s", "S"]), served == "S"
        return cls(
            max_drop, len(served), float(is_hit.mean()), float(is_changed.mean()), share[is_hit], share[is_changed]
        )

    def by_risk(self, rng: np.random.Generator, m: int) -> Doubles:
        """Return the shares (M,) of changed answers if each hit's risk is too low by the same factor."""
        return rng.choice(self.share, m, p=self.share / self.share.sum())


class Rule(NamedTuple):
    """A hit is drawn with probability `floor + slope * share`."""

    name: str
    floor: float
    slope: float
    first: float = 1.0  # factor on both for the first `N_FIRST` requests
    is_closer: bool = False  # the factor is `CLOSER` while the alarm is suspicious

    def chance(self, share: Doubles, factor: float = 1.0) -> Doubles:
        chance: Doubles = np.minimum(1.0, factor * (self.floor + self.slope * share))
        return chance

    def factor(self, alarm: Alarm) -> float:
        """Return the factor for the next request."""
        if self.is_closer:
            return CLOSER if alarm.is_suspicious else 1.0
        return self.first if alarm.n < N_FIRST else 1.0


#: Rules under comparison: the former one, the same thinned, other floors and slopes, and, last, the one in use.
RULES: Sequence[Rule] = (
    Rule("0.05 (1 + share), 5 times at first", 0.05, 0.05, first=5),
    Rule("0.02 (1 + share), 5 times at first", 0.02, 0.02, first=5),
    Rule("0.01 + 0.15 share", 0.01, 0.15),
    Rule("0.01 + 0.05 share", 0.01, 0.05),
    Rule("0.01 + 0.05 share, 5 times at first", 0.01, 0.05, first=5),
    Rule(f"0.01 + 0.01 share, {CLOSER} times on suspicion", 0.01, 0.01, is_closer=True),
    Rule(f"0.01 + {0.01 * BY_RISK:g} share, {CLOSER} times on suspicion", 0.01, 0.01 * BY_RISK, is_closer=True),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which answers change, and how many of all requests'."""

    name: str
    times: float  # rate of changed answers, as a multiple of the allowed one
    shares: Callable[[np.random.Generator, int], Doubles]  # of M changed answers
    begins: int = 0  # first request of the fault; before it, answers change at the recorded rate, by risk
    rises: int = 1  # requests over which the rate then rises to `times`
    n: int = 0  # requests; 0: those of the experiment


def scenarios(hits: Hits) -> Iterator[Scenario]:
    """Yield a claim that holds, then faults."""

    def alike(rng: np.random.Generator, m: int) -> Doubles:
        return rng.choice(hits.share, m)

    def of_one(rng: np.random.Generator, m: int) -> Doubles:
        return np.full(m, rng.choice(hits.share))

    recorded = hits.changed / hits.max_drop
    yield Scenario("right, a pass", recorded, hits.by_risk, n=N_PASS)
    yield Scenario("right", recorded, hits.by_risk, n=N_RIGHT)
    yield Scenario("at the limit", 1.0, hits.by_risk, n=N_RIGHT)
    yield Scenario("at the limit, alike", 1.0, alike, n=N_RIGHT)
    for times in (2.0, 4.0, 20.0):
        yield Scenario("risks too low", times, hits.by_risk)
        yield Scenario("alike", times, alike)
    for times in (2.0, 4.0):
        yield Scenario("drift", times, hits.by_risk, LATE, LATE)
        yield Scenario("bad source", times, of_one, LATE)


class Run(NamedTuple):
    """One account, until its alarm or the end."""

    rang: float  # requests from the fault to the alarm; infinite without one, negative before the fault
    found: float  # requests from the fault to the first changed answer that is found; infinite without one
    n: int  # requests
    n_drawn: float  # recomputations, in expectation


class Watched(Alarm):
    """An alarm that passes over requests without an event many at a time."""

    def skip_to(self, number: int) -> None:
        """Add requests before `number`: at most the rest of an epoch or of a look, and at least one."""
        epoch, end = epoch_of(self.n), number
        if self.is_suspicious:
            end = min(end, self.n - self.n % WATCH + WATCH)
        while epoch_of(end - 1) > epoch:
            end = self.n + (end - self.n) // 2
        self._by_epoch[epoch] += end - self.n - 1
        self.n = end - 1
        self.see()


def simulate(rule: Rule, scenario: Scenario, hits: Hits, delta: float, n: int, rng: np.random.Generator) -> Run:
    """Serve up to `n` requests on one account."""
    alarm, begins = Watched(hits.max_drop, rule.floor, delta), scenario.begins
    risen = np.clip((np.arange(n) - begins + 1) / scenario.rises, 0, 1)
    changed = np.flatnonzero(rng.random(n) < hits.changed + risen * (scenario.times * hits.max_drop - hits.changed))
    n_before = int(np.searchsorted(changed, begins))
    shares = np.concatenate([hits.by_risk(rng, n_before), scenario.shares(rng, len(changed) - n_before)])
    mean = {factor: hits.rate * rule.chance(hits.share, factor).mean() for factor in (1.0, rule.first, CLOSER)}
    tosses = zip(changed.tolist(), rule.chance(shares).tolist(), rng.random(len(changed)).tolist(), strict=True)
    n_drawn, first = 0.0, inf
    for number, chance, toss in (*tosses, (n, 0.0, 1.0)):  # the last marks the end
        while (seen := alarm.n) < number:
            alarm.is_suspicious &= rule.is_closer  # the other rules need no looks
            factor = rule.factor(alarm)
            alarm.skip_to(min(number, N_FIRST) if seen < N_FIRST else number)
            n_drawn += (alarm.n - seen) * mean[factor]
        chance = min(1.0, chance * rule.factor(alarm))
        if toss >= chance:
            continue
        n_drawn += mean[rule.factor(alarm)]
        alarm.see()
        first = min(first, number - begins + 1) if number >= begins else first
        if alarm.found(number, 1 / chance):
            return Run(number - begins + 1, first, number + 1, n_drawn)
    return Run(inf, first, n, n_drawn)


class Audit(Experiment):
    """Settings of the measure."""

    stream: Literal["banking77", "hwu64", "snips"]  # whose decisions are recorded
    max_drop: float = 0.005  # that the recorded calibration allows
    delta: float = Field(default=0.05, gt=0.0, lt=1.0)  # chance of a false alarm
    runs: int = Field(default=200, ge=1)  # accounts of each rule and scenario
    horizon: int = Field(default=100_000, gt=LATE)  # requests of an account whose alarm does not ring

    @property
    def name(self) -> str:
        return self.stream


def run(experiment: Audit, folders: Folders) -> Outcome:
    hits = Hits.read(experiment.stream, experiment.max_drop)
    seeds, rows = [(experiment.seed, number) for number in range(experiment.runs)], []
    for rule in tracked(RULES, "Drawing by each rule"):
        for scenario in scenarios(hits):
            n, rngs = scenario.n or experiment.horizon, map(np.random.default_rng, seeds)
            runs = [simulate(rule, scenario, hits, experiment.delta, n, rng) for rng in rngs]
            rows.append({"rule": rule.name, **_figures(scenario, runs)})
    metrics = {
        "task": experiment.stream,
        "max_drop": hits.max_drop,
        "n": hits.n,
        "hit_rate": hits.rate,
        "changed_answers": hits.changed,
        "share": float(hits.share.mean()),
        "share_changed": float(hits.share_changed.mean()),
        "share_changed_by_risk": float((hits.share**2).sum() / hits.share.sum()),
        "summary": rows,
    }
    return Outcome(rows, metrics)


def _figures(scenario: Scenario, runs: Sequence[Run]) -> dict[str, Any]:
    """Return figures of all runs; times are in requests from the fault, None if beyond the horizon."""
    times = {"alarm": [run.rang for run in runs if run.rang > 0], "found": [run.found for run in runs]}
    n = sum(run.n for run in runs)
    quantiles = {
        f"{name}_{told}": value if isfinite(value := float(np.quantile(of, q, method="higher"))) else None
        for name, of in times.items()
        for told, q in (("median", 0.5), ("p90", 0.9))
    }
    return {
        "scenario": scenario.name,
        "times": scenario.times,
        "runs": len(runs),
        "recomputed": 1000 * sum(run.n_drawn for run in runs) / n,
        "n_rang": sum(isfinite(run.rang) for run in runs),
        "n_early": sum(run.rang <= 0 for run in runs),
        **quantiles,
    }
