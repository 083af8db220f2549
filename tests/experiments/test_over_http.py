"""Load on servers: latency counts from when a request was due, and each outcome is counted as what it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.measures.over_http.client import Reply, post
from experiments.measures.over_http.loops import Limit, Load, closed_loop, largest_rate, open_loop
from experiments.measures.over_http.made import labels_of, made
from experiments.measures.over_http.servers import ServerError, hits, parse, running, scrape, total
from experiments.measures.ray_replicas import AFTER, BEFORE, MISSING, PHASES, UPDATE, Asked, Span, point, row_of
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from llmcache.errors import ConfigError
from tests.experiments.helpers import TASK, learning

STUB = f"{{python}} {Path(__file__).with_name('stub_server.py')} --port {{port}}"
PREDICT = post("/predict", {"inputs": "a text"})


def load(port: int, due_ms: list[float], **options: Any) -> Load:
    return open_loop(port, [PREDICT] * len(due_ms), np.array(due_ms) / 1e3, **options)


def test_latency_is_from_when_a_request_was_due_and_what_was_not_answered_is_counted() -> None:
    with running(f"{STUB} --ms 50 --fail-every 7", {}, start_s=60) as server:
        found = load(server.port, [0.0, 0.0, 0.0])  # one at a time; from sending, each takes 50 ms
        assert sorted(found.latency_ms)[2] >= 145 and found.figures()["statuses"] == {"200": 3}
        assert load(server.port, [0.0], timeout_s=0.01).figures()["statuses"] == {"timed out": 1}
        found = load(server.port, [0.0] * 4)  # the third of these is the seventh
        assert found.figures()["statuses"] == {"200": 3, "503": 1} and found.n_kept(Limit(1e4)) == 3
        assert not found.keeps(Limit(1e4)) and found.keeps(Limit(1e4, share=0.75))
        cut = load(server.port, [2.0 * i for i in range(400)], limit=Limit(100))
        assert cut.is_cut and not cut.keeps(Limit(100)) and server.rss > 1e6 and server.cpu_s > 0
        assert total(scrape(server.port), "llmcache_num_requests_waiting") == 3
        closed = closed_loop(server.port, [PREDICT] * 1000, 2, seconds=0.3)
    n = int((closed.status == 200).sum())
    assert n >= 2 and closed.is_cut and (np.diff(closed.due_s[:n]) >= 0).all()
    assert load(server.port, [0.0, 1.0]).figures()["statuses"] == {"no connection": 2}
    late = Load(*(np.array(one) for one in ([0.0], [0.4], [0.5], [200])), [None], 1.0, 0.0)
    assert late.latency_ms == pytest.approx([500]) and late.figures()["lag_p99_ms"] == pytest.approx(400)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ('print("no", flush=True); raise SystemExit(3)', r"ended with 3 before it was ready: no\b"),
        ("import time; time.sleep(60)", r"not ready after 0\.2 s: it logged"),
    ],
)
def test_a_server_that_does_not_start_is_told_with_its_words(words: str, error: str) -> None:
    start_s = 60 if "no" in words else 0.2
    with pytest.raises(ServerError, match=error), running(f"{{python}} -c '{words}'", {}, start_s=start_s):
        pass


def test_the_largest_rate_is_found_by_doubling_and_by_halves() -> None:
    tried: list[float] = []

    def is_held(rate: float) -> bool:
        tried.append(rate)
        return rate <= 100

    assert largest_rate(is_held, 30, 0.1) == 97.5 and tried == [30, 60, 120, 90, 105, 97.5]
    assert largest_rate(is_held, 800, 0.5) == 100 and tried[6:] == [800, 400, 200, 100, 150]
    with pytest.raises(ConfigError, match="no rate was found in 40 trials"):
        largest_rate(lambda rate: True, 1, 0.1)


def test_hits_are_those_between_two_looks() -> None:
    text = 'llmcache_requests_total{model_name="a b",rung="computed"} %s\nllmcache_requests_total{rung="exact"} %s\n'
    before, after = parse(text % (10, 5)), parse(f"# some\n{text % (12, 11)}")
    assert hits(before, after) == {"hit_rate": 0.75} and hits([], []) == {"hit_rate": None}
    assert total(after, "llmcache_requests_total") == 23 and total(after, "llmcache") is None


def test_a_request_that_failed_was_in_the_hands_of_the_replica_or_was_not() -> None:
    ok, none, failed = Reply(200, b"[]", "exact"), Reply(200, b"[]", "none"), Reply(500, b"")
    spans = [Span(10.0, 15.0, MISSING), Span(30.0, 36.0, MISSING), Span(50.0, 60.0, UPDATE)]
    asked = [
        (9.0, ok),
        (9.9, failed, ok),  # in flight on the killed replica
        (10.1, failed, failed, failed),  # sent after the kill
        (16.0, none),
        (29.9, failed, ok),
        (35.0, ok),
        (49.9, failed, ok),  # an update, no kill
        (55.0, ok),
    ]
    rows = [
        row_of(Asked("a", True, at, [(at + 0.2 + 0.6 * i, reply) for i, reply in enumerate(tries)]), spans, False)
        for at, *tries in asked
    ]
    assert [one["phase"] for one in rows] == [BEFORE, BEFORE, MISSING, AFTER, AFTER, MISSING, AFTER, UPDATE]
    names = ("n", "n_failed_in_hands", "n_failed_others", "n_lost", "hit_rate")
    found = [tuple(point(rows, phase)[name] for name in names) for phase in PHASES]
    assert found == [(2, 1, 0, 0, 1), (2, 0, 1, 1, 1 / 2), (3, 1, 1, 0, 2 / 3), (1, 0, 0, 0, 1)]
    assert point([], BEFORE)["hit_rate"] is None


def test_a_server_loads_the_fitted_classifier_and_its_calibrated_cache(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from experiments.baseline_server import create_app
    from llmcache import LLMCache

    experiment: Any = make_experiment(learning("serve_load", task=TASK | {"limit": 160}))
    with made(experiment, Folders(models=tmp_path)) as found:
        served, text = found.classifier(), found.stream[0].text
        ((label, score),) = labels_of(served, [text])
        reply = TestClient(create_app(str(found.model))).post("/predict", json={"inputs": [text, f"{text} and more"]})
        assert [len(one) for one in reply.json()] == [len(served.labels)] * 2
        assert reply.json()[0][0] == {"label": label, "score": pytest.approx(score, abs=1e-5)}
        with LLMCache.load(served.model, found.save, tokenizer=served.tokenizer, answer_of=served.answer_of) as cache:
            assert cache.calibration is not None and cache.calibration.max_drop == 0.2
        made_at = found.model.stat().st_mtime_ns
    with made(experiment, Folders(models=tmp_path)) as again:
        assert again.model.stat().st_mtime_ns == made_at
