"""The whole application: keys on every route, namespaces that keys decide, and bodies that are hostile."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from typer.testing import CliRunner

from llmcache.cli.main import app as command_line
from llmcache.serving.app import create_app
from tests.serving.served import make_server
from tests.serving.walking import unbounded_fields, walk_routes

NAMES = (("ann", "a"), ("bob", "b"), ("boss", "public"))


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file of keys, and the keys by name; the last one is an operator's."""
    path, found = tmp_path / "keys.yaml", {}
    for name, namespace in NAMES:
        more = ["--admin"] if name == "boss" else []
        made = CliRunner().invoke(
            command_line, ["keys", "add", str(path), "--name", name, "--namespace", namespace, *more]
        )
        assert made.exit_code == 0, made.output
        found[name] = made.stdout.strip().split()[-1]
    return path, found


@pytest.fixture
def client(models: Path, keys: tuple[Path, dict[str, str]]) -> Iterator[TestClient]:
    server = make_server(models / "classifier", keys=keys[0], reveal_hits=True)
    with TestClient(create_app(server), raise_server_exceptions=False) as client:
        yield client


def _predict(client: TestClient, key: str, text: str) -> str:
    answer = client.post("/predict", json={"inputs": text}, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Cache"]


@pytest.mark.hostile("keys, paths and origins")
@pytest.mark.parametrize("kind", ["classifier", "reranker", "embedding"])
def test_every_route_but_liveness_needs_a_key(kind: str, models: Path, keys: tuple[Path, dict[str, str]]) -> None:
    app = create_app(make_server(models / kind, keys=keys[0]))
    assert asyncio.run(walk_routes(app)) > 20


def test_no_list_of_a_body_collects_an_error_an_item(models: Path) -> None:
    assert unbounded_fields(create_app(make_server(models / "classifier"))) == []


def test_a_key_decides_the_namespace_and_public_is_read_by_all(
    client: TestClient, keys: tuple[Path, dict[str, str]]
) -> None:
    ann, bob, boss = keys[1].values()
    assert [_predict(client, ann, "my card") for _ in range(2)] == ["MISS", "HIT"]
    assert _predict(client, bob, "my card") == "MISS"
    assert _predict(client, boss, "the rate") == "MISS"
    assert [_predict(client, key, "the rate") for key in (ann, bob)] == ["HIT", "HIT"]
    told = {"Authorization": f"Bearer {bob}"}
    body = {"inputs": "lost cash", "namespace": "a", "cache_salt": "a"}
    assert client.post("/predict", json=body, headers=told).headers["X-Cache"] == "MISS"
    assert _predict(client, ann, "lost cash") == "MISS"


def test_operators_routes_are_for_operators(client: TestClient, keys: tuple[Path, dict[str, str]]) -> None:
    ann, _, boss = keys[1].values()
    _predict(client, ann, "my card")
    purge = {"namespace": "a"}
    assert client.post("/admin/purge", json=purge, headers={"Authorization": f"Bearer {ann}"}).status_code == 403
    done = client.post("/admin/purge", json=purge, headers={"Authorization": f"Bearer {boss}"})
    assert done.json() == {"purged": 1}
    assert _predict(client, ann, "my card") == "MISS"
    assert client.get("/metrics", headers={"Authorization": f"Bearer {boss}"}).status_code == 200


def test_metrics_tell_of_keys_and_places(models: Path, keys: tuple[Path, dict[str, str]]) -> None:
    server, release = make_server(models / "classifier", keys=keys[0]), threading.Event()
    boss = {"Authorization": f"Bearer {keys[1]['boss']}"}
    with TestClient(create_app(server)) as client:

        def told(name: str, **labels: str) -> float:
            families = text_string_to_metric_families(client.get("/metrics", headers=boss).text)
            samples = [sample for family in families for sample in family.samples if sample.name == f"llmcache_{name}"]
            return sum(one.value for one in samples if labels.items() <= one.labels.items())

        def wait_for(name: str) -> None:
            for _ in range(1000):
                if told(name):
                    return
                time.sleep(0.01)
            raise AssertionError(f"{name} stays at 0")

        client.post("/predict", json={}, headers={"Authorization": "Bearer wrong"})
        assert told("http_requests_total", route="/predict", status="401") == 1
        server.thread.submit(lambda: release.wait(20))
        body = {"json": {"inputs": "my card"}, "headers": boss}
        asking = threading.Thread(target=client.post, args=("/predict",), kwargs=body)
        asking.start()
        wait_for("concurrent_requests")
        assert told("concurrent_requests") == 1
        release.set()
        asking.join()
        assert told("concurrent_requests") == told("key_file_failures_total") == 0
        keys[0].write_text("no list of keys")
        wait_for("key_file_failures_total")


@pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"inputs": NaN}',
        b'{"inputs": "\\ud800"}',
        b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"inputs": [' + b'"a",' * 300_000 + b'"a"]}',
        b'{"inputs": "' + b"a " * 900_000 + b'"}',
        b'{"inputs": "' + b"a" * 3_000_000 + b'"}',
        b'{"inputs": -1}',
        b"\xff\xfe",
        b"",
    ],
    ids=lambda body: f"{body[:16]!r} of {len(body)}",
)
@pytest.mark.parametrize("path", ["/predict", "/v1/classify"])
def test_hostile_bodies_are_refused_in_the_routes_dialect(models: Path, path: str, body: bytes) -> None:
    if path == "/v1/classify":
        body = body.replace(b'"inputs"', b'"input"')
    with TestClient(create_app(make_server(models / "classifier"))) as client:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500
        told: Any = answer.json()["error"]
        text = told if path == "/predict" else told["message"]
        assert text and "aaaa" not in text
        assert client.get("/health").status_code == 200


def test_requests_while_a_namespace_is_purged_are_answered(models: Path) -> None:
    server = make_server(models / "classifier")
    with TestClient(create_app(server)) as client:
        stop = threading.Event()

        def purge() -> None:
            while not stop.is_set():
                client.post("/admin/purge", json={"namespace": "default"}).raise_for_status()

        purging = threading.Thread(target=purge)
        purging.start()
        try:
            answers = [client.post("/predict", json={"inputs": f"my card w{i % 5}"}) for i in range(60)]
        finally:
            stop.set()
            purging.join()
    assert {answer.status_code for answer in answers} == {200}
    for i in range(5):
        scores = [answers[n].json()[0]["score"] for n in range(i, 60, 5)]
        assert scores == pytest.approx([scores[0]] * len(scores), abs=1e-5)


@pytest.mark.parametrize("forget", [("purge", {"namespace": "default"}), ("clear", None)], ids=lambda one: one[0])
def test_what_is_computed_while_it_is_to_be_forgotten_is_forgotten(models: Path, forget: tuple[str, Any]) -> None:
    server = make_server(models / "classifier", warmup_tokens=0)
    is_held, release = threading.Event(), threading.Event()

    def hold(*args: Any) -> None:
        if threading.current_thread().name == "llmcache-model":  # it was looked up, and is to be computed
            is_held.set()
            release.wait(20)

    hook = server.model.register_forward_pre_hook(hold)
    with TestClient(create_app(server)) as client:
        asking = threading.Thread(target=client.post, args=("/v1/classify",), kwargs={"json": {"input": "my card"}})
        asking.start()
        is_held.wait(20)
        purging = threading.Thread(target=client.post, args=(f"/admin/{forget[0]}",), kwargs={"json": forget[1]})
        purging.start()
        while purging.is_alive() and not len(server.thread):
            purging.join(0.001)
        release.set()
        asking.join()
        purging.join()
        hook.remove()
        assert server.cache.stats().n_stored == 0
        assert server.cache.stats().n_misses == 1


def test_liveness_says_when_the_server_stops(models: Path) -> None:
    server = make_server(models / "classifier")

    async def asked() -> int:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=create_app(server))) as client:
            return (await client.get("http://server/health")).status_code

    assert asyncio.run(asked()) == 503  # not started
    with TestClient(create_app(server)) as client:
        assert client.get("/health").status_code == 200
        server.phase = "draining"
        assert client.get("/health").status_code == 503
