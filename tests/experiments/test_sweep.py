"""Sweeps, observed runs and layers, on tiny models: a replay must equal a live run."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from experiments.data.streams.traffic import Arrival, Traffic, arrange, draw
from experiments.measures import MEASURES, observe
from experiments.measures.base import serve_once
from experiments.measures.layers import choose_taus
from experiments.methods import METHODS
from experiments.methods.base import COMPUTED
from experiments.methods.cached import Cached
from experiments.models.loading import UNTRAINED
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.replay import by_request, replay, rows_served
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache.errors import ConfigError
from llmcache.memory.policies import POLICIES
from llmcache.memory.policies.lru import TTL

TASKS: dict[str, dict[str, Any]] = {
    "openbookqa": {"name": "openbookqa", "model": UNTRAINED, "data": "made", "limit": 20},
    "squad_v2": {"name": "squad_v2", "model": UNTRAINED, "data": "made", "limit": 20, "max_length": 128},
    "stream": {
        "name": "stream",
        "model": UNTRAINED,
        "limit": 40,
        "data": {"path": "support_desk", "limit": 200},
        "head": {"kind": "logistic", "pool": "cls"},
    },
    "wikitext": {"name": "wikitext", "model": UNTRAINED, "data": "made", "window": 16, "limit": 24, "repeats": {}},
}
SWEEP = {"measure": "sweep", "task": TASKS["openbookqa"], "taus": [0.9]}
OBSERVE = {"measure": "observe", "task": TASKS["wikitext"]}
PCA = {"name": "pca", "dim": 4, "fit_on": 10}
#: Thresholds at which some rows of every task hit, and not all.
NEAR: dict[str, float] = {"mean": 0.8, "attention": 0.8, "minhash": 0.1, "simhash": 0.6, "pca": 0.5}


def run(values: dict[str, Any]) -> Any:
    experiment = make_experiment(values)
    return MEASURES[experiment.measure].run(experiment, Folders())


@cache
def recorded(task: str) -> Recording:
    return Recording(build(make_task(TASKS[task]), Folders(), 0))


@pytest.mark.parametrize(
    ("task", "fingerprint"),
    [
        *((task, "mean") for task in TASKS),
        ("openbookqa", "simhash"),
        ("squad_v2", "attention"),
        ("stream", PCA),
        ("wikitext", "minhash"),
    ],
)
def test_replay_equals_a_live_run(task: str, fingerprint: Any) -> None:
    recording = recorded(task)
    workload = recording.workload
    tau = NEAR[fingerprint if isinstance(fingerprint, str) else fingerprint["name"]]
    options = {"tau": tau, "layers": "last", "fingerprint": fingerprint, "allow_unsafe": True}
    if workload.payload is not None:
        options["payload"] = workload.payload
    live = Cached(workload, options)
    live.begin()
    fits_any_length = live.payload != "sequence"
    told, notes = serve_once(live, range(len(workload.requests)))
    units = recording.rows(make_fingerprint(fingerprint), fits_any_length)
    (again,) = replay(units, [tau])
    names = {"paper": "near"}
    assert by_request(units, again).tolist() == [names.get(note.by, note.by) for note in notes]
    assert rows_served(again) == pytest.approx(np.mean([note.share * note.is_hit for note in notes]))
    answers = recording.reread(units, again)
    assert not any(workload.is_changed(one, other) for one, other in zip(told, answers, strict=True))
    assert {"near", "computed"} <= set(again.served)


@pytest.mark.parametrize(
    ("method", "options"),
    [("doccache", {"threshold": 0.6}), ("semantic_response", {"threshold": 0.9, "encoder": UNTRAINED})],
)
@pytest.mark.parametrize("task", TASKS)
def test_replay_of_other_methods_equals_a_live_run(task: str, method: str, options: dict[str, Any]) -> None:
    recording = recorded(task)
    workload = recording.workload
    told, notes = serve_once(METHODS[method](workload, options), range(len(workload.requests)))
    units = recording.documents() if method == "doccache" else recording.texts(UNTRAINED)
    (again,) = replay(units, [options["threshold"]])
    assert (by_request(units, again) != COMPUTED).tolist() == [note.is_hit for note in notes]
    assert 0 < rows_served(again) < 1
    answers = (recording.handed if method == "doccache" else recording.borrowed)(units, again)
    assert not any(workload.is_changed(one, other) for one, other in zip(told, answers, strict=True))
    if task == "openbookqa" and method == "doccache":
        assert len(set(answers)) > 1  # not the first choice each time


def test_a_sweep_has_a_point_for_every_threshold() -> None:
    asked = {"taus": [0.5, 0.9], "methods": ["llmcache", "doccache"], "fingerprints": ["mean", "minhash"]}
    outcome = run(SWEEP | asked)
    points = [(row["method"], row["fingerprint"], row["tau"]) for row in outcome.rows]
    curves = [("llmcache", "mean"), ("llmcache", "minhash")]
    assert points == [(*curve, tau) for curve in curves for tau in (None, 0.5, 0.9)] + [
        ("doccache", None, tau) for tau in (0.9999, 0.5, 0.9)
    ]
    rates = [row["hit_rate"] for row in outcome.rows[:3]]
    assert rates[1] >= rates[2] >= rates[0]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"methods": ["llmcache", "no"]}, r"^methods\.1: .*'llmcache', 'doccache' or 'semantic_response' .*'no'"),
        ({"fingerprints": ["mean", "median"]}, "^fingerprint: unknown name 'median'; known: attention, mean"),
        ({"fingerprints": [{"name": "median", "bits": 64}]}, "^fingerprint: unknown name 'median'; known: "),
        ({"fingerprints": [{"name": "pca", "dims": 8}]}, "^fingerprint: pca: unknown option 'dims'"),
        ({"cache": {"max_entrys": 8}}, "^cache.max_entrys: unknown setting; did you mean 'max_entries'"),
        ({"live_taus": [1.5]}, r"^cache.tau: .*got 1.5"),
        (OBSERVE | {"cache": {"policy": "newest"}}, "^policy: unknown name 'newest'; known: divergence, fifo"),
        (OBSERVE | {"cache": {"policy": {"name": "newest", "ttl_s": 3}}}, "^policy: unknown name 'newest'; known: "),
    ],
)
def test_what_is_unknown_is_refused_by_name_before_anything_is_loaded(wrong: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make_experiment(wrong if "measure" in wrong else SWEEP | wrong)


def test_an_observed_run_moves_the_clock_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Brief(TTL):
        def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
            super().__init__(ttl_s=3, now=now)

    monkeypatch.setitem(POLICIES, "brief", Brief)
    by_name, brief = {"cache": {"policy": {"name": "ttl", "ttl_s": 3}}}, {"cache": {"policy": "brief"}}
    outcome = run({**OBSERVE, **by_name, "seconds_per_request": 1.0})
    kept = run({**OBSERVE, **by_name, "seconds_per_request": 0.001})
    assert outcome.metrics["entries"] <= 4 < kept.metrics["entries"]
    assert outcome.metrics["changed_answers"] == 0.0
    assert run({**OBSERVE, **brief, "seconds_per_request": 1.0}).metrics["entries"] <= 4


def test_what_the_model_does_not_take_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_alone", None)
    with pytest.raises(ConfigError, match=r"^tau=0\.8 with a model that has a"):
        run({"measure": "observe", "task": {**TASKS["squad_v2"], "limit": 5}, "cache": {"tau": 0.8}})


def test_as_written_every_layer_is_hit_alike() -> None:
    outcome = run({"measure": "layers", "task": TASKS["wikitext"], "tau": 0.8})
    rates = {row["hit_rate_as_written"] for row in outcome.rows}
    assert len(rates) == 1 and rates.pop() > 0
    own = [row["hit_rate_per_layer"] for row in outcome.rows]
    assert own == sorted(own)  # a row with a stored state hits its entry in every later layer


def test_the_lowest_threshold_that_is_pure_enough() -> None:
    similarity = np.array([[-1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]], dtype=np.float32)
    likeness = np.array([[0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]], dtype=np.float32)
    assert choose_taus(similarity, likeness, 0.95, 1.0) == {0: pytest.approx(0.8)}
    assert choose_taus(similarity, likeness * 0, 0.95, 1.0) == {0: 1.0}


def test_traffic_is_seeded_skewed_and_changes_by_phases() -> None:
    pool = list(range(100))
    steady = draw(pool, Traffic(n=4000, skew=1.2, phases=1))
    assert steady == draw(pool, Traffic(n=4000, skew=1.2, phases=1)) and len(steady) == 4000
    most = max(set(steady), key=steady.count)
    assert steady.count(most) > 5 * 4000 / 100
    shifting = draw(pool, Traffic(n=4000, skew=1.2, phases=2))
    halves = [max(set(half), key=half.count) for half in (shifting[:2000], shifting[2000:])]
    assert halves[0] != halves[1]


def test_bursts_bring_each_request_once_and_intents_together() -> None:
    pool = [(intent, i) for intent in range(10) for i in range(40)]

    def come(kind: str) -> list[tuple[int, int]]:
        return arrange(pool, lambda one: one[0], Arrival(name=kind, length=20, at_once=2), seed=1)

    bursts, shuffled = come("bursts"), come("shuffled")
    assert sorted(bursts) == sorted(shuffled) == pool and bursts != shuffled
    n_intents = [len({intent for intent, _ in stream[:40]}) for stream in (bursts, shuffled)]
    assert n_intents[0] <= 6 < n_intents[1]
    assert come("bursts") == bursts


def test_repeats_come_again_by_a_law() -> None:
    stream = arrange(range(100), lambda one: one, Arrival(name="repeats", n=400, skew=1.0), seed=1)
    counts = sorted((stream.count(one) for one in set(stream)), reverse=True)
    assert len(stream) == 400 and counts[0] > 40 and len(counts) < 95
