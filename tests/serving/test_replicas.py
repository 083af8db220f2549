"""Replicas on a Ray of this machine: where requests go, streams, and what is left of Ray afterwards."""

import asyncio
import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.replicas import Replicas, running_replicas

pytestmark = pytest.mark.slow
N = 24  # texts: that all of their sessions have the same replica has a chance of 2 ** -23


@contextmanager
def _two(**settings: Any) -> Iterator[Replicas]:
    """Two replicas without a store: each knows only what it computed itself. None of Ray's processes is left."""
    pytest.importorskip("ray.serve", reason="needs Ray: make setup", exc_type=ImportError)
    from llmcache.serving.ray import ReplicaSettings

    before = psutil.Process().children(recursive=True)  # of other tests, such as what keeps shared memory tidy
    with running_replicas(ReplicaSettings.make(settings), 2) as replicas:
        began = set(psutil.Process().children(recursive=True)) - set(before)
        assert len(replicas.pids()) == 2
        yield replicas
    _, left = psutil.wait_procs(began, timeout=20)
    assert left == []


def _n_computed(replicas: Replicas, requests: Sequence[bytes]) -> int:
    """How many of these requests the replica that was asked did not know."""

    async def run() -> int:
        client = Client(replicas.port)
        replies = [await client.ask(request) for request in requests]
        client.close()
        assert {reply.status for reply in replies} == {200} and all(reply.rung for reply in replies)
        return sum(reply.rung == "none" for reply in replies)

    return asyncio.run(run())


def _streamed(replicas: Replicas) -> list[bytes]:
    """The data of each event of a completion that is streamed."""
    asked = {"prompt": "where", "temperature": 0, "max_tokens": 8, "stream": True, "ignore_eos": True}
    with closing(http.client.HTTPConnection("127.0.0.1", replicas.port)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        lines = connection.getresponse().read().splitlines()
    return [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]


def test_a_session_has_a_replica_a_key_has_one_and_streams_come_through(models: Path) -> None:
    server = {"reveal_hits": True, "warmup_tokens": 8}
    with _two(model=str(models / "decoder"), cache={"auto_bypass": False}, server=server) as replicas:
        for kind in ("session", "key"):

            def ask(number: int, who: int, kind: str = kind) -> bytes:
                text = f"{number} asks by its {kind} where the card is"
                return post("/v1/completions", {"prompt": text, "max_tokens": 1}, **{kind: f"{kind}-{who}"})

            own = [ask(number, who=number) for number in range(N)]
            assert [_n_computed(replicas, own) for _ in range(2)] == [N, 0]
            assert 0 < _n_computed(replicas, [ask(number, who=0) for number in range(N)]) < N  # the other replica's
        with closing(http.client.HTTPConnection("127.0.0.1", replicas.port)) as connection:
            connection.request("GET", "/info", headers={"X-Request-Id": "mine"})
            assert connection.getresponse().headers.get_all("X-Request-Id") == ["mine"]
        *events, last = _streamed(replicas)
        assert last == b"[DONE]" and sum(bool(json.loads(event)["choices"][0]["text"]) for event in events) > 1
