"""Figures of the server: Prometheus reads them, each family is there, and labels stay few."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from llmcache.serving.route_times import RouteTimes
from prometheus_client.parser import text_string_to_metric_families

from llmcache import LLMCache
from llmcache.serving.metrics import Metrics
from llmcache.serving.server import Server
from llmcache.stats import Cost, Stats
from tests.tiny_models import GENERATORS, build, tokens
from tests.tiny_server import ask, listening, make_app, serving
from tests.topics import calibrated, requests

#: What dashboards for vLLM and text-embeddings-inference read, behind another prefix.
OF_VLLM = {
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
}
OF_TEI = {
    "request_count",
    "request_success",
    "request_failure",
    "request_duration",
    "request_queue_duration",
    "request_tokenization_duration",
    "request_inference_duration",
    "queue_size",
    "batch_next_size",
    "batch_next_tokens",
}
OWN = {
    "http_requests",
    "http_request_duration_seconds",
    "requests",
    "prompt_tokens_cached",
    "requests_cancelled",
    "model_failures",
    "concurrent_requests",
    "hits",
    "misses",
    "bypassed",
    "bank_bytes",
    "bank_max_bytes",
    "prefix_bytes",
    "index_bytes",
    "max_bytes",
    "entries",
    "evicted",
    "audit_rate",
    "audit_rate_lower",
    "audit_rate_upper",
    "audit_status",
    "alarms",
    "quarantined",
    "auto_bypass",
    "saved_seconds",
    "stored_later",
    "errors",
    "failing",
}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels, `model_name` left out; every one has it."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert not sample.name.startswith("llmcache_") or labels.pop("model_name") == "tiny", sample
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def of(metrics: Metrics, name: str, **labels: str) -> float:
    return read(metrics.text().decode())[f"llmcache_{name}"][tuple(sorted(labels.items()))]


def families(text: str) -> set[str]:
    return {family.name.removeprefix("llmcache_") for family in text_string_to_metric_families(text)}


def test_every_family_is_there_after_traffic(server: Server) -> None:
    with listening(make_app(server)) as address, httpx2.Client(base_url=address) as client:
        for ids in ([1, 20, 21, 2], [1, 20, 21, 2], [1, 30, 31, 2]):
            client.post("/predict", json=ids).raise_for_status()
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert families(answer.text) >= OF_VLLM | OF_TEI | OWN | {"process_resident_memory_bytes", "python_info"}
    told = read(answer.text)
    assert told["llmcache_requests_total"] == {(("rung", "computed"),): 2, (("rung", "exact"),): 1}
    assert told["llmcache_hits_total"] == {(("rung", "exact"),): 1} and told["llmcache_misses_total"] == {(): 2}
    assert told["llmcache_prompt_tokens_total"] == {(): 12} and told["llmcache_prompt_tokens_cached_total"] == {(): 4}
    assert told["llmcache_http_requests_total"] == {(("route", "/predict"), ("status", "200")): 3}
    assert told["llmcache_request_count"] == {(): 3} and told["llmcache_request_failure"] == {(): 0}
    assert told["llmcache_request_duration_count"] == told["llmcache_e2e_request_latency_seconds_count"] == {(): 3}
    held = told["llmcache_bank_bytes"]
    assert set(held) == {(("layer", "2"),), (("layer", "3"),)} and sum(held.values()) == server.cache.stats().nbytes > 0
    assert set(told["llmcache_bank_max_bytes"].values()) == {2**29} and told["llmcache_max_bytes"] == {(): 2**30}
    assert "llmcache_audit_rate" not in told  # nothing is reused approximately: there is no such figure, not 0


def test_routes_are_counted_by_template_and_unknown_ones_as_one(server: Server) -> None:
    with listening(make_app(server)) as address:
        for path in (
            "/v1/models/tiny",
            "/v1/models/none",
            "/v1/models/broken",
            "/v1/models/a/b",
            "/v1/models/a/files",
            "/x",
            "/y?z=1",
            "/%2e",
        ):
            httpx2.get(f"{address}{path}")
        httpx2.get(f"{address}/predict")
        httpx2.post(f"{address}/predict", json="no tokens")
        httpx2.post(f"{address}/admin/disable")
        text = httpx2.get(f"{address}/metrics").text
    counts = {tuple(dict(key).values()): n for key, n in read(text)["llmcache_http_requests_total"].items()}
    assert {one.route: one.n_requests for one in server.metrics.routes.slowest()}["/predict"] == 2
    model = "/v1/models/{name:path}"
    assert counts == {
        (model, "200"): 1,
        (model, "404"): 2,
        (model, "500"): 1,
        ("/v1/models/{name}/files", "200"): 1,
        ("unknown", "404"): 3,
        ("/predict", "405"): 1,
        ("/predict", "422"): 1,
        ("/admin/disable", "200"): 1,
    }
    assert "none" not in text and "z=1" not in text and "no tokens" not in text
    assert read(text)["llmcache_request_failure"] == {(): 1} and read(text)["llmcache_request_count"] == {(): 1}


def test_the_cache_is_asked_once_a_scrape(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    stats = server.cache.stats
    monkeypatch.setattr(server.cache, "stats", lambda: asked.append(None) or stats())
    server.metrics.text()
    server.metrics.text()
    assert len(asked) == 2


def test_times_are_told_in_seconds_and_unknown_ones_not(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = dict.fromkeys(("lookup_ms", "storing_ms", "layer_ms", "plain_ms", "beside_ms", "hit_rate", "repeats"))
    short = Cost(16, **rest, miss_ms=8.0, hit_ms=2.0, worthwhile_from=0.5, is_bypassed=False, saved_ms=1500.0)
    long = Cost(32, **rest, miss_ms=None, hit_ms=None, worthwhile_from=None, is_bypassed=True)
    stats = Stats(cost=(short, long), lookup_ms=250.0, storing_ms=500.0, nbytes=2**29, prefix_nbytes=2**28)
    monkeypatch.setattr(server.cache, "stats", lambda: stats)
    told = read(server.metrics.text().decode())
    assert told["llmcache_hit_seconds"] == {(("tokens", "16"),): 0.002}
    assert told["llmcache_miss_seconds"] == {(("tokens", "16"),): 0.008}
    assert told["llmcache_auto_bypass"] == {(("tokens", "16"),): 0, (("tokens", "32"),): 1}
    assert told["llmcache_saved_seconds"] == {(): 1.5} and told["llmcache_kv_cache_usage_perc"] == {(): 0.75}
    assert told["llmcache_lookup_seconds_total"] == {(): 0.25} and told["llmcache_storing_seconds_total"] == {(): 0.5}
    monkeypatch.setattr(server.cache, "stats", lambda: Stats(cost=(long,), nbytes=2**31))
    told = read(server.metrics.text().decode())
    assert "llmcache_saved_seconds" not in told and told["llmcache_kv_cache_usage_perc"] == {(): 1.0}


def test_what_the_parts_tell_is_counted(server: Server) -> None:
    metrics = server.metrics
    metrics.queued(0.25)
    metrics.batch(3, 96)
    metrics.first_token(0.5)
    metrics.inter_token(0.125)
    metrics.generated(7)
    metrics.inferred(2.0, 0.75)
    metrics.tokenised(0.0625)
    metrics.computed(0.5)
    metrics.cancelled()
    for reason in ("stop", "length", "length", "a reason that nobody knows"):
        metrics.finished(reason)
    metrics.served("a rung that nobody knows", 10, 2)
    for name in ("request_queue_time_seconds", "request_queue_duration"):
        assert of(metrics, f"{name}_sum") == 0.25
        assert of(metrics, f"{name}_bucket", le="0.2") == 0 and of(metrics, f"{name}_bucket", le="0.5") == 1
    assert of(metrics, "batch_next_size_sum") == 3 and of(metrics, "batch_next_tokens_sum") == 96
    assert of(metrics, "time_to_first_token_seconds_sum") == 0.5 and of(metrics, "generation_tokens_total") == 7
    assert of(metrics, "inter_token_latency_seconds_sum") == 0.125 and of(metrics, "requests_cancelled_total") == 1
    parts = ("prefill", "decode", "inference")
    assert [of(metrics, f"request_{part}_time_seconds_sum") for part in parts] == [2.0, 0.75, 3.25]
    assert of(metrics, "request_inference_duration_sum") == 3.25
    assert of(metrics, "request_tokenization_duration_sum") == 0.0625
    assert of(metrics, "request_success_total", finished_reason="length") == 2
    assert of(metrics, "request_success_total", finished_reason="other") == 1
    assert of(metrics, "requests_total", rung="other") == 1


def test_gauges_of_requests_read_what_they_are_given(server: Server) -> None:
    metrics = server.metrics
    metrics.n_under_way = 5
    assert of(metrics, "num_requests_running") == 5 and of(metrics, "num_requests_waiting") == 0
    metrics.watch(waiting=lambda: 3)
    assert of(metrics, "num_requests_running") == 2 and of(metrics, "queue_size") == 3
    metrics.watch(waiting=lambda: 3, running=lambda: 1)
    assert of(metrics, "num_requests_running") == 1


def test_a_request_that_ends_is_no_longer_under_way(server: Server) -> None:
    seen: list[int] = []
    server.metrics.watch(running=lambda: seen.append(server.metrics.n_under_way) or 0)
    app = make_app(server)

    @app.post("/look")
    async def look() -> int:
        return server.metrics.n_under_way

    with listening(app) as address, httpx2.Client(base_url=address) as client:
        assert client.post("/look").json() == 1 and client.post("/look").json() == 1
        client.get("/metrics")
    assert seen == [0]


def test_a_prefix_is_told_in_tokens() -> None:
    with serving(LLMCache.wrap(build(GENERATORS["llama"]), prefix_block=4)) as server:
        ids = tokens(1, 12)[0].tolist()
        for end in (ids[:1], ids[1:2]):
            server.cache(input_ids=torch.tensor([[*ids, *end]]))
        assert of(server.metrics, "prefix_cache_queries_total") == 26
        assert of(server.metrics, "prefix_cache_hits_total") == 12
        assert 0 < of(server.metrics, "kv_cache_usage_perc") < 0.01 and of(server.metrics, "prefix_bytes") > 0


@pytest.mark.slow
def test_the_bound_of_calibrated_reuse_is_told() -> None:
    with calibrated(audit=1.0) as cache, serving(cache) as server:
        for one in requests(40, seed=3)[0]:
            ask(server, one["input_ids"][0].tolist())
        cache.drain()
        told = read(server.metrics.text().decode())
        audit: Any = cache.stats().audit
    assert told["llmcache_audit_rate"] == {(): audit.rate} and audit.rate is not None
    assert told["llmcache_audit_rate_lower"] == {(): audit.lower}
    assert told["llmcache_audit_rate_upper"] == {(): audit.upper}
    assert told["llmcache_audit_status"] == {(("status", "certified"),): 1}
    assert told["llmcache_audit_recomputed"][()] > 0 and told["llmcache_alarms_total"] == {(): 0}


def test_times_of_routes_are_of_the_latest_requests() -> None:
    times = RouteTimes()
    for n in range(1, 2049):
        times.add("/predict", float(n))
    times.add("/slow", 5000.0)
    slow, predict = times.slowest()
    assert (slow.route, slow.n_requests, slow.p50_s, slow.p99_s) == ("/slow", 1, 5000.0, 5000.0)
    assert (predict.n_requests, predict.p50_s, predict.p99_s) == (2048, 1536.0, 2038.0)
