"""Replicas without a running Ray: settings, routing keys, a replica's health, and `deploy/ray.yaml`."""

import asyncio
import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from llmcache.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"
KEY = "llmcache_a-key-that-nobody-may-read"


def _package() -> Any:
    pytest.importorskip("ray.serve", reason="needs Ray: make setup", exc_type=ImportError)
    return importlib.import_module("llmcache.serving.ray")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_wrong_settings_are_told_before_anything_is_deployed(args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        _package().app(args)
    assert told in str(error.value)


def test_a_folder_without_a_saved_cache_is_not_restored(tmp_path: Path) -> None:
    settings = _package().ReplicaSettings.make({"model": "m", "restore": tmp_path})
    with pytest.raises(ConfigError, match="there is no saved cache"):
        settings.saved  # noqa: B018  # the property reads the folder


def _request(*headers: tuple[bytes, bytes]) -> tuple[bytes]:
    """Return the arguments that Ray's proxy sends to a replica."""
    from ray.serve._private.common import StreamingHTTPRequest

    return (pickle.dumps(StreamingHTTPRequest({"type": "http", "headers": headers}, proxy_actor_name="a proxy")),)


def test_requests_of_one_key_have_one_routing_key_which_is_not_the_key() -> None:
    _package()
    from llmcache.serving.ray.routing import routing_key

    given = routing_key(_request((b"host", b"here"), (b"Authorization", f"Bearer {KEY}".encode())))
    assert given == routing_key(_request((b"authorization", f"Bearer {KEY} ".encode()))) != ""
    assert given != routing_key(_request((b"authorization", b"Bearer another")))
    assert KEY not in given and "Bearer" not in given
    assert routing_key(_request()) == routing_key(()) == routing_key(("a call from Python",)) == ""


def test_a_session_goes_before_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    _package()
    from types import SimpleNamespace

    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    from llmcache.serving.ray.routing import KeyRouter, routing_key

    async def ranked(self: Any, candidates: list[Any], pending: Any) -> list[Any]:
        return [pending and pending.metadata.session_id]

    monkeypatch.setattr(ConsistentHashRouter, "choose_replicas", ranked)
    router = object.__new__(KeyRouter)
    args = _request((b"authorization", b"Bearer a"))

    def chosen(session: str) -> Any:
        pending: Any = SimpleNamespace(args=args, metadata=SimpleNamespace(session_id=session))
        return asyncio.run(router.choose_replicas([], pending))

    assert chosen("mine") == ["mine"]
    assert chosen("") == [routing_key(args)]
    assert asyncio.run(router.choose_replicas([], None)) == [None]


def test_a_replica_is_healthy_while_its_server_is_ready(models: Path) -> None:
    package = _package()
    settings = package.ReplicaSettings.make(
        {"model": str(models / "classifier"), "served_name": "desk", "threads": 1, "server": {"warmup_tokens": 8}}
    )
    replica = package.Replica(settings)
    with pytest.raises(RuntimeError, match="starting"):
        replica.check_health()
    with TestClient(replica.__serve_build_asgi_app__()) as client:
        replica.check_health()
        assert client.post("/predict", json={"inputs": "lost my card"}).status_code == 200
        assert client.get("/info").json()["model_id"] == "desk"
    with pytest.raises(RuntimeError, match="stopped"):
        replica.check_health()


def test_the_file_in_deploy_is_one_that_ray_takes() -> None:
    package = _package()
    from ray.serve.schema import ServeDeploySchema

    found = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "ray.yaml").read_text(encoding="utf-8")))
    (application,) = found.applications
    module, _, name = application.import_path.partition(":")
    assert getattr(importlib.import_module(module), name) is package.app
    package.app(application.args)
    (options,) = application.deployments
    assert options.name == package.app(application.args)._bound_deployment.name
    assert found.http_options.host == "127.0.0.1"
    assert options.autoscaling_config["min_replicas"] == 2
    # Settings that the file leaves out have the library's values. Ray drops unknown settings: the file has none.
    assert not options.model_extra and not application.model_extra
