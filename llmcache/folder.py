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
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from torch import Tensor

from llmcache.errors import StoreError

MANIFEST = "manifest.json"
JOURNAL = ".llmcache.journal"
_LOCK = ".llmcache.lock"
_PATIENCE_S = 600.0  # a save of this length has probably hung
_MARK = "llmcache.journal"  # by which a journal of ours is known
_DATA = re.compile(r"[a-z]{1,24}-[0-9a-f]{12}\.safetensors")
_DRAFTS = re.compile(r"\.llmcache-[0-9a-f]{12}")
_SHA = re.compile(r"[0-9a-f]{64}")


def is_data_name(name: str) -> bool:
    """Whether a data file of ours may be called so: nothing outside the folder."""
    return _DATA.fullmatch(name) is not None


def read_json(path: Path) -> Any:
    """The content of a JSON file in UTF-8; `ValueError` where it is none, or is nested too deeply."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


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
    journal = {"mark": _MARK, "names": [drafts, *names.values(), *_listed(folder)]}
    _write(folder / JOURNAL, json.dumps(journal))
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


def _listed(folder: Path) -> tuple[str, ...]:
    """Data files of the version that is read now."""
    path = folder / MANIFEST
    if not _check_file(path):
        return ()
    found = _read_ours(path)
    files = found.get("files")
    if (
        isinstance(found.get("format"), int)
        and isinstance(found.get("weights"), str)
        and isinstance(files, dict)
        and all(_DATA.fullmatch(name) and _SHA.fullmatch(str(sha)) for name, sha in files.items())
    ):
        return tuple(files)
    raise _foreign(path)


def _journaled(folder: Path) -> tuple[str, ...]:
    """What the journal of a save that was cut short names."""
    path = folder / JOURNAL
    if not _check_file(path) or not path.stat().st_size:  # cut short before the first byte: nothing else was written
        return ()
    found = _read_ours(path)
    names = found.get("names")
    if found.get("mark") != _MARK or not isinstance(names, list):
        raise _foreign(path)
    if not all(_DATA.fullmatch(str(name)) or _DRAFTS.fullmatch(str(name)) for name in names):
        raise _foreign(path)
    return tuple(map(str, names))


def _check_file(path: Path) -> bool:
    """Whether there is a file; a link, a folder and the like are refused."""
    try:
        is_file = stat.S_ISREG(path.lstat().st_mode)  # asked once: another save may remove it
    except FileNotFoundError:
        return False
    if not is_file:
        raise _foreign(path)
    return True


def _read_ours(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file holds anything else."""
    try:
        found = read_json(path)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


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
