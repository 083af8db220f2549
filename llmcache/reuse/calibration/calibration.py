"""Choosing the limit: how much risk to allow, with a measured bound.

The first requests are divided by a seeded draw. Of those to learn from, four fifths are A and one fifth is B, in turns:
the fingerprint is fitted to A; B, looked up among A, fits the risk model and gives the limits to test (`training.py`).
The bound is measured on C, which neither model has seen. The limits are tested on C, strictest first, each at level
delta, until one fails (fixed-sequence testing). The last limit that passed is used; the chance that its loss exceeds
the claim is delta at most. C is served by the requests of A and B, and later requests are served by the same sources: a
bank that grows has another error rate.

With a draft (`reuse/draft.py`) two rungs may serve a request: a source, asked first, then the draft. One number, the
dial, sets the limits of both:

    limit of a rung = dial * share of the rung,   share of a rung = 1 - time to serve by it / time to compute

So a rung that saves little time is used only at little risk, the settings to test are one sequence again, and the bound
is on what both serve together. Shares, and which rungs to use, are chosen on A and B alone.

Sizes: N requests of C, K limits, R rungs.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count, takewhile
from math import ceil, inf
from typing import Any, Final, NamedTuple

import numpy as np

from llmcache.errors import CalibrationError
from llmcache.reuse.calibration.bounds import draws_needed, mean_upper, share_upper
from llmcache.reuse.calibration.drift import Profile
from llmcache.reuse.calibration.risk_target import Growth, Metric, RiskTarget
from llmcache.support.arrays import Bools, Doubles

SEMANTIC: Final = "semantic"  # the rung that serves from a source
DRAFT: Final = "draft"
TESTED = 0.5  # about the share of the requests that the bound is measured on
LEAST_SOURCES = 50  # distinct requests; neither fingerprint nor risk model can be fitted to fewer
N_LIMITS = 200


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A limit, with hit rate, loss and bound measured on C.

    Attributes:
        limit: The largest risk served; with a draft the dial, of which `Calibration.limits` makes one of each rung.
        hit_rate: Share of C that would be served, 0 to 1.
        loss: Mean loss of the metric; for `changed`, the share of all requests whose answer changed.
        bound: Upper bound of the loss, at the calibration's confidence if limits are tested strictest first.
    """

    limit: float
    hit_rate: float
    loss: float
    bound: float


@dataclass(frozen=True, slots=True)
class AlarmLevels:
    """Levels by which the audit of a calibration decides.

    Attributes:
        most_changed: Share of changed answers above which the alarm should ring: the allowed share, or, for another
            metric, an upper limit of the share seen on C.
        tighter: The limit after a first alarm: at most half of the approximate hits on C were within it.
        profile: Profile of C with which later requests are compared; None for growing sources.
    """

    most_changed: float
    tighter: float
    profile: Profile | None = None


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration, and its basis.

    Attributes:
        chosen: The operating point in use; None if even the strictest failed: then nothing is reused approximately.
        curve: Tested operating points, strictest first; the last one failed, if any did.
        metric: Name of the metric whose loss is bounded.
        max_drop: The largest allowed loss.
        delta: Chance that the loss is larger than `max_drop`.
        n_sources: Number of sources; all were learned from (A and B; with growing sources C as well).
        n_tested: Number of requests that the bound was measured on (C).
        sources: `frozen`: the bound holds. `growing`: once the limit was chosen, C was learned from as well and serves,
            and later misses serve, too: the bound does not cover these.
        weights: Digest of the trunk's weights that it was made for.
        head: Digest of the weights outside the trunk, which make the answers.
        seconds: Time that it took, without computing the requests.
        model_ms: Median time in which the model computed a request of C, milliseconds.
        lookup_ms: Mean time of a lookup, milliseconds, drafts included.
        watch: Levels by which the audit decides; None if nothing is reused.
        n_alarms: Alarms of the audit since. The first one voids the bound.
        has_drifted: Whether requests are no longer like those of the calibration (`drift.py`). Then the bound is void,
            and nothing is reused approximately.
        shares: By rung in use, the share of the model's time that serving there saves, 0 to 1; 1 without a draft.
        draft: Name of the draft that it was made with; "" without one.
        drafted: Of an embedding's draft: share and bound of the vectors of C that would change if it served all.
        engine: Name of the engine that computed its sources; "" for the model itself.
    """

    chosen: OperatingPoint | None
    curve: tuple[OperatingPoint, ...] = field(repr=False)  # hundreds
    metric: str
    max_drop: float
    delta: float
    n_sources: int
    n_tested: int
    sources: Growth
    weights: str
    head: str
    seconds: float = 0.0
    model_ms: float = 0.0
    lookup_ms: float = 0.0
    watch: AlarmLevels | None = None
    n_alarms: int = 0
    has_drifted: bool = False
    shares: Mapping[str, float] = field(default_factory=lambda: {SEMANTIC: 1.0})
    draft: str = ""
    drafted: OperatingPoint | None = None
    engine: str = ""

    @property
    def is_certified(self) -> bool:
        """Whether the bound holds for requests like those of the calibration, with no alarm and no drift so far.

        `LLMCache.stats().audit.status` says whether an audit watches that it still does.
        """
        return self.chosen is not None and self.sources == "frozen" and not self.n_alarms and not self.has_drifted

    @cached_property
    def limit(self) -> float | None:
        """The largest risk allowed now; None: nothing is reused."""
        if self.chosen is None or self.watch is None or self.has_drifted:
            return None
        return self.watch.tighter if self.n_alarms else self.chosen.limit

    @cached_property
    def limits(self) -> Mapping[str, float]:
        """The largest risk allowed now by rung; empty if nothing is reused."""
        dial = self.limit
        return {} if dial is None else {rung: dial * share for rung, share in self.shares.items()}

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over the model alone; None if times are unknown or nothing is reused.

        It counts a lookup for every request and the computing of misses, but no other costs of the cache.
        """
        if self.chosen is None or not self.model_ms:
            return None
        return 1 / (1 - self.chosen.hit_rate + self.lookup_ms / self.model_ms)

    def __str__(self) -> str:
        """Return lines: the claim, the requests it was measured on, an embedding's draft, the present state."""
        if self.chosen is None:
            seen = ""
            first = f"nothing is reused: no limit kept {self.metric} within {self.max_drop:.2%} at {1 - self.delta:.0%}"
        else:
            promised = f"at most {self.chosen.bound:.2%} {self.metric} at {1 - self.delta:.0%}"
            first = f"{self.chosen.hit_rate:.0%} hits, {promised}, {self.n_sources:,} sources"
            seen = f", {self.chosen.loss:.2%} {self.metric} at risks of up to {self.chosen.limit:.3g}"
        told = {*self.shares, *(() if self.drafted is None else (DRAFT,))}  # an embedding's draft has a line of its own
        left_out = [rung for rung in (SEMANTIC, DRAFT) if rung not in told]
        rungs = f"; left out, since it is no faster: {left_out[0]}" if self.draft and left_out else ""
        second = f"{self.n_tested:,} requests tested{seen}, in {self.seconds:.1f} s{rungs}"
        if (alone := self.drafted) is not None:
            far = f"{alone.loss:.2%} of its vectors are under min_cosine, at most {alone.bound:.2%}"
            serves = "all" if self.limits.get(DRAFT, -inf) >= alone.limit else "none"
            second += f"\nthe draft serves {serves}: {far} at {1 - self.delta:.0%}"
        states = {"drifted": self.has_drifted, "tightened after an alarm": self.n_alarms == 1, "off": self.n_alarms > 1}
        state = next((name for name, holds in states.items() if holds), "certified" if self.is_certified else "")
        third = state or ("growing: no bound holds" if self.sources == "growing" else "off")
        return f"{first}\n{second}\n{third}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def is_of(self, other: "Calibration") -> bool:
        """Whether both are the same calibration, maybe before and after alarms or drift."""
        return self.curve == other.curve and (self.weights, self.head, self.seconds) == (
            other.weights,
            other.head,
            other.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "is_certified": self.is_certified, "speedup": self.speedup}


@dataclass(frozen=True, slots=True)
class HoldoutOutcome:
    """Risk and loss of the requests of C as if there were no limit: of one rung (N,), or of several in order (R, N)."""

    risk: Doubles  # by the rung's share; infinite if it never serves the request, -infinite for a repeat of a source
    loss: Doubles  # of serving each request; 0 or 1 if `is_share`
    low: float = 0.0  # least possible loss
    high: float = 1.0  # largest possible loss
    is_share: bool = True  # losses are 0 or 1, so that the exact bound on a share applies
    computed: Doubles | float = 0.0  # loss of computing each request (N,), by an engine whose answer may differ

    @property
    def dial(self) -> Doubles:
        """The least limit at which each request is served (N,)."""
        least: Doubles = np.atleast_2d(self.risk).min(axis=0)
        return least

    def serve(self, limit: float) -> tuple[Bools, Doubles]:
        """Return which requests are served within a limit (R, N), each by the first rung that may; and losses (N,)."""
        within = np.atleast_2d(self.risk) <= limit
        first: Bools = within & (np.cumsum(within, axis=0) == 1)
        lost = np.where(first, np.atleast_2d(self.loss), 0.0).sum(axis=0)
        return first, np.where(first.any(axis=0), lost, self.computed)


def n_tested(n: int, risk_target: RiskTarget) -> int:
    """Return how many of `n` requests the bound is measured on (C).

    The bound on a share improves in steps, one for each further changed answer that C could have and still pass. So C
    has the size of the step nearest to half of all requests; the others are more useful as sources.
    """
    half = round(n * TESTED)
    if not isinstance(risk_target.metric, str):
        return half
    steps = takewhile(
        lambda step: step < n, (draws_needed(risk_target.max_drop, risk_target.delta, k) for k in count())
    )
    return min(steps, key=lambda step: abs(step - half))


def split(n: int, risk_target: RiskTarget) -> tuple[list[int], list[int]]:
    """Return the numbers of the requests to learn from (A and B, in turns) and to test on (C), each in order."""
    order, n_last = np.random.default_rng(risk_target.seed).permutation(n), n_tested(n, risk_target)
    return sorted(order[n_last:].tolist()), sorted(order[:n_last].tolist())


def check_size(n: int, max_drop: float, delta: float, metric: Metric | str = "changed") -> None:
    """Refuse a sample too small to support the claim even without any loss; the error says how many are needed.

    Raises:
        CalibrationError: `n` is too small.
    """
    needed = size_needed(max_drop, delta, metric)
    if n < needed:
        c = _draws_needed(max_drop, delta, metric)
        raise CalibrationError(
            f"{n} requests cannot show a loss of at most {max_drop:g} with confidence {1 - delta:g}: at least {needed} "
            f"are needed, of which {c} measure the bound; give more, or allow a larger max_drop or delta"
        )


def size_needed(max_drop: float, delta: float, metric: Metric | str = "changed") -> int:
    """Return the least number of requests that can support a claim, if none of C loses anything."""
    c = _draws_needed(max_drop, delta, metric)
    return max(ceil(c / TESTED), ceil(LEAST_SOURCES / (1 - TESTED)))


def watch(trial: HoldoutOutcome, point: OperatingPoint, max_changed: float | None, delta: float) -> AlarmLevels:
    """Return the levels by which an audit of an operating point decides.

    `trial` counts changed answers of C as losses. `max_changed` is the largest allowed share of them. None if another
    metric is bounded: then it is an upper limit of the share seen, wrong with probability `delta`.
    """
    first, changed = trial.serve(point.limit)
    served: Bools = np.asarray(first.any(axis=0))
    risk = trial.dial
    if max_changed is None:
        # Over one half, reuse changes more answers than it keeps: the alarm must ring in any case.
        max_changed = min(0.5, share_upper(int(changed.sum()), len(served), delta))
    risks = np.sort(risk[served & np.isfinite(risk)])
    middle = risks[len(risks) // 2] if len(risks) else point.limit
    return AlarmLevels(max_changed, float(np.nextafter(middle, -np.inf)))  # below it, since risks may be tied


def _draws_needed(max_drop: float, delta: float, metric: Metric | str) -> int:
    """Return the least size of C that supports a claim if no request loses anything; for a mean, within 1 %."""
    if isinstance(metric, str):
        return draws_needed(max_drop, delta)
    span = metric.high - metric.low
    n = draws_needed(min(max_drop / span, 0.5), delta)
    while mean_upper(np.zeros(n), -span, span, delta) > max_drop:
        n = ceil(1.01 * n)
    return n


def candidate_limits(risk: Doubles) -> Doubles:
    """Return the limits to test (K,), strictest first, from the risks of the requests of B."""
    finite = np.unique(risk[np.isfinite(risk)])
    if len(finite) <= N_LIMITS:
        return finite
    return np.unique(np.quantile(finite, np.linspace(0, 1, N_LIMITS)))


def try_limits(trial: HoldoutOutcome, limits: Doubles, max_drop: float, delta: float) -> tuple[OperatingPoint, ...]:
    """Test limits on C, strictest first, each at level `delta`; return them up to and including the first failure."""
    tested: list[OperatingPoint] = []
    for limit in limits:
        first, losses = trial.serve(limit)
        if trial.is_share:
            bound = share_upper(int(losses.sum()), len(losses), delta)
        else:
            bound = mean_upper(losses, trial.low, trial.high, delta)
        tested.append(OperatingPoint(float(limit), float(first.any(axis=0).mean()), float(losses.mean()), bound))
        if bound > max_drop:
            break
    return tuple(tested)


def choose_limit(tested: Sequence[OperatingPoint], max_drop: float) -> OperatingPoint | None:
    """Return the operating point of the last limit that passed; None if none did."""
    passed = [point for point in tested if point.bound <= max_drop]
    return passed[-1] if passed else None


class Costs(NamedTuple):
    """Seconds of a request alone, to weigh rungs by."""

    search: float  # for a source
    draft: float
    model: float


def choose_shares(
    semantic: HoldoutOutcome, draft: HoldoutOutcome, costs: Costs, max_drop: float, delta: float
) -> dict[str, float]:
    """Return the rungs to use and their shares: those that are expected to take the least time.

    Both outcomes are of the same requests, of A and B, with one rung each. Each set of rungs is tried on them, up to
    the limit at which they lose as much as C, which is about as large, may lose.
    """
    alone = {SEMANTIC: semantic, DRAFT: draft}
    n = len(semantic.loss)
    most = sum(1 for _ in takewhile(lambda k: share_upper(k, n, delta) <= max_drop, range(1, n))) / n
    drafted = float(_serve_at_most({DRAFT: 1.0}, alone, most).mean())
    # What serving by a source saves is what would follow: the draft, and the model where the draft does not serve.
    follows = (costs.draft + (1 - drafted) * costs.model) / costs.model
    sets = ({SEMANTIC: 1.0}, {DRAFT: 1.0}, {SEMANTIC: min(1.0, follows), DRAFT: 1.0})
    return min(sets, key=lambda shares: _seconds(_serve_at_most(shares, alone, most), [*shares], costs))


def combined(alone: Mapping[str, HoldoutOutcome], shares: Mapping[str, float]) -> HoldoutOutcome:
    """Return the outcome of several rungs together, in order, given each alone."""
    used = [replace(alone[rung], risk=alone[rung].risk / share) for rung, share in shares.items()]
    return replace(
        used[0], risk=np.stack([outcome.risk for outcome in used]), loss=np.stack([outcome.loss for outcome in used])
    )


def _serve_at_most(shares: Mapping[str, float], alone: Mapping[str, HoldoutOutcome], most: float) -> Bools:
    """Return which requests each rung serves (R, N) at the loosest limit up to which the mean loss is within `most`."""
    trial = combined(alone, shares)
    served = trial.serve(-np.inf)[0]
    for limit in candidate_limits(trial.dial):
        first, losses = trial.serve(limit)
        if losses.mean() > most:
            break
        served = first
    return served


def _seconds(served: Bools, rungs: Sequence[str], costs: Costs) -> float:
    """Return the expected seconds of a request of which each rung serves its part (R, N)."""
    left, seconds = 1.0, 0.0
    for rung, part in zip(rungs, served, strict=True):
        seconds += left * (costs.search if rung == SEMANTIC else costs.draft)
        left -= float(part.mean())
    return seconds + left * costs.model


def losses(
    metric: Metric, own: Sequence[Any], reused: Sequence[Any], labels: Sequence[Any], numbers: Sequence[int]
) -> Doubles:
    """Return the loss in a metric (N,) of serving each request the output in `reused`; 0 where that is None.

    Raises:
        CalibrationError: The metric failed, or its score is out of range; names the request by its number.
    """

    def score(output: Any, label: Any, number: int) -> float:
        where = f"metric {metric.name!r}, request {number}, label {label!r}"
        try:
            value = float(metric.score(output, label))
        except Exception as error:
            raise CalibrationError(f"{where}: it failed: {error!r}") from error
        if not metric.low <= value <= metric.high:
            raise CalibrationError(f"{where}: it gave {value}, out of {metric.low} to {metric.high}")
        return value

    lost = [
        0.0 if other is None else score(output, label, number) - score(other, label, number)
        for output, other, label, number in zip(own, reused, labels, numbers, strict=True)
    ]
    return np.array(lost, np.float64)
