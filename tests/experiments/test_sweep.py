"""Sweeps, observed runs and layers on tiny models: a replay equals a live run; traffic and thresholds by hand."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from experiments.data.streams.traffic import Arrival, Traffic, arrange, draw
from experiments.measures import observe
from experiments.measures.base import serve_once
from experiments.measures.layers import choose_taus
from experiments.methods import METHODS
from experiments.methods.base import COMPUTED
from experiments.methods.cached import Cached
from experiments.models.loading import UNTRAINED
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.replay import by_request, replay, rows_served
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache.errors import ConfigError
from tests.experiments.measuring import measured

TASKS: dict[str, dict[str, Any]] = {
    "openbookqa": {"data": "made", "limit": 20},
    "squad_v2": {"data": "made", "limit": 20, "max_length": 128},
    "stream": {"limit": 40, "data": {"path": "support_desk", "limit": 200}, "head": {"pool": "cls"}},
    "wikitext": {"data": "made", "window": 16, "limit": 24, "repeats": {}},
}
PCA = {"name": "pca", "dim": 4, "fit_on": 10}


def task(name: str) -> dict[str, Any]:
    return {"name": name, "model": UNTRAINED, **TASKS[name]}


@cache
def recorded(name: str) -> Recording:
    return Recording(build(make_task(task(name)), Folders(), 0))


@pytest.mark.parametrize(
    ("name", "fingerprint", "tau"),  # some rows hit at these thresholds, and not all
    [
        ("stream", "mean", 0.8),
        ("openbookqa", "simhash", 0.6),
        ("squad_v2", "attention", 0.8),
        ("stream", PCA, 0.5),
        ("wikitext", "minhash", 0.1),
    ],
)
def test_replay_equals_a_live_run(name: str, fingerprint: Any, tau: float) -> None:
    recording, workload = recorded(name), recorded(name).workload
    options = {"tau": tau, "layers": "last", "fingerprint": fingerprint, "allow_unsafe": True}
    live = Cached(workload, options | ({} if workload.payload is None else {"payload": workload.payload}))
    live.begin()
    fits_any_length = live.payload != "sequence"
    told, notes = serve_once(live, range(len(workload.requests)))
    units = recording.rows(make_fingerprint(fingerprint), fits_any_length)
    (again,) = replay(units, [tau])
    assert by_request(units, again).tolist() == ["near" if note.by == "paper" else note.by for note in notes]
    assert rows_served(again) == pytest.approx(np.mean([note.share * note.is_hit for note in notes]))
    answers = recording.reread(units, again)
    assert not any(workload.is_changed(one, other) for one, other in zip(told, answers, strict=True))
    assert {"near", "computed"} <= set(again.served)


@pytest.mark.parametrize(
    ("method", "options", "name"),
    [
        *(("doccache", {"threshold": 0.6}, name) for name in TASKS),
        ("semantic_response", {"threshold": 0.9, "encoder": UNTRAINED}, "stream"),
    ],
)
def test_replay_of_other_methods_equals_a_live_run(method: str, options: dict[str, Any], name: str) -> None:
    recording, workload = recorded(name), recorded(name).workload
    told, notes = serve_once(METHODS[method](workload, options), range(len(workload.requests)))
    units = recording.documents() if method == "doccache" else recording.texts(UNTRAINED)
    (again,) = replay(units, [options["threshold"]])
    assert (by_request(units, again) != COMPUTED).tolist() == [note.is_hit for note in notes]
    assert 0 < rows_served(again) < 1
    answers = (recording.handed if method == "doccache" else recording.borrowed)(units, again)
    assert not any(workload.is_changed(one, other) for one, other in zip(told, answers, strict=True))


def test_what_the_model_does_not_take_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_alone", None)
    with pytest.raises(ConfigError, match=r"^tau=0\.8 with a model that has a"):
        measured({"measure": "observe", "task": task("squad_v2"), "cache": {"tau": 0.8}})


def test_as_written_every_layer_is_hit_alike() -> None:
    rows = measured({"measure": "layers", "task": task("wikitext"), "tau": 0.8}).rows
    assert len({row["hit_rate_as_written"] for row in rows}) == 1 and rows[0]["hit_rate_as_written"] > 0
    own = [row["hit_rate_per_layer"] for row in rows]
    assert own == sorted(own)  # a row with a stored state hits its entry in every later layer


def test_the_lowest_threshold_that_is_pure_enough() -> None:
    similarity = np.array([[-1, 0.9, 0.8, 0.7, 0.6, 0.5, *[0.1] * 6]], dtype=np.float32)
    likeness = np.array([[0, 1, 1, 0, 0, 1, *[0] * 6]], dtype=np.float32)
    assert choose_taus(similarity, likeness, 0.95, 1.0) == {0: pytest.approx(0.8)}
    assert choose_taus(similarity, likeness * 0, 0.95, 1.0) == {0: 1.0}


def test_traffic_is_seeded_and_skewed_and_comes_in_phases_or_bursts() -> None:
    pool = [(intent, number) for intent in range(10) for number in range(40)]
    steady, shifting = (draw(pool, Traffic(n=4000, skew=1.2, phases=phases)) for phases in (1, 2))
    assert steady == draw(pool, Traffic(n=4000, skew=1.2)) and steady.count(max(set(steady), key=steady.count)) > 200
    first, second = (max(set(half), key=half.count) for half in (shifting[:2000], shifting[2000:]))
    assert first != second
    bursts, shuffled, repeats = (
        arrange(pool, lambda one: one[0], Arrival(name=name, length=20, at_once=2), seed=1)
        for name in ("bursts", "shuffled", "repeats")
    )
    assert sorted(bursts) == sorted(shuffled) == pool and bursts != shuffled
    n_bursts, n_shuffled = (len({intent for intent, _ in stream[:40]}) for stream in (bursts, shuffled))
    assert (
        n_bursts <= 6 < n_shuffled and len(repeats) == 400 and repeats.count(max(set(repeats), key=repeats.count)) > 40
    )
