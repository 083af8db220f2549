"""Figures from traces: pure functions. Terms mean what docs and results say everywhere.

A share or rate is a fraction of 1. Missing is None, never 0.

Sizes: R rounds, N requests.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.measure import BYPASSED, COMPUTED, Trace, is_hit

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Times = NDArray[np.float64]


def quality(base: Ints, answers: Ints, labels: Ints, hits: Bools) -> dict[str, float | None]:
    """What reuse did to the answers.

    Args:
        base: Answers without a cache (N,).
        answers: Answers with it (N,).
        labels: Right answers (N,).
        hits: Whether the store served the request (N,).

    Returns:
        `accuracy`, `accuracy_nocache`, their difference `accuracy_drop`, `changed_answers` (over all requests) and
        `changed_per_hit` (over hits; None without any).
    """
    changed = int((answers != base).sum())
    n_hits = int(hits.sum())
    accuracy, accuracy_nocache = float((answers == labels).mean()), float((base == labels).mean())
    return {
        "accuracy": accuracy,
        "accuracy_nocache": accuracy_nocache,
        "accuracy_drop": accuracy_nocache - accuracy,
        "changed_answers": changed / len(base),
        "changed_per_hit": changed / n_hits if n_hits else None,
    }


def hit_rates(served: NDArray[np.str_]) -> dict[str, Any]:
    """`hit_rate`, and `hits_by_rung` as shares of all requests, from what served each (N,); bypasses are no hits."""
    rungs, counts = np.unique(served[is_hit(served)], return_counts=True)
    by_rung = {str(rung): int(count) / len(served) for rung, count in zip(rungs, counts, strict=True)}
    return {"hit_rate": float(is_hit(served).mean()), "hits_by_rung": by_rung}


def speed(base: Trace, trace: Trace) -> dict[str, float | None]:
    """How much faster the stream went.

    Returns:
        `speedup`: sum of times without over sum of times with the cache, median over rounds; `speedup_min` and
        `speedup_max` over rounds; `miss_overhead`: what a computed request costs more, over its time without a cache;
        `hit_cost`: time of a hit over its time without a cache.
    """
    ratios = base.ms.sum(axis=1) / trace.ms.sum(axis=1)
    computed = trace.served == COMPUTED
    cost_of_computed = _ratio(trace.ms, base.ms, computed)
    return {
        "speedup": float(np.median(ratios)),
        "speedup_min": float(ratios.min()),
        "speedup_max": float(ratios.max()),
        "miss_overhead": None if cost_of_computed is None else cost_of_computed - 1.0,
        "hit_cost": _ratio(trace.ms, base.ms, trace.is_hit),
    }


def _ratio(ms: Times, base_ms: Times, where: Bools) -> float | None:
    return float(ms[where].sum() / base_ms[where].sum()) if where.any() else None


def latencies(base: Trace, trace: Trace) -> dict[str, dict[str, float | int] | None]:
    """Percentiles of wall time over all rounds, by what happened to the request.

    Returns:
        `nocache_ms`; `cache_ms` (all requests with the cache); `hit_ms` (served from another request) and
        `exact_hit_ms` (from the same request seen before); `miss_ms` (banks full, so it also evicted) and
        `filling_miss_ms` (there was room).
    """
    computed = trace.served == COMPUTED
    return {
        "nocache_ms": percentiles(base.ms),
        "cache_ms": percentiles(trace.ms),
        "hit_ms": percentiles(trace.ms[trace.is_hit & (trace.served != "exact")]),
        "exact_hit_ms": percentiles(trace.ms[trace.served == "exact"]),
        "miss_ms": percentiles(trace.ms[computed & trace.evicting]),
        "filling_miss_ms": percentiles(trace.ms[computed & ~trace.evicting]),
    }


def percentiles(ms: Times) -> dict[str, float | int] | None:
    """Median, 90th and 99th percentile in milliseconds, and how many times there were; None without any."""
    if ms.size == 0:
        return None
    median, p90, p99 = (float(value) for value in np.percentile(ms, (50, 90, 99)))
    return {"median": median, "p90": p90, "p99": p99, "n": int(ms.size)}


def summary(base: Trace, trace: Trace, labels: Ints) -> dict[str, Any]:
    """All figures of one arm against the arm without a cache. Answers are those of the first round."""
    figures: dict[str, Any] = {
        **hit_rates(trace.served[0]),
        **speed(base, trace),
        **quality(base.answers[0], trace.answers[0], labels, trace.is_hit[0]),
        **latencies(base, trace),
        "bytes": None,
        "entries": None,
    }
    if trace.stats is not None:
        figures |= {"bytes": trace.stats.nbytes, "entries": trace.stats.n_stored}
        figures["bypassed"] = int((trace.served[0] == BYPASSED).sum())
        figures["cache_errors"] = trace.stats.errors
    return figures
