"""Settings of stores, for tests that hold on disk as on Redis."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import redis_server

PATIENT = 5_000.0  # milliseconds: replies may be late on a busy machine


@pytest.fixture(params=["disk", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a store that holds nothing."""
    if request.param == "disk":
        yield {"name": "disk", "folder": str(tmp_path / "store")}
        return
    with redis_server(tmp_path) as server:
        yield {"name": "redis", "url": server.url, "timeout_ms": PATIENT}
