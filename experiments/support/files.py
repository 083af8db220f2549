"""Where things lie; files that are there as a whole or not at all; a lock between processes that share a folder."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from llmcache import LLMCacheError
from llmcache.cli.output import naming


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of this machine; not part of an experiment's settings."""

    data: Path | None = None  # data sets; None for the hub
    models: Path | None = None  # prepared models; None where there are none


class InUseError(LLMCacheError):
    """Another process is at it."""


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file; a reader sees the old text or the new, never a part, and it stays if this fails."""
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write UTF-8 files that belong together, each as `write_whole` does, and put them in place in this order."""
    # The first is put in place when all are written, so a disk that is too full for one of them changes none.
    partials = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in texts}
    try:
        for path, text in texts.items():
            with naming(path):
                partials[path].write_text(text, encoding="utf-8")
        for path, partial in partials.items():
            os.replace(partial, path)
    except BaseException:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def written_by_others(folder: Path) -> Iterator[None]:
    """Let other libraries write into a folder: whatever they make of a full disk is told as an `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of torch a RuntimeError, of safetensors one of its own, of tokenizers a bare Exception
        raise OSError(f"{folder}: could not be written; is the disk full? ({error})") from error


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
