"""Traces of a method on a stream, and figures computed from them by pure functions. Terms are those of the docs.

A share or rate is a fraction of 1. Missing is None, never 0. Intervals cover 95 %: Clopper-Pearson for shares, a paired
bootstrap over requests for means and differences. If requests come in clusters (one text asked many times, questions
on one passage), all intervals are a bootstrap over clusters, since one text can account for many answers. If a
bootstrap has too little variation, the interval is None rather than one without width.

Sizes: R rounds, N requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from experiments.methods.base import BYPASSED, COMPUTED, Served, is_hit
from experiments.tasks.workload import Answer, Workload
from llmcache.generation import QUOTABLE

Bools = NDArray[np.bool_]
Times = NDArray[np.float64]
N_RESAMPLES = 2000
#: Fewest values whose range covers the median of their distribution with 95 %: n values all fall on one side of it in 2
#: of 2**n cases.
FEWEST = 6


@dataclass(frozen=True, slots=True)
class Trace:
    ms: NDArray[np.float64]  # wall time of each request, milliseconds, (R, N)
    served: NDArray[np.str_]  # what served each request (R, N): a rung or kind of match, `computed` or `bypassed`
    evicting: NDArray[np.bool_]  # whether storing the request evicted an entry (R, N)
    answers: Sequence[Answer]  # answers of the first round, N
    notes: Sequence[Served]  # outcome of each request of the first round, N
    nbytes: int | None = None  # bytes held after the last round; None if the method stores nothing
    n_entries: int | None = None  # entries held after the last round; None if the method stores nothing

    @property
    def is_hit(self) -> NDArray[np.bool_]:
        return is_hit(self.served)


def quality(
    workload: Workload, base: Sequence[Answer], answers: Sequence[Answer], hits: Bools, seed: int = 0
) -> dict[str, Any]:
    """Compare N answers with those of the model alone, given `hits` (N,). `accuracy` is the task's mean score."""
    pairs = zip(base, answers, strict=True)
    changed = np.array([workload.is_changed(one, other) for one, other in pairs], dtype=np.float64)
    before, after = workload.scores(base), workload.scores(answers)
    n_hits, drops, groups = int(hits.sum()), before - after, clusters(workload)
    return {
        "accuracy": float(after.mean()),
        "accuracy_nocache": float(before.mean()),
        "accuracy_ci": interval(after, groups, seed),
        "accuracy_drop": float(drops.mean()),
        # If no score changed, a bootstrap would claim certainty.
        "accuracy_drop_ci": interval(drops, groups, seed) if drops.any() else _open(hits, groups),
        "changed_answers": float(changed.mean()),
        "changed_answers_ci": _of_share(changed, groups, seed),
        "changed_per_hit": float(changed.sum()) / n_hits if n_hits else None,
        "extras": workload.extras(answers),
    }


def alone(workload: Workload, base: Sequence[Answer], seed: int = 0) -> dict[str, Any]:
    return quality(workload, base, base, np.zeros(len(base), dtype=bool), seed)


def figures_of(
    workload: Workload, base: Sequence[Answer], told: Sequence[Answer], served: NDArray[np.str_], seed: int
) -> dict[str, Any]:
    """Return hits and quality of N requests, and `precision`: the share of hits that keep the answer."""
    figures = quality(workload, base, told, is_hit(served), seed)
    per_hit = figures["changed_per_hit"]
    return {
        **hit_rates(served, clusters(workload), seed),
        **figures,
        "precision": None if per_hit is None else 1 - per_hit,
    }


def _open(hits: Bools, groups: NDArray[np.int64]) -> list[float] | None:
    """Return the interval left open by hits (N,) that changed no score, given clusters (N,); None without hits."""
    if not hits.any():
        return None
    most = share_interval(0, len(set(groups[hits])))[1] * float(hits.mean())
    return [-most, most]


def clusters(workload: Workload) -> NDArray[np.int64]:
    names = np.array([request.cluster or request.id for request in workload.requests])
    numbers: NDArray[np.int64] = np.unique(names, return_inverse=True)[1]
    return numbers


def interval(values: NDArray[np.float64], groups: NDArray[np.int64], seed: int = 0) -> list[float] | None:
    """Return the 95 % bootstrap interval of the mean of `values` (N,), by clusters (N,); None if too little varies."""
    sums, sizes = np.bincount(groups, values), np.bincount(groups)
    if len(sums) < FEWEST or np.ptp(values) == 0:
        return None
    drawn = _resamples(len(sums), seed)
    return [float(bound) for bound in np.percentile(drawn @ sums / (drawn @ sizes), (2.5, 97.5))]


@lru_cache(maxsize=1)  # many figures are computed from the same requests
def _resamples(n: int, seed: int) -> NDArray[np.float64]:
    """Return how often each of `n` clusters occurs in each resample, (`N_RESAMPLES`, n)."""
    rng = np.random.default_rng(seed)
    return np.array([np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(N_RESAMPLES)], np.float64)


def _of_share(is_counted: NDArray[Any], groups: NDArray[np.int64], seed: int) -> list[float] | None:
    """Return the interval of a share (N,): exact if requests are independent or all agree, else bootstrap."""
    n_clusters = len(set(groups))
    if n_clusters == len(groups):
        return share_interval(int(is_counted.sum()), len(groups))
    if is_counted.all() or not is_counted.any():
        return share_interval(n_clusters if is_counted.any() else 0, n_clusters)
    return interval(is_counted.astype(np.float64), groups, seed)


def share_interval(k: int, n: int) -> list[float]:
    """Return the 95 % interval of a share of which `k` of `n` were observed (Clopper and Pearson 1934)."""
    bounds = binomtest(k, n).proportion_ci(0.95, method="exact")
    return [float(bounds.low), float(bounds.high)]


def hit_rates(served: NDArray[np.str_], groups: NDArray[np.int64], seed: int = 0) -> dict[str, Any]:
    """Return `hit_rate` with its interval, and `hits_by_rung`: shares of all requests (N,), bypasses included."""
    hits = is_hit(served)
    rungs, counts = np.unique(served[hits], return_counts=True)
    by_rung = {str(rung): int(count) / len(served) for rung, count in zip(rungs, counts, strict=True)}
    return {
        "hit_rate": float(hits.mean()),
        "hit_rate_ci": _of_share(hits, groups, seed),
        "hits_by_rung": by_rung,
    }


def speed(base: Trace, trace: Trace) -> dict[str, Any]:
    """Return the speed-up of the stream, and the costs of a miss and a hit relative to the time without a cache."""
    computed = trace.served == COMPUTED
    cost_of_computed = _ratio(trace.ms, base.ms, computed)
    ratios = base.ms.sum(axis=1) / trace.ms.sum(axis=1)  # ratios of sums, by round
    return {
        "speedup": float(np.median(ratios)),
        "speedup_min": float(ratios.min()),
        "speedup_max": float(ratios.max()),
        "miss_overhead": None if cost_of_computed is None else cost_of_computed - 1.0,
        "hit_cost": _ratio(trace.ms, base.ms, trace.is_hit),
    }


def expected_speedup(h: float | None, o: float | None, c: float | None) -> float | None:
    """Return the speed-up that hit rate h, miss overhead o and hit cost c imply; None if one of them is None."""
    return None if h is None or o is None or c is None else 1 / ((1 - h) * (1 + o) + h * c)


def _ratio(ms: Times, base_ms: Times, where: Bools) -> float | None:
    return float(ms[where].sum() / base_ms[where].sum()) if where.any() else None


def latencies(base: Trace, trace: Trace) -> dict[str, dict[str, float | int | None] | None]:
    """Return percentiles of wall time over all rounds, by the request's outcome."""
    computed = trace.served == COMPUTED
    return {
        "nocache_ms": percentiles(base.ms.ravel()),
        "cache_ms": percentiles(trace.ms.ravel()),
        "hit_ms": percentiles(trace.ms[trace.is_hit & (trace.served != "exact")]),
        "exact_hit_ms": percentiles(trace.ms[trace.served == "exact"]),
        "miss_ms": percentiles(trace.ms[computed & trace.evicting]),  # banks full, so it also evicts
        "filling_miss_ms": percentiles(trace.ms[computed & ~trace.evicting]),
    }


def percentiles(ms: Sequence[float] | Times) -> dict[str, float | int | None] | None:
    """Return median, p90 and p99 (None below `QUOTABLE` times), and the count; None without times."""
    if len(ms) == 0:
        return None
    median, *tails = (float(value) for value in np.percentile(ms, (50, 90, 99)))
    p90, p99 = tails if np.size(ms) >= QUOTABLE else (None, None)
    return {"median": median, "p90": p90, "p99": p99, "n": np.size(ms)}


def summary(workload: Workload, base: Trace, trace: Trace, seed: int = 0) -> dict[str, Any]:
    """Return all figures of one method against the model alone. Answers are those of the first round."""
    return {
        **hit_rates(trace.served[0], clusters(workload), seed),
        "rows_served": float(np.mean([note.share * note.is_hit for note in trace.notes])),
        **speed(base, trace),
        **quality(workload, base.answers, trace.answers, trace.is_hit[0], seed),
        **latencies(base, trace),
        "bytes": trace.nbytes,
        "entries": trace.n_entries,
        "bypassed": int((trace.served[0] == BYPASSED).sum()),
    }
