"""Measure `payback`: what calibrated reuse saves after its learning phase, live, and when that has paid for learning.

The model alone and llmcache answer the same stream in turns, from cold. The first `learn` requests are llmcache's
learning phase: computed, observed, and calibrated on with the last of them, all within the clock; they are counted
apart. Then the pattern of hits is replayed on another, larger model.

With hit rate h, overhead of a miss o and cost of a hit c (both relative to the request's time without a cache) a stream
takes (1 - h)(1 + o) + h c of its time without one.

Sizes: R rounds, N requests.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.bench import pattern
from experiments.measures.learning import LearningExperiment, later
from experiments.measures.serve import measure
from experiments.methods import NOCACHE
from experiments.methods.base import Method
from experiments.methods.cached import Cached
from experiments.methods.calibrated import Calibrated
from experiments.methods.nocache import NoCache
from experiments.metrics.metrics import Times, expected_speedup, speed, summary
from experiments.metrics.trace import Trace
from experiments.support.folders import Folders
from experiments.tasks.workload import Workload
from llmcache import ConfigError

#: What a large model is held against: misses that cost 3 % more, hits that cost 2 %, nine tenths of what that gives.
MISS, HIT, SHARE = 1.03, 0.02, 0.9


class Payback(LearningExperiment):
    """Settings of the measure. `cache.sources` and `cache.delta` are those of the calibration."""

    # What may be lost: `changed` answers, or right ones that become wrong (`accuracy`).
    metric: Literal["changed", "accuracy"] = "changed"
    rounds: int = Field(default=3, ge=1)  # how often the stream is run; each round begins cold, and learns
    replay: pattern.Settings | None = None  # on which model the pattern of hits is replayed; None: on none


def run(experiment: Payback, folders: Folders) -> Outcome:
    """Serve the stream, and replay its hits."""
    workload = experiment.stream(folders)
    if experiment.metric == "accuracy" and (n := workload.facts.get("n_unanswerable")):
        raise ConfigError(
            f"metric: 'accuracy' needs labels that the head knows, and {n} requests of the stream have others; take "
            "metric=changed, another seed, or leave these records out"
        )
    learners = {f"llmcache {max_drop:g}": _learner(experiment, workload, max_drop) for max_drop in experiment.max_drops}
    figures, traces = {}, {}
    for label, learner in learners.items():  # in turns with the model alone, and with nobody else
        methods: dict[str, Method] = {NOCACHE: NoCache(workload, {}), label: learner}
        taken = measure(workload, methods, experiment.rounds, warmup=0)
        figures[label] = _figures(experiment, workload, taken[NOCACHE], taken[label], learner)
        traces |= {f"{NOCACHE} beside {label}": taken[NOCACHE], label: taken[label]}
    replayed = {}
    if experiment.replay is not None:
        for label in learners:
            hits = traces[label].is_hit[0, experiment.learn :]
            replayed[label] = _replay(experiment.replay, hits, experiment)
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "n_counted": len(workload.requests) - experiment.learn,
        "mean_tokens": float(np.mean([request.inputs["input_ids"].shape[-1] for request in workload.requests])),
        "rounds": experiment.rounds,
        "methods": figures,
        "replayed": replayed,
        "summary": [
            *(_shown(label, row) for label, row in figures.items()),
            *(_shown(f"{label} on {row['model']}", row) for label, row in replayed.items()),
        ],
    }
    return Outcome([row for label, trace in traces.items() for row in _rows(label, trace, experiment.learn)], metrics)


def _learner(experiment: Payback, workload: Workload, max_drop: float) -> Calibrated:
    claim = experiment.risk_target(max_drop, experiment.config.sources, experiment.metric)
    return Calibrated(workload, experiment.cache, experiment.learn, claim)


def _figures(experiment: Payback, workload: Workload, base: Trace, trace: Trace, learner: Calibrated) -> dict[str, Any]:
    """Figures of the later requests, and beside them what learning cost."""
    learn, found = experiment.learn, learner.calibration
    assert found is not None
    counted = summary(later(workload, learn), base.after(learn), trace.after(learn), experiment.seed)
    return {
        **counted,
        "speedup_expected": expected_speedup(counted["hit_rate"], counted["miss_overhead"], counted["hit_cost"]),
        "speedup_with_learning": float(np.median(base.ms.sum(axis=1) / trace.ms.sum(axis=1))),
        **payback(base.ms, trace.ms, learn),
        "calibration_s": round(found.seconds, 3),
        "calibration": {
            key: value for key, value in found.to_dict().items() if key not in ("curve", "weights", "head")
        },
    }


def payback(base_ms: Times, ms: Times, learn: int) -> dict[str, float | None]:
    """Medians over rounds (R, N): what learning cost, and after how many later requests that is saved for good."""
    saved = base_ms - ms
    extra = -saved[:, :learn].sum(axis=1)
    is_owed = np.cumsum(saved[:, learn:], axis=1) < extra[:, None]
    n_later = is_owed.shape[1]
    last_owed = np.where(is_owed.any(axis=1), n_later - is_owed[:, ::-1].argmax(axis=1), 0)
    after = np.where(extra <= 0, 0, last_owed + 1)
    is_over = after <= n_later
    return {
        "learning_extra_s": float(np.median(extra)) / 1e3,
        "paid_back_after": float(np.median(after)) if is_over.all() else None,
    }


def _replay(settings: pattern.Settings, hits: NDArray[np.bool_], experiment: Payback) -> dict[str, Any]:
    """Speed of another model on a pattern of hits (N,); the requests that fill its cache are not counted."""
    wanted = hits[: settings.limit]
    workload = pattern.Pattern(settings, wanted.tolist(), experiment.seed)
    methods: dict[str, Method] = {NOCACHE: NoCache(workload, {}), "llmcache": Cached(workload, {"tau": settings.tau, "layers": "last"})}
    traces = measure(workload, methods, experiment.rounds, warmup=0)
    base, trace = (traces[name].after(settings.fill) for name in (NOCACHE, "llmcache"))
    figures, h = speed(base, trace), float(trace.is_hit[0].mean())
    return {
        "model": settings.model,
        "weights": workload.facts["weights"],
        "seq_len": settings.seq_len,
        "n": len(wanted),
        "hit_rate": h,
        "as_in_the_pattern": float((trace.is_hit[0] == wanted).mean()),
        **figures,
        "speedup_expected": expected_speedup(h, figures["miss_overhead"], figures["hit_cost"]),
        "speedup_asked": SHARE / ((1 - h) * MISS + h * HIT),
    }


def _rows(label: str, trace: Trace, learn: int) -> list[dict[str, Any]]:
    """One row a round: seconds of both phases, and hits of the later one."""
    return [
        {
            "method": label,
            "round": number,
            "learning_s": float(ms[:learn].sum()) / 1e3,
            "later_s": float(ms[learn:].sum()) / 1e3,
            "hit_rate": float(hits[learn:].mean()),
        }
        for number, (ms, hits) in enumerate(zip(trace.ms, trace.is_hit, strict=True))
    ]


def _shown(way: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """What a table on the screen has of a way; a replay on random weights has no quality, and learns nothing."""
    names = ("hit_rate", "speedup", "speedup_min", "speedup_max", "miss_overhead", "hit_cost", "speedup_expected")
    more = ("speedup_asked", "accuracy_drop", "changed_answers", "learning_extra_s", "paid_back_after")
    return {"way": way} | {name: figures.get(name) for name in (*names, *more)}
