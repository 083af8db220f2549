"""The operator's view: figures for Prometheus, the page, and the routes below /admin."""

import json
import logging
import re
import threading
import time
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmcache.memory.stores import STORES, StoreKey
from llmcache.serving.app import repeated
from llmcache.serving.history import History, Interval
from llmcache.serving.keys import add_key
from llmcache.serving.page import count, duration, percent, size
from llmcache.serving.server import Server
from llmcache.stats import AuditStats, Health, Stats
from tests.contract.streams import calibrated
from tests.fixtures import Log, Patch, Pool
from tests.redis_server import wait_until
from tests.serving.served import Client, Serve, is_computing, listening, make_server, model_held
from tests.serving_browser import SIZES, open_browser
from tests.stores.shared import Shared

#: Families that dashboards of vLLM and TEI read, with our prefix; and ours that our own dashboard leaves out.
FAMILIES = {
    *("prompt_tokens", "generation_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *(f"request_{part}_time_seconds" for part in ("queue", "prefill", "decode", "inference")),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("request_count", "request_success", "request_failure", "request_duration", "request_queue_duration"),
    *("request_tokenization_duration", "request_inference_duration", "queue_size"),
    *("batch_next_size", "batch_next_tokens"),
    *("http_request_duration_seconds", "requests", "requests_cancelled", "model_failures", "concurrent_requests"),
    *("bank_max_bytes", "index_bytes", "entries", "evicted", "audit_rate", "audit_rate_lower", "audit_status"),
    *("alarms", "quarantined"),
}
NAMESPACE = {"namespace": "default"}


SERVED = {"kind": "classifier"}


def ask(client: Any, text: str = "my card") -> Any:
    answer = client.post("/predict", json={"inputs": text})
    assert answer.status_code == 200, answer.text
    return answer


def done(answer: Any) -> Any:
    return answer.raise_for_status().json()


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_for_prometheus(serve: Serve) -> None:
    client = serve("classifier", warmup_tokens=16)  # a warm-up counts nowhere
    for text in ("my card", "my card", "my cash"):
        ask(client, text)
    client.get("/v1/models/classifier"), client.get("/v1/models/a/b"), client.get("/x"), client.get("/y?z=1")
    client.get("/predict"), client.post("/predict", json={"inputs": 1})
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {one.name.removeprefix("llmcache_"): one for one in text_string_to_metric_families(answer.text)}
    assert families.keys() >= FAMILIES

    def told(name: str) -> dict[tuple[str, ...], float]:
        samples = [one for family in families.values() for one in family.samples if one.name == f"llmcache_{name}"]
        assert all(one.labels["model_name"] == "classifier" for one in samples)
        return {tuple(v for k, v in one.labels.items() if k != "model_name"): one.value for one in samples}

    assert told("requests_total") == {("computed",): 2, ("exact",): 1}
    assert told("hits_total") == {("exact",): 1} and told("misses_total") == {(): 2}
    assert told("prompt_tokens_total") == {(): 12} and told("prompt_tokens_cached_total") == {(): 4}
    assert told("request_count") == {(): 4} and told("request_failure") == {(): 1}
    assert told("request_duration_count") == told("e2e_request_latency_seconds_count") == {(): 3}
    assert told("http_requests_total") == {
        ("/predict", "200"): 3,
        ("/predict", "405"): 1,
        ("/predict", "422"): 1,
        ("/v1/models/{name:path}", "200"): 1,
        ("/v1/models/{name:path}", "404"): 1,
        ("unknown", "404"): 2,
    }
    assert told("request_queue_time_seconds_count") == {(): 2} and told("audit_rate") == {}
    assert sum(told("bank_bytes").values()) > 0 and "z=1" not in answer.text


# -- admin -------------------------------------------------------------------------------------------------------------


def test_a_namespace_is_purged_a_request_forgotten_and_the_rest_cleared(
    server: Server, client: Client, caplog: Log
) -> None:
    caplog.set_level("INFO", "llmcache")
    for text in ("my card", "my cash"):
        ask(client, text)
    assert done(client.post("/admin/forget", json={"inputs": "my card"})) == {"forgotten": 1}
    unknown = client.post("/admin/purge", json={"namespace": "another"})
    assert (unknown.status_code, unknown.json()["error_type"]) == (404, "Validation")
    assert done(client.post("/admin/purge", json=NAMESPACE)) == {"purged": 1}
    ask(client)
    assert done(client.post("/admin/clear")) == {"cleared": True} and server.cache.stats().n_stored == 0
    does = ("forgets requests", "purges a namespace", "purges a namespace", "clears the cache")
    assert [one for one in caplog.messages if "anyone" in one] == [f"llmcache: anyone {one}" for one in does]


class Held(Shared):
    """A store in which `forget` and `purge` take as long as the test wants."""

    n_calls = 0
    is_reached, may_end = threading.Event(), threading.Event()

    @classmethod
    def hold(cls) -> int:
        cls.n_calls += 1
        cls.is_reached.set()
        assert cls.may_end.wait(20)
        return 2

    def forget(self, keys: Sequence[StoreKey]) -> None:
        super().forget(keys)
        self.hold()

    def purge(self, namespace: str | None) -> int:
        return super().purge(namespace) + (self.hold() if namespace == "default" else 0)


BODIES = {"forget": {"inputs": [["my card"], ["my cash"], ["where is the card"]]}, "purge": NAMESPACE, "audit": None}


@pytest.mark.parametrize("route", BODIES)
def test_the_model_answers_while_a_store_forgets_or_audits_run(
    serve: Serve, monkeypatch: Patch, route: str, pool: Pool
) -> None:
    monkeypatch.setitem(STORES, "held", Held)
    client = serve("classifier", {"store": {"name": "held", "place": route}})
    Held.n_calls, Held.is_reached, Held.may_end = 0, threading.Event(), threading.Event()
    ask(client, "my card"), ask(client, "my cash")
    with monkeypatch.context() as patched:
        patched.setattr(client.server.cache, "drain", Held.hold)  # runs the audits
        waiting = pool.submit(client.post, f"/admin/{route}", json=BODIES[route])
        assert Held.is_reached.wait(20)
        ask(client, "the rate")  # computed meanwhile
        assert not waiting.done()
        Held.may_end.set()
        assert [*done(waiting.result()).values()] == [2] and Held.n_calls == 1


@pytest.mark.parametrize(("route", "body"), [("forget", {"inputs": [["my cash"]]}), ("purge", NAMESPACE)])
def test_an_input_that_is_computed_or_waits_meanwhile_is_answered_and_not_stored(
    server: Server, client: Client, route: str, body: Any, pool: Pool
) -> None:
    before = server.encoder._forgot_at  # type: ignore[union-attr]
    with model_held(server):
        first = pool.submit(ask, client, "the rate")
        wait_until(lambda: is_computing(server))
        waiting = pool.submit(ask, client, "my cash")
        wait_until(lambda: is_computing(server, n_waiting=1))
        dropping = pool.submit(client.post, f"/admin/{route}", json=body)
        wait_until(lambda: server.encoder is not None and server.encoder._forgot_at > before)
    done(dropping.result()), first.result(), waiting.result()
    assert server.cache.stats().n_stored == 0


def test_the_cache_is_disabled_and_enabled_and_told_in_plain_values(
    server: Server, client: Client, monkeypatch: Patch
) -> None:
    ask(client)
    assert done(client.post("/admin/disable")) == {"enabled": False}
    before = server.cache.stats().n_hits
    ask(client)
    assert server.cache.stats().n_hits == before and done(client.get("/admin/stats"))["enabled"] is False
    assert done(client.post("/admin/enable")) == {"enabled": True}
    ask(client)
    assert server.cache.stats().n_hits == before + 1
    values = {"nan": float("nan"), "inf": (float("-inf"), 1.5), "n": {3: 4}}
    monkeypatch.setattr(Stats, "to_dict", lambda self: values)
    told = json.loads(client.get("/admin/stats").text, parse_constant=pytest.fail)
    assert told == {"enabled": True, "phase": "ready", "under_way": 0, "nan": None, "inf": [None, 1.5], "n": {"3": 4}}


def test_a_drained_server_finishes_and_refuses_until_it_is_resumed(models: Path, pool: Pool) -> None:
    server = make_server(models / "classifier")
    with Client(server) as client:
        with model_held(server):
            under_way = pool.submit(ask, client)
            wait_until(lambda: is_computing(server))
            assert done(client.post("/admin/drain")) == {"phase": "draining", "under_way": 1}
            refused = client.post("/predict", json={"inputs": "my card"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"] == "the server is draining"
            assert client.post("/v1/classify", json={"input": "my card"}).json()["error"]["code"] == 503
            assert client.get("/health").status_code == client.head("/health").status_code == 503
            assert client.get("/metrics").status_code == 200
            assert "The server is draining." in shown(client)
        assert under_way.result().status_code == 200
        assert done(client.post("/admin/resume")) == {"phase": "ready", "under_way": 0}
        ask(client)
        server.refuse_waiting()  # begins the stop
        assert done(client.post("/admin/resume"))["phase"] == done(client.post("/admin/drain"))["phase"] == "stopping"
        assert client.get("/health").status_code == 503


# -- the page ----------------------------------------------------------------------------------------------------------


def text_of(page: str) -> str:
    """Return a page without its tags, in single spaces."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).replace("\N{NO-BREAK SPACE}", " ").split())


def shown(client: Any) -> str:
    return text_of(client.get("/admin/figures").raise_for_status().text)


def test_the_page_shows_figures_of_the_cache(serve: Serve) -> None:
    client = serve("classifier", model="shown")
    for text in ("my card", "my card", "my card", "my cash"):
        ask(client, text)
    text = shown(client)
    assert "Hit rate 50.0 % of 4 requests" in text and "2 requests known" in text and "bank of layer 2" in text
    assert "/predict 4" in text and "Health good ready" in text and "Nothing is reused approximately" in text
    client.post("/admin/disable")
    text = shown(client)
    assert "The cache is disabled: all requests are computed." in text
    assert "Health good ready, cache disabled" in text  # as the operator chose


def test_the_page_and_the_figures_of_a_decoder_tell_of_tokens_and_blocks(serve: Serve) -> None:
    client = serve("decoder", cache={"prefix": {"block": 8}})
    n_warm = client.server.cache.stats().n_requests
    assert "Prompt tokens saved" not in shown(client) and n_warm == 0
    for _ in range(2):
        done(client.post("/v1/completions", json={"prompt": [1, 2, 3] * 4, "max_tokens": 3, "ignore_eos": True}))
    text, figures = shown(client), client.get("/metrics").text
    assert "Prompt tokens saved 50.0 % of 24; 12 computed" in text and "blocks of prefixes" in text
    assert "Rows that bypassed the cache" not in text
    for name, n in {"prefix_cache_queries": 24, "prefix_cache_hits": 12, "decode_steps": 4}.items():
        assert f'llmcache_{name}_total{{model_name="decoder"}} {n}.0\n' in figures


CERTIFIED = AuditStats("certified", 900, 40, 37, rate=0.0, upper=0.136, bound=0.0091, allowed=0.01)
DRIFTED = AuditStats("drifted", 900, 40, 40, n_changed=1, rate=0.002, lower=0.0004, upper=0.004, allowed=0.005)


@pytest.mark.parametrize(
    ("audit", "bound", "found"),
    [
        (CERTIFIED, "≤ 0.91 % certified; allowed 0.50 %.", "Audit: still measuring: 0 of 37 changed"),
        (DRIFTED, "no bound drifted", "measured 0.20% (0.04% to 0.40%): 1 of 40 changed"),
    ],
    ids=["certified", "drifted"],
)
def test_the_page_and_the_stats_show_the_bound_and_then_what_the_audit_found(
    server: Server, client: Client, audit: AuditStats, bound: str, found: str, monkeypatch: Patch
) -> None:
    health = Health(True, 0.25, 0.0, {"search: OSError": 3})
    hits = {"semantic": 400, "<mine>": 100}
    stats = Stats(n_requests=1000, hits=hits, audit=audit, health=health, errors=3, lookup_ms=250.0)
    monkeypatch.setattr(server.cache, "stats", lambda: stats)
    monkeypatch.setattr(server, "history", History())
    for one in (Stats(), stats):
        server.history.add(one)
    html = client.get("/").text
    text = text_of(html)
    assert bound in text and found in text
    assert ("Nothing is reused approximately:" in text) == (audit is DRIFTED)
    assert "The cache is failing: 25% of calls" in text and "search: OSError (3)" in text
    assert "<mine>" not in html and "<mine>: 10.0 % since the start" in text
    of_stats, figures = str(stats), client.get("/metrics").text
    for name, value in (("audit_rate", audit.rate), ("audit_rate_upper", audit.upper), ("lookup_seconds_total", 0.25)):
        assert f'llmcache_{name}{{model_name="classifier"}} {value}\n' in figures
    assert f'llmcache_audit_status{{model_name="classifier",status="{audit.status}"}} 1.0' in figures
    assert ("at most 0.91% changed (certified, allowed 1.00%)" in of_stats) == (audit.status == "certified")
    assert f"audit: {audit.measure}" in of_stats


@pytest.mark.slow
def test_the_bound_is_that_of_the_calibration() -> None:
    with calibrated() as cache:
        audit, calibration = cache.stats().audit, cache.calibration
        assert audit is not None and calibration is not None and calibration.chosen is not None
        assert audit.bound == calibration.chosen.bound


def test_nothing_is_loaded_from_elsewhere_and_everything_is_escaped(serve: Serve) -> None:
    client = serve("classifier", model='<script>alert("x")</script>')
    first, second, part = client.get("/"), client.get("/"), client.get("/admin/figures")
    policies = [answer.headers["content-security-policy"] for answer in (first, second)]
    nonces = [re.findall(r"'nonce-([^']+)'", policy) for policy in policies]
    assert len({*nonces[0], *nonces[1]}) == 2 and "default-src 'none'" in policies[0]
    assert "unsafe" not in policies[0] and "frame-ancestors 'none'" in policies[0]
    for tag, attributes in re.findall(r"<(\w+)([^>]*)>", first.text):
        assert not re.search(r"\s(style|src|action|on\w+)=", attributes), tag
        assert re.findall("href=(\\S+)", attributes) in ([], ['"data:,"']), tag
        assert tag not in ("script", "style") or f'nonce="{nonces[0][0]}"' in attributes
    assert '<script>alert("x")</script>' in text_of(first.text) and first.text.count("<script") == 1
    assert "default-src 'none'" in part.headers["content-security-policy"]
    assert "nonce" not in part.headers["content-security-policy"] and "<script" not in part.text
    assert first.headers["x-frame-options"] == "DENY" and not re.search(r"url\(|@import", first.text)
    assert first.headers["cache-control"] == part.headers["cache-control"] == "no-store"


def test_history_is_bounded_and_tells_shares_of_each_interval() -> None:
    now = 0.0
    history = History(lambda: now)
    assert history.samples() == [] and history.intervals() == []
    for n in range(2000):
        now = 5.0 * n
        history.add(Stats(n_requests=10 * n, hits={"exact": 4 * n, "semantic": 2 * n, "prefix": 0}))
    samples, intervals = history.samples(), history.intervals()
    assert samples[-1].at_s == 9995.0 and samples[0].at_s >= 9995.0 - 3600 and len(samples) <= 121
    assert set(map(str, intervals)) == {str(Interval(30.0, 60, {"exact": 0.4, "semantic": 0.2}))}


def test_a_repeated_job_that_fails_is_tried_again_and_is_told_of_once(caplog: Log) -> None:
    n_tried, is_done = iter(range(1000)), threading.Event()

    def work() -> None:
        if next(n_tried) < 3:
            raise OSError("not now")
        is_done.set()

    with repeated(work, 0.01):
        assert is_done.wait(30)
    told = [one for one in caplog.records if one.getMessage() == "a repeated job failed"]
    assert len([one for one in told if one.levelno == logging.WARNING]) == 1


def test_a_repeated_job_that_is_under_way_is_waited_for() -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(0.05)
        done.set()

    with repeated(work, 1e6, first_s=0.0):
        assert begun.wait(30)
    assert done.is_set()


def test_figures_are_written_with_their_unit() -> None:
    made = {
        count(12345): "12,345",
        **{percent(value): text for value, text in ((0.0, "0 %"), (0.00456, "0.46 %"), (0.634, "63.4 %"))},
        **{size(value): text for value, text in ((0, "0 B"), (999, "999 B"), (2**30, "1.1 GB"), (None, "-"))},
        **{duration(value): text for value, text in ((0.00123, "1.23 ms"), (0.9996, "1 s"), (90, "2 min"))},
        duration(7200): "2.0 h",
    }
    assert [one.replace("\N{NO-BREAK SPACE}", " ") for one in made] == list(made.values())


@pytest.mark.slow
def test_in_a_browser(models: Path, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.yaml", "boss", "public", ("infer", "admin"))
    server = make_server(models / "classifier", keys=tmp_path / "keys.yaml", save=tmp_path / "saved")
    with open_browser() as browser, listening(server) as (_, address):
        if browser is None:
            pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
        for size_name in SIZES:
            browser.show(address.replace("//", f"//boss:{key}@"), size_name)
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
            buttons = "[...document.querySelectorAll('button:not([hidden])')]"
            small = f"{buttons}.filter(b => b.offsetParent && b.offsetHeight < 44)"
            assert browser.run(f"return {small}.length") == 0
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                assert browser.least_contrast() >= 4.5, scheme
        for action, told in (
            ("disable", "The cache is disabled."),
            ("enable", "The cache is enabled."),
            ("audit", "Done: 0 audit jobs."),
            ("drain", "The server is draining; 0 requests are under way."),
            ("resume", "The server is ready."),
            ("save", "Saved."),
        ):
            wait_until(lambda action=action: browser.shows(action))
            browser.press(action, "go")
            wait_until(lambda told=told: browser.told() == told)
        browser.press("purge", "go", namespace="")  # a dialog without a name stays open
        assert browser.run("return document.getElementById('confirm').open")
        browser.run("document.getElementById('confirm').close('cancel')")
        browser.press("purge", "go", namespace="public")
        wait_until(lambda: browser.told() == "Purged 0 requests of namespace public.")
        assert browser.complaints() == []
        browser.press("purge", "go", namespace="<b>another</b>")
        wait_until(lambda: browser.told().startswith("Not done: no key has this namespace"))
