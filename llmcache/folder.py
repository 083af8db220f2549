"""A folder that holds one save: a new version is written beside the old one, and one rename switches between them.

    manifest.json               which files belong to the version, with their SHA-256
    <part>-<tag>.safetensors    its data; every version has a tag of its own
    .llmcache.lock              held by whoever saves; stays
    .llmcache.journal           while a version is written: names of all that may have to be removed; then gone
    .llmcache-<tag>             while a version is written: where that is done; then gone

Nothing else in the folder is ours. The journal is written before anything else, and what it names and the manifest
does not is removed after the switch, or by the next save if this one was cut short. A file that neither of them names
stays. Links are never written through: the folder may be one, the files that are ours in it may not.
"""

import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    """The fields that every manifest of ours has, whatever its format."""

    model_config = ConfigDict(strict=True)

    format: int
    weights: str
    files: dict[_DataName, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


class _Journal(BaseModel):
    """The fields of a journal of ours."""

    model_config = ConfigDict(strict=True)

    mark: Literal["llmcache.journal"]
    names: list[Annotated[str, Field(pattern=f"^({_DATA}|{_DRAFTS})$")]]


_T = TypeVar("_T", _Listed, _Journal)


def is_data_name(name: str) -> bool:
    """Whether a data file of ours may be called so: nothing outside the folder."""
    return re.fullmatch(_DATA, name) is not None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if needed; within, nobody else saves there, in this process or another."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    _listed(folder)  # before a lock is made in what is none of ours
    _check_file(folder / _LOCK)
    try:
        with FileLock(folder / _LOCK, timeout=_PATIENCE_S):
            _listed(folder)
            _journaled(folder)  # not before: another save may be writing its journal, or removing it
            yield
    except Timeout as error:
        raise StoreError(
            f"{folder}: another save there has not ended for {_PATIENCE_S:.0f} s: look what it does"
        ) from error


def check_writable(folder: Path) -> None:
    """Make the folder if needed, and try whether files can be written there.

    Raises:
        StoreError: They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise StoreError(f"{folder}: nothing can be saved there: {error.strerror or error}") from error


def check_ours(folder: Path) -> None:
    """See that nothing in a folder keeps a save from being written.

    Raises:
        StoreError: Somebody else's file is where one of ours would go, or a damaged one of ours.
    """
    with locked(folder):
        pass


def replace(folder: Path, parts: Mapping[str, Mapping[str, Tensor]], describe: Callable[[dict[str, str]], str]) -> None:
    """Write a version and make it the one that is read; under the lock. If that fails, the earlier one is whole.

    `parts` holds tensors of each file by the first part of its name; `describe` makes the manifest of the files'
    SHA-256.
    """
    _tidy(folder)
    tag = uuid.uuid4().hex[:12]
    drafts, names = f".llmcache-{tag}", {part: f"{part}-{tag}.safetensors" for part in parts}
    journal = _Journal(mark="llmcache.journal", names=[drafts, *names.values(), *_listed(folder)])
    _write(folder / JOURNAL, journal.model_dump_json())
    try:
        (folder / drafts).mkdir()
        files = {name: _write_data(folder / drafts / name, parts[part]) for part, name in names.items()}
        for name in files:
            os.rename(folder / drafts / name, folder / name)
        _write(folder / drafts / MANIFEST, describe(files))
        _sync(folder)
        os.replace(folder / drafts / MANIFEST, folder / MANIFEST)
        with suppress(OSError):  # saved it is
            _sync(folder)
    finally:
        with suppress(OSError, StoreError):  # what cannot be removed now, the next save removes
            _tidy(folder)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tidy(folder: Path) -> None:
    """Remove what the journal names and the manifest does not, and then the journal."""
    for name in sorted(set(_journaled(folder)).difference(_listed(folder))):
        path = folder / name
        if path.is_symlink():
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)


def _listed(folder: Path) -> Sequence[str]:
    """Data files of the version that is read now."""
    path = folder / MANIFEST
    return [*_read(path, _Listed).files] if _check_file(path) else ()


def _journaled(folder: Path) -> Sequence[str]:
    """Names in the journal of a save that was cut short."""
    path = folder / JOURNAL
    if not _check_file(path) or not path.stat().st_size:  # cut short before the first byte: nothing else was written
        return ()
    return _read(path, _Journal).names


def _check_file(path: Path) -> bool:
    """Whether there is a file; a link, a folder and the like are refused."""
    try:
        is_file = stat.S_ISREG(path.lstat().st_mode)  # asked once: another save may remove it
    except FileNotFoundError:
        return False
    if not is_file:
        raise _foreign(path)
    return True


def _read(path: Path, kind: type[_T]) -> _T:
    """Read one of our files; a file that holds anything else is refused."""
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
    """Write tensors to a new file, on the disk itself, and return its SHA-256."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path)
    _sync(path)
    return sha256(path)


def _write(path: Path, text: str) -> None:
    """Write a text to a new file, on the disk itself."""
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()  # half a journal would be taken for somebody else's
            raise


def _sync(path: Path) -> None:
    """Have what was written to a file, or which names a folder has, survive a loss of power, where the system can."""
    if path.is_dir() and os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
