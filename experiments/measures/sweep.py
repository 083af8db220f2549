"""Measure `sweep`: hit rate and quality at many thresholds, replayed from one pass; live speed at a few of them.

One curve per method: llmcache with each fingerprint, DocCache, the semantic response cache. `precision` is the share
of hits that keep the answer. Precision against hit rate says more than either alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from experiments.measures.base import Outcome, TaskExperiment
from experiments.measures.serve import measure
from experiments.methods import NOCACHE
from experiments.methods.base import Method, NoCache
from experiments.methods.cached import Cached
from experiments.metrics.frontier import at_tau
from experiments.metrics.metrics import alone, expected_speedup, figures_of, summary
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.replay import Replay, Units, by_request, replay, rows_served
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from experiments.tasks.workload import Answer, Workload

WARMUP = 20
SAME = 0.9999  # cosine of equal requests up to rounding: at this tau, llmcache serves only exact repeats


AHEAD = {"layers": "last"}  # one search per call, as in the replay


class Sweep(TaskExperiment):
    taus: tuple[float, ...] = Field(min_length=1)  # thresholds
    methods: tuple[Literal["llmcache", "doccache", "semantic_response"], ...] = ("llmcache",)  # curves to draw
    # Fingerprints of llmcache, one curve each: names, or mappings with `name` and settings.
    fingerprints: tuple[Any, ...] = ("mean",)
    encoder: str = "minilm"  # sentence encoder of the semantic response cache
    live_taus: tuple[float, ...] = ()  # thresholds at which llmcache also runs live, for its speed
    live_limit: int = Field(default=300, ge=1)  # requests of live runs, from the beginning of the stream
    rounds: int = Field(default=3, ge=1)  # rounds of live runs
    # Further llmcache settings for live runs; its payload decides whether requests of other lengths can be served.
    cache: dict[str, Any] = Field(default_factory=dict)

    def check(self) -> None:
        super().check()
        for tau in (max(self.taus), *self.live_taus):
            Cached.check({**self.cache, "tau": tau}, "cache")
        for options in self.fingerprints:
            make_fingerprint(options)


def run(experiment: Sweep, folders: Folders) -> Outcome:
    workload = build(experiment.task, folders, experiment.seed)
    # First: it refuses settings that do not suit the model.
    fits_any_length = "llmcache" in experiment.methods and _fits_any_length(experiment, workload)
    live = _live(experiment, folders)
    recording = Recording(workload)
    points = [point for curve in _curves(experiment, recording, fits_any_length) for point in curve]
    own = _label(experiment.cache.get("fingerprint", "mean"))
    live = [row | _at_length(row, own, points) for row in live]
    metrics = {
        **experiment.about(workload),
        "nocache": alone(workload, recording.answers, experiment.seed),
        "points": points,
        "live": live,
        "summary": [*_shown(points), *_shown(live)],
    }
    return Outcome(points, metrics)


def _curves(experiment: Sweep, recording: Recording, fits_any_length: bool) -> Any:
    for method in experiment.methods:
        if method == "llmcache":
            for options in experiment.fingerprints:
                units = recording.rows(make_fingerprint(options), fits_any_length)
                taus = (math.inf, *sorted({*experiment.taus, *experiment.live_taus}))  # exact repeats alone come first
                yield _points(experiment, recording, units, taus, recording.reread, (method, _label(options)))
        elif method == "doccache":
            units, taus = recording.documents(), (SAME, *experiment.taus)
            yield _points(experiment, recording, units, taus, recording.handed, (method, None))
        else:
            units, taus = recording.texts(experiment.encoder), (SAME, *experiment.taus)
            yield _points(experiment, recording, units, taus, recording.borrowed, (method, None))


def _points(
    experiment: Sweep,
    recording: Recording,
    units: Units,
    taus: tuple[float, ...],
    answers_of: Callable[[Units, Replay], list[Answer]],
    name: tuple[str, str | None],
) -> Iterator[dict[str, Any]]:
    again = replay(units, taus)
    for tau, told in tracked(list(zip(taus, again, strict=True)), f"Replaying {name[1] or name[0]}"):
        served, answers = by_request(units, told), answers_of(units, told)
        yield {
            "method": name[0],
            "fingerprint": name[1],
            "tau": None if math.isinf(tau) else tau,
            "rows_served": rows_served(told),
            **figures_of(recording.workload, recording.answers, answers, served, experiment.seed),
        }


def _label(fingerprint: str | Mapping[str, Any]) -> str:
    """Return the fingerprint's name followed by its settings: `pca dim=128`."""
    if isinstance(fingerprint, str):
        return fingerprint
    settings = (f"{key}={value}" for key, value in fingerprint.items() if key != "name")
    return " ".join([str(fingerprint["name"]), *settings])


def _fits_any_length(experiment: Sweep, workload: Workload) -> bool:
    """Whether llmcache's entries for this model can serve requests of other lengths."""
    method = Cached(workload, {**AHEAD, **experiment.cache, "tau": max(experiment.taus)})
    method.begin()
    payload = method.payload
    method.end()
    return payload != "sequence"


def _live(experiment: Sweep, folders: Folders) -> list[dict[str, Any]]:
    if not experiment.live_taus:
        return []
    n = min(experiment.live_limit, experiment.task.limit or experiment.live_limit)
    workload = build(experiment.task.model_copy(update={"limit": n}), folders, experiment.seed)
    methods: dict[str, Method] = {NOCACHE: NoCache(workload, {})}
    methods |= {str(tau): Cached(workload, {**AHEAD, **experiment.cache, "tau": tau}) for tau in experiment.live_taus}
    traces = measure(workload, methods, experiment.rounds, WARMUP)
    return [
        {"method": "llmcache", "tau": tau, "n": len(workload.requests), "rounds": experiment.rounds}
        | summary(workload, traces[NOCACHE], traces[str(tau)], experiment.seed)
        for tau in experiment.live_taus
    ]


def _at_length(
    row: Mapping[str, Any], fingerprint: str, points: Sequence[Mapping[str, Any]]
) -> dict[str, float | None]:
    """Return hit rate and speed-up on the whole stream, whose later requests hit more often than the first ones."""
    # Uses the stream's replayed hit rate h, and the live costs of a miss (o) and a hit (c).
    whole = at_tau(points, (row["method"], fingerprint), row["tau"])
    rate = None if whole is None else whole["hit_rate"]
    speedup = expected_speedup(rate, row["miss_overhead"], row["hit_cost"])
    return {"hit_rate_all": rate, "speedup_all": speedup}


def _shown(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = ("method", "fingerprint", "tau", "hit_rate", "accuracy", "accuracy_drop", "changed_answers", "speedup")
    return [{name: point.get(name) for name in names} for point in points]
