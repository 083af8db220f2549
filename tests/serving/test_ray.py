"""Replicas: settings, routing keys, health, and a local Ray with two of them, which leaves no process behind."""

import asyncio
import http.client
import importlib
import json
import pickle
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from fastapi.testclient import TestClient

from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.replicas import Replicas, running_replicas
from llmcache.errors import ConfigError
from tests.fixtures import Patch
from tests.forks import NoAnswerError, in_child, needs_fork

FILE = Path(__file__).parents[2] / "deploy" / "ray.yaml"
KEY = "llmcache_a-key-that-nobody-may-read"
N = 24  # texts: all their sessions fall on one replica with probability 2 ** -23


@pytest.fixture
def ray() -> Any:
    """The package of replicas."""
    pytest.importorskip("ray.serve", reason="needs Ray: make setup", exc_type=ImportError)
    return importlib.import_module("llmcache.serving.ray")


def test_without_the_extra_it_says_what_to_install(monkeypatch: Patch) -> None:
    for name in [name for name in sys.modules if name.startswith("llmcache.serving.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmcache-torch\[ray\]'"):
        importlib.import_module("llmcache.serving.ray")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, "model"),
        ({"model": "m", "replica": 2}, "replica: unknown setting"),
        ({"model": "m", "cache": {"polcy": "lru"}}, "did you mean 'policy'"),
        ({"model": "m", "server": {"max_streams": 0}}, "server: max_streams"),
        ({"model": "m", "server": {"model": "n"}}, "server.model: give `model` beside"),
        ({"model": "m", "server": {"save": "folder"}}, "server.save: replicas would overwrite each other's"),
        ({"model": "m", "server": {"save_every_s": 60}}, "server.save_every_s"),
        ({"model": "m", "restore": "folder", "cache": {"policy": "lru"}}, "give either `cache` or `restore`"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_deployed(ray: Any, args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        ray.app(args)
    assert told in str(error.value)


def test_a_folder_without_a_saved_cache_is_not_restored(ray: Any, tmp_path: Path) -> None:
    settings = ray.ReplicaSettings.make({"model": "m", "restore": tmp_path})
    with pytest.raises(ConfigError, match="there is no saved cache"):
        settings.saved  # noqa: B018  # the property reads the folder


def _request(*headers: tuple[bytes, bytes]) -> tuple[bytes]:
    """Return the arguments that Ray's proxy sends to a replica."""
    from ray.serve._private.common import StreamingHTTPRequest

    return (pickle.dumps(StreamingHTTPRequest({"type": "http", "headers": headers}, proxy_actor_name="a proxy")),)


def test_requests_of_one_key_have_one_routing_key_which_is_not_the_key_and_comes_after_the_session(
    ray: Any, monkeypatch: Patch
) -> None:
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    from llmcache.serving.ray.routing import KeyRouter, routing_key

    given = routing_key(_request((b"host", b"here"), (b"Authorization", f"Bearer {KEY}".encode())))
    assert given == routing_key(_request((b"authorization", f"Bearer {KEY} ".encode()))) != ""
    assert given != routing_key(_request((b"authorization", b"Bearer another")))
    assert KEY not in given and "Bearer" not in given
    assert routing_key(_request()) == routing_key(()) == routing_key(("a call from Python",)) == ""

    async def ranked(self: Any, candidates: list[Any], pending: Any) -> list[Any]:
        return [pending and pending.metadata.session_id]

    monkeypatch.setattr(ConsistentHashRouter, "choose_replicas", ranked)
    args = _request((b"authorization", b"Bearer a"))
    for session, expected in (("mine", "mine"), ("", routing_key(args)), (None, None)):
        asked: Any = SimpleNamespace(args=args, metadata=SimpleNamespace(session_id=session))
        choosing = object.__new__(KeyRouter).choose_replicas([], None if session is None else asked)
        assert asyncio.run(choosing) == [expected]


def test_a_replica_is_healthy_while_its_server_is_ready(ray: Any, models: Path) -> None:
    settings = {"model": str(models / "classifier"), "served_name": "desk", "threads": 1}
    replica = ray.Replica(ray.ReplicaSettings.make({**settings, "server": {"warmup_tokens": 8}}))
    with pytest.raises(RuntimeError, match="starting"):
        replica.check_health()
    with TestClient(replica.__serve_build_asgi_app__()) as client:
        replica.check_health()
        assert client.post("/predict", json={"inputs": "lost my card"}).status_code == 200
        assert client.get("/info").json()["model_id"] == "desk"
    with pytest.raises(RuntimeError, match="stopped"):
        replica.check_health()


def test_the_file_in_deploy_is_one_that_ray_takes(ray: Any) -> None:
    from ray.serve.schema import ServeDeploySchema

    found = ServeDeploySchema.model_validate(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    (application,) = found.applications
    module, _, name = application.import_path.partition(":")
    assert getattr(importlib.import_module(module), name) is ray.app
    (options,) = application.deployments
    assert options.name == ray.app(application.args)._bound_deployment.name
    assert found.http_options.host == "127.0.0.1"
    assert options.autoscaling_config["min_replicas"] == 2
    # Settings that the file leaves out have the library's values. Ray drops unknown settings: the file has none.
    assert not options.model_extra and not application.model_extra


def _n_computed(replicas: Replicas, requests: Sequence[bytes]) -> int:
    """Send requests; return how many were computed."""

    async def run() -> int:
        client = Client(replicas.port)
        replies = [await client.ask(request) for request in requests]
        client.close()
        assert {reply.status for reply in replies} == {200} and all(reply.rung for reply in replies)
        return sum(reply.rung == "none" for reply in replies)

    return asyncio.run(run())


@pytest.mark.slow
@needs_fork
def test_a_session_has_a_replica_a_key_has_one_and_streams_come_through(ray: Any, models: Path) -> None:
    """Ray runs in a process of its own, since a start that fails may end that process, or wait for ever."""
    settings = {
        "model": str(models / "decoder"),
        "cache": {"auto_bypass": False},
        "server": {"reveal_hits": True, "warmup_tokens": 8},
    }
    try:
        in_child(check_replicas, ray.ReplicaSettings.make(settings), patience_s=250)
    except NoAnswerError:  # Ray looks for free ports before it opens them: another process may take one meanwhile
        in_child(check_replicas, ray.ReplicaSettings.make(settings), patience_s=250)


def check_replicas(settings: Any) -> None:
    """Start two replicas without a store, each of which serves its own; check what they serve, and that all ends."""
    with running_replicas(settings, 2) as replicas:
        began = psutil.Process().children(recursive=True)
        assert len(replicas.pids()) == 2
        for kind in ("session", "key"):

            def ask(number: int, who: int, kind: str = kind) -> bytes:
                text = f"{number} asks by its {kind} where the card is"
                return post("/v1/completions", {"prompt": text, "max_tokens": 1}, **{kind: f"{kind}-{who}"})

            own = [ask(number, who=number) for number in range(N)]
            assert [_n_computed(replicas, own) for _ in range(2)] == [N, 0]
            assert 0 < _n_computed(replicas, [ask(number, who=0) for number in range(N)]) < N  # the other has some
        body = {"prompt": "where", "temperature": 0, "max_tokens": 8, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
        with closing(http.client.HTTPConnection("127.0.0.1", replicas.port)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.headers.get_all("X-Request-Id") == ["mine"]
            *events, last = [line[6:] for line in answer.read().splitlines() if line.startswith(b"data: ")]
        assert last == b"[DONE]" and sum(bool(json.loads(event)["choices"][0]["text"]) for event in events) > 1
    _, left = psutil.wait_procs(began, timeout=20)
    assert left == []  # Ray ends with all its processes
