"""Folders, files written whole or not at all, and a lock between processes that share a folder."""

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
    """This machine's folders; not part of an experiment's settings."""

    data: Path | None = None  # data sets; None for the hub
    models: Path | None = None  # prepared models; None where there are none


class InUseError(LLMCacheError):
    """Another process is using the folder."""


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: readers see the old text or the new, and the old text stays on failure."""
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write several UTF-8 files, each as `write_whole` does; move them into place, in order, once all are written."""
    # All are written before the first is moved, so if the disk is too full for one of them, none changes.
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
    """Turn errors of other libraries that write into a folder, such as a full disk, into `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # torch raises RuntimeError, safetensors its own error, tokenizers a bare Exception
        raise OSError(f"{folder}: could not be written; is the disk full? ({error})") from error


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file, created with its folder, or raise `InUseError`. A left-over file does not block."""
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
