"""A lock between processes that share a folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llmcache.errors import LLMCacheError


class InUseError(LLMCacheError):
    """Another process is at it."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file, made here with its folder, and take the file away afterwards.

    The operating system lets go of the lock when a process dies, however it dies; a file that is left over is no
    obstacle.

    Args:
        path: The lock file.

    Raises:
        InUseError: Another process holds it.
        OSError: No file can be written there.
    """
    file = _take(path)
    try:
        yield
    finally:
        with file:
            path.unlink(missing_ok=True)  # while it is still held: nobody else removes the one made next


def _take(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InUseError(f"{path.parent}: another process holds {path.name}; wait for it to end") from None
        except BaseException:
            file.close()
            raise
        if _is_at(path, file):
            return file
        file.close()  # its last user took it away before it was ours


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
