"""A real Redis for tests; without Redis, tests are skipped."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.support import redis_server as ours
from experiments.support.redis_server import RedisServer, check_installed, wait_until
from llmcache.errors import ConfigError

__all__ = ["RedisServer", "redis_server", "wait_until"]


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """Start a server and wait until it answers; without Redis, skip the test and say how to install it."""
    try:
        check_installed()
    except ConfigError as error:
        pytest.skip(str(error))
    with ours.redis_server(folder, *options) as server:
        yield server
