"""A folder that holds one save: a new version is written beside the old one, and one rename switches to it.

    manifest.json               the files of the version, with their SHA-256
    <part>-<tag>.safetensors    its data; every version has its own tag
    .llmcache.lock              locked while saving; never removed
    .llmcache.journal           names of all files that may have to be removed; exists while a version is written
    .llmcache-<tag>             draft folder of the new version; exists while it is written

No other file in the folder is ours. The journal is written first. Files that it names and the manifest does not are
removed after the switch, or by the next save if this one was interrupted. Files in neither stay. The folder may be a
symbolic link; our files in it may not, so nothing is written through a link. Only their owner may read our files.
"""

import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from llmcache.errors import StoreError

MANIFEST = "manifest.json"
JOURNAL = ".llmcache.journal"
_LOCK = ".llmcache.lock"
_PATIENCE_S = 600.0  # a save of this length has probably hung
_DATA = r"[a-z]{1,24}-[0-9a-f]{12}\.safetensors"
_DRAFTS = r"\.llmcache-[0-9a-f]{12}"
_DataName: TypeAlias = Annotated[str, Field(pattern=f"^{_DATA}$")]


class _Listed(BaseModel):
    """The fields of every manifest, in all formats."""

    model_config = ConfigDict(strict=True)

    format: int
    weights: str
    files: dict[_DataName, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


class _Journal(BaseModel):
    """The fields of a journal."""

    model_config = ConfigDict(strict=True)

    mark: Literal["llmcache.journal"]
    names: list[Annotated[str, Field(pattern=f"^({_DATA}|{_DRAFTS})$")]]


_T = TypeVar("_T", _Listed, _Journal)


def is_data_name(name: str) -> bool:
    """Whether a name is that of a data file, and so within the folder."""
    return re.fullmatch(_DATA, name) is not None


def why_untrusted(folder: Path) -> str:
    """Return why what a folder holds cannot be trusted: anyone may replace it; "" if only owner and group may."""
    if os.name == "nt" or not folder.stat().st_mode & stat.S_IWOTH:
        return ""
    return f"{folder}: anyone may write to it and change what is served: chmod o-w {folder}, or name a folder within it"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it against other saves, in this process and others."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if reason := why_untrusted(folder):
        raise StoreError(reason)
    _listed(folder)  # raises before a lock file is created in a foreign folder
    _check_file(folder / _LOCK)
    try:
        with FileLock(folder / _LOCK, timeout=_PATIENCE_S, mode=0o600):
            _listed(folder)
            _journaled(folder)  # only under the lock: another save may be writing or removing its journal
            yield
    except Timeout as error:
        raise StoreError(f"{folder}: another save there takes over {_PATIENCE_S:.0f} s: check what it does") from error


def check_writable(folder: Path) -> None:
    """Create the folder if needed, and write a temporary file; `StoreError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise StoreError(f"{folder}: nothing can be saved there: {error.strerror or error}") from error


def check_ours(folder: Path) -> None:
    """Raise `StoreError` if a foreign or damaged file in a folder has the name of one of ours."""
    with locked(folder):
        pass


def replace(folder: Path, parts: Mapping[str, Mapping[str, Tensor]], describe: Callable[[dict[str, str]], str]) -> None:
    """Write a new version and switch to it. The caller holds the lock. On an error the earlier version stays intact.

    `parts` holds the tensors of each file by the first part of its name; `describe` returns the manifest's text, given
    the SHA-256 of the files by name.
    """
    _tidy(folder)
    tag = uuid.uuid4().hex[:12]
    drafts, names = f".llmcache-{tag}", {part: f"{part}-{tag}.safetensors" for part in parts}
    journal = _Journal(mark="llmcache.journal", names=[drafts, *names.values(), *_listed(folder)])
    _write(folder / JOURNAL, journal.model_dump_json())
    try:
        (folder / drafts).mkdir(mode=0o700)
        files = {name: _write_data(folder / drafts / name, parts[part]) for part, name in names.items()}
        for name in files:
            os.rename(folder / drafts / name, folder / name)
        _write(folder / drafts / MANIFEST, describe(files))
        _sync(folder)
        os.replace(folder / drafts / MANIFEST, folder / MANIFEST)
        with suppress(OSError):  # the save is complete anyway
            _sync(folder)
    finally:
        with suppress(OSError, StoreError):  # the next save removes the rest
            _tidy(folder)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tidy(folder: Path) -> None:
    """Remove the files that the journal names and the manifest does not, then the journal."""
    for path in (folder / name for name in sorted(set(_journaled(folder)).difference(_listed(folder)))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.is_symlink():
            path.unlink(missing_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)


def _listed(folder: Path) -> Sequence[str]:
    """Return the names of the current version's data files."""
    path = folder / MANIFEST
    return [*_read(path, _Listed).files] if _check_file(path) else ()


def _journaled(folder: Path) -> Sequence[str]:
    """Return the names in the journal of an interrupted save."""
    path = folder / JOURNAL
    # An empty one was interrupted before its first byte: nothing else was written.
    return _read(path, _Journal).names if _check_file(path) and path.stat().st_size else ()


def _check_file(path: Path) -> bool:
    """Whether a regular file exists; raise for a link, a folder and other kinds."""
    try:
        is_file = stat.S_ISREG(path.lstat().st_mode)  # one call: another save may remove the file
    except FileNotFoundError:
        return False
    if not is_file:
        raise _foreign(path)
    return True


def _read(path: Path, kind: type[_T]) -> _T:
    """Read one of our JSON files; raise if it holds anything else."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise _foreign(path) from error


def _foreign(path: Path) -> StoreError:
    return StoreError(
        f"{path}: not written by cache.save(), or damaged since, and never overwritten: save to another folder, or "
        "move it away"
    )


def _write_data(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a new file, sync it to disk, and return its SHA-256."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path)
    path.chmod(0o600)
    _sync(path)
    return sha256(path)


def _write(path: Path, text: str) -> None:
    """Write text to a new file and sync it to disk."""
    path.unlink(missing_ok=True)
    with open(path, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()  # a truncated journal would be taken for a foreign file
            raise


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk; folders cannot be synced on Windows."""
    if path.is_dir() and os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
