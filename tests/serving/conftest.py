"""Folders with tiny models, made once per process, and clients of servers, which the tests of a file share."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llmcache.serving.server import Server
from tests.serving.served import Client, Dial, Serve, make_server, write


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("classifier", "reranker", "embedding", "decoder"):
        write(folder, kind)
    return folder


@pytest.fixture(scope="module")
def serve(models: Path) -> Iterator[Serve]:
    """Returns a client of a server, the same one within a file for the same kind of model and settings."""
    clients: dict[str, Client] = {}
    with ExitStack() as stack:

        def client(kind: str, cache: dict[str, Any] | None = None, **settings: Any) -> Client:
            asked = repr((kind, cache, settings))
            if asked not in clients:
                clients[asked] = stack.enter_context(Client(make_server(models / kind, cache, **settings)))
            return clients[asked]

        yield client


@pytest.fixture
def client(serve: Serve, request: pytest.FixtureRequest) -> Client:
    """A client of the file's server, whose kind and settings are the file's `SERVED`, with an empty cache."""
    made = serve(**request.module.SERVED)
    made.server.cache.clear()
    return made


@pytest.fixture
def server(client: Client) -> Server:
    return client.server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as made:
        yield made


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Opens connections, which are closed after the test."""
    with ExitStack() as stack:

        def made(port: int, content: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            connection.sendall(content)
            return connection

        yield made
