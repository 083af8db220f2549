"""Replicas on a local Ray: routing, streams, and no processes left afterwards."""

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
N = 24  # texts: all their sessions fall on one replica with probability 2 ** -23


@contextmanager
def _two(**settings: Any) -> Iterator[Replicas]:
    """Run two replicas without a store: each serves only what it computed. Assert that Ray leaves no process."""
    pytest.importorskip("ray.serve", reason="needs Ray: make setup", exc_type=ImportError)
    from llmcache.serving.ray import ReplicaSettings

    before = psutil.Process().children(recursive=True)  # of other tests, such as the resource tracker
    with running_replicas(ReplicaSettings.make(settings), 2) as replicas:
        began = set(psutil.Process().children(recursive=True)) - set(before)
        assert len(replicas.pids()) == 2
        yield replicas
    _, left = psutil.wait_procs(began, timeout=20)
    assert left == []


def _n_computed(replicas: Replicas, requests: Sequence[bytes]) -> int:
    """Send requests; return how many were computed."""

    async def run() -> int:
        client = Client(replicas.port)
        replies = [await client.ask(request) for request in requests]
        client.close()
        assert {reply.status for reply in replies} == {200} and all(reply.rung for reply in replies)
        return sum(reply.rung == "none" for reply in replies)

    return asyncio.run(run())


def _streamed(replicas: Replicas) -> list[bytes]:
    """Stream a completion; return the data of each event."""
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
            assert 0 < _n_computed(replicas, [ask(number, who=0) for number in range(N)]) < N  # the other has some
        with closing(http.client.HTTPConnection("127.0.0.1", replicas.port)) as connection:
            connection.request("GET", "/info", headers={"X-Request-Id": "mine"})
            assert connection.getresponse().headers.get_all("X-Request-Id") == ["mine"]
        *events, last = _streamed(replicas)
        assert last == b"[DONE]" and sum(bool(json.loads(event)["choices"][0]["text"]) for event in events) > 1
