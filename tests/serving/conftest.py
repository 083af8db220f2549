"""Folders with tiny models, made once per process, and a client of the test's server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from llmcache.serving.server import Server
from tests.serving.served import client_of, write


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("classifier", "reranker", "embedding", "decoder"):
        write(folder, kind)
    return folder


@pytest.fixture
def client(server: Server) -> Iterator[TestClient]:
    """A client of the fixture `server`; it starts and stops the server."""
    with client_of(server) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as made:
        yield made
