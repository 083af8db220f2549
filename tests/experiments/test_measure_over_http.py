"""Servers measured over their socket; all but one are stubs that compute nothing."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.exposition import hits, parse, scrape, total
from experiments.measures.over_http.loops import Limit, Load, closed_loop, largest_rate, open_loop
from experiments.measures.over_http.made import labels_of, made
from experiments.measures.over_http.processes import Running, ServerError, running
from experiments.measures.serve_load import LEAST
from experiments.report.pages import serving
from experiments.report.pages.files import MISSING
from experiments.runs.folder import write_figures
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from llmcache.errors import ConfigError
from tests.experiments.measuring import LEARN, TASK, learning, measured, told

STUB = f"{{python}} {Path(__file__).with_name('stub_server.py')} --port {{port}}"
PREDICT = post("/predict", {"inputs": "a text"})


@contextmanager
def stub(options: str = "") -> Iterator[Running]:
    with running(f"{STUB} {options}", {}, start_s=30) as server:
        yield server


def asked(server: Running, *requests: bytes) -> list[tuple[int, bytes]]:
    async def ask() -> list[tuple[int, bytes]]:
        client = Client(server.port)
        replies = [await client.ask(request) for request in requests]
        client.close()
        return [(reply.status, reply.body) for reply in replies]

    return asyncio.run(ask())


def test_answers_are_read_whole_and_what_a_server_takes_is_seen() -> None:
    with stub("--rung exact") as server:
        (_, body), (status, _), (_, again) = asked(server, PREDICT, post("/nowhere", {}), PREDICT)
        assert json.loads(body)[0] == {"label": "some", "score": 0.9} and body == again and status == 404
        assert server.rss > 1e6 and server.cpu_s > 0
        assert total(scrape(server.port), "llmcache_num_requests_waiting") == 3


def test_a_server_that_does_not_start_is_told_with_its_words() -> None:
    with (
        pytest.raises(ServerError, match=r"ended with 3 before it was ready: no\b"),
        running("{python} -c 'print(\"no\", flush=True); raise SystemExit(3)'", {}),
    ):
        pass
    with (
        pytest.raises(ServerError, match=r"not ready after 0\.2 s: it logged nothing"),
        running("{python} -c 'import time; time.sleep(60)'", {}, start_s=0.2),
    ):
        pass


def load(server: Running, due_ms: list[float], **options: Any) -> Load:
    return open_loop(server.port, [PREDICT] * len(due_ms), np.array(due_ms) / 1e3, **options)


def test_latency_is_from_when_a_request_was_due() -> None:
    """With 50 ms per answer, one at a time, the third of three requests due at once waits for two."""
    with stub("--ms 50") as server:
        found = load(server, [0.0, 0.0, 0.0, 300.0])
    waited_for_one, waited_for_two = sorted(found.latency_ms)[2:]
    assert waited_for_one >= 95 and waited_for_two >= 145  # counted from sending, it would be 50
    assert found.done_s[3] > 0.35 and not found.is_cut and found.figures()["statuses"] == {"200": 4}
    late = Load(*(np.array(one) for one in ([0.0], [0.4], [0.5], [200])), [None], 1.0, 0.0)
    assert late.latency_ms == pytest.approx([500]) and late.figures()["lag_p99_ms"] == pytest.approx(400)


def test_a_rate_that_is_broken_is_cut_and_refusals_do_not_keep_to_a_limit() -> None:
    with stub("--ms 20") as server:
        many = list(np.arange(400) * 2.0)
        found = load(server, many, limit=Limit(100))
        assert found.is_cut and not found.keeps(Limit(100))
    with stub("--ms 20") as server:  # another, as the first one still answers
        calm = load(server, [0.0, 60.0, 120.0], limit=Limit(1000))
        assert calm.keeps(Limit(1000)) and not calm.keeps(Limit(1))
    with stub("--fail-every 4") as server:
        found = load(server, [0.0] * 8)
    assert found.figures()["statuses"] == {"200": 6, "503": 2} and found.n_kept(Limit(1e4)) == 6
    assert not found.keeps(Limit(1e4)) and found.keeps(Limit(1e4, share=0.75))


def test_what_has_no_answer_is_counted_and_ends_nothing() -> None:
    with stub("--ms 300") as server:
        assert load(server, [0.0], timeout_s=0.05).figures()["statuses"] == {"timed out": 1}
    assert load(server, [0.0, 1.0]).figures()["statuses"] == {"no connection": 2}


def test_in_a_closed_loop_clients_ask_when_they_were_answered() -> None:
    with stub("--ms 20") as server:
        found = closed_loop(server.port, [PREDICT] * 1000, 2, seconds=0.3)
    n = int((found.status == 200).sum())
    assert 2 <= n <= 20 and found.is_cut
    assert (np.diff(found.due_s[:n]) >= 0).all() and found.latency_ms.min() >= 20


def test_the_largest_rate_is_found_by_doubling_and_by_halves() -> None:
    tried: list[float] = []

    def is_held(rate: float) -> bool:
        tried.append(rate)
        return rate <= 100

    found = largest_rate(is_held, 30, 0.1)
    assert tried == [30, 60, 120, 90, 105, 97.5] and found == 97.5
    tried.clear()
    assert largest_rate(is_held, 800, 0.5) == 100 and tried == [800, 400, 200, 100, 150]
    with pytest.raises(ConfigError, match="no rate was found in 40 trials"):
        largest_rate(lambda rate: True, 1, 0.1)


def test_hits_are_those_between_two_looks() -> None:
    text = 'llmcache_requests_total{model_name="a b",rung="computed"} %s\nllmcache_requests_total{rung="exact"} %s\n'
    before, after = parse(text % (10, 5)), parse(f"# some\n{text % (12, 11)}")
    assert hits(before, after) == {"hit_rate": 0.75} and hits({}, {}) == {"hit_rate": None}
    assert total(after, "llmcache_requests_total") == 23 and total(after, "llmcache") is None


TINY = learning("serve_load", task=TASK | {"limit": LEARN + LEAST, "data": {"path": "support_desk", "limit": 900}})
SERVERS = {"cache": f"{STUB} --ms 3 --label order_status", "no_cache": f"{STUB} --ms 40 --silent"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A folder for the models that servers load; they are made once."""
    return Folders(models=tmp_path_factory.mktemp("models"))


def test_the_folder_holds_the_fitted_classifier_and_its_calibrated_cache(folders: Folders) -> None:
    from starlette.testclient import TestClient

    from experiments.baseline_server import create_app
    from llmcache import LLMCache

    with made(make_experiment(TINY), folders) as found:  # type: ignore[arg-type]
        served = found.classifier()
        text = found.stream[0].text
        ((label, score),) = labels_of(served, [text])
        for is_onnx in (False, True):
            client = TestClient(create_app(str(found.model), is_onnx))
            first, second = client.post("/predict", json={"inputs": [text, f"{text} and more"]}).json()
            assert len(first) == len(served.labels) == len(second) > 1
            assert first[0] == {"label": label, "score": pytest.approx(score, abs=1e-5)}
        cache = LLMCache.load(served.model, found.save, tokenizer=served.tokenizer, answer_of=served.answer_of)
        assert cache.calibration is not None and cache.calibration.max_drop == TINY["max_drops"][0]
        cache.unwrap()
        made_at = found.model.stat().st_mtime_ns
    with made(make_experiment(TINY), folders) as again:  # type: ignore[arg-type]
        assert again.model.stat().st_mtime_ns == made_at
    with pytest.raises(ConfigError, match="take held_out"):
        make_experiment(TINY | {"task": TASK | {"name": "stream"}})


def test_goodput_of_servers_in_turns(folders: Folders, tmp_path: Path) -> None:
    values = TINY | {"servers": SERVERS, "hold_s": 0.5, "slo_ms": 100, "precision": 1.0, "rounds": 1, "first_rate": 50}
    outcome = measured(values, folders)
    cache, plain = outcome.metrics["points"]
    assert (cache["server"], plain["server"]) == ("cache", "no_cache") and cache["goodput"] > plain["goodput"]
    assert plain["gain"] == pytest.approx(cache["goodput"] / plain["goodput"]) and cache["gain"] is None
    assert cache["hit_rate"] == 1 and plain["hit_rate"] is None and plain["changed_answers"] == 1
    shown = told(values, outcome)
    assert "| no_cache | poisson |" in shown and "None" not in shown
    assert MISSING in serving.serve_load(tmp_path)
    settings = make_experiment(values).to_dict()
    write_figures(tmp_path / "serve_load" / "run", settings, {}, json.loads(json.dumps(outcome.metrics)))
    assert len(serving.serve_load(tmp_path).splitlines()) == 2 + 2
    held = measured(values, folders, rates=[40], arrivals=["fixed", "poisson"], servers={"cache": SERVERS["cache"]})
    assert [(row["arrivals"], row["rate"], row["is_cut"]) for row in held.rows] == [
        ("fixed", 40, False),
        ("poisson", 40, False),
    ]
    assert "| 40 |" in told(values, held)


def test_a_server_that_answers_nothing_is_told(folders: Folders) -> None:
    with pytest.raises(ServerError, match=r"broken: none of .* requests was answered with 200.*503"):
        measured(TINY, folders, servers={"broken": f"{STUB} --fail-every 1"}, hold_s=0.2)


def test_a_soak_counts_what_failed_and_holds_answers_against_the_model(folders: Folders) -> None:
    stream = TASK | {"limit": LEARN + LEAST, "data": {"path": "support_desk", "limit": 900}}
    values = TINY | {"measure": "serve_soak", "task": stream, "seconds": 1.5, "capacity_s": 0.3, "at_once": 4}
    outcome = measured(values, folders, servers={"cache": f"{STUB} --ms 4 --rung semantic"})
    found = outcome.metrics
    assert found["rate"] == pytest.approx(1.2 * found["capacity"]) and found["n_failed"] == 0 and found["accepted"] == 1
    assert found["n_checked"] >= found["n"] // 100 and found["n_changed"] == found["n_checked"]
    assert found["n_unequal"] == 0 and found["waiting_max"] == 3 and outcome.rows
    assert "None" not in told(values, outcome)
    exact = measured(values, folders, seconds=1.0, servers={"cache": f"{STUB} --fail-every 7 --rung exact --ms 4"})
    assert exact.metrics["n_unequal"] == exact.metrics["n_checked"] > 0 and exact.metrics["n_failed"] > 0
    with pytest.raises(ConfigError, match="a stream without an end"):
        make_experiment(values | {"task": stream | {"data": {"path": "a.csv"}}})
