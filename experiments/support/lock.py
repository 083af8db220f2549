"""A lock between processes that share a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from llmcache import LLMCacheError


class InUseError(LLMCacheError):
    """Another process is at it."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file, made here with its folder, or raise `InUseError`. A file that is left over is no obstacle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InUseError(f"{path.parent}: another process holds {path.name}; wait for it to end") from None
    try:
        yield
    finally:
        lock.release()
