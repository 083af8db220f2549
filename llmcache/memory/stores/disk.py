"""A store on a local disk, for all processes of one machine.

    index.sqlite    rows of all values, and small values; see `disk_index`. A damaged one is renamed to .damaged
    values/         one file per larger value, written once, memory-mapped when read
    .lock           held while a process opens the store

A file is written under a temporary name and renamed in the transaction that adds its row. So every row has a whole
file, even if the process is killed. A power loss may damage files, which is detected when they are read.
"""

import logging
import os
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from llmcache.errors import StoreError
from llmcache.memory.stores.base import Bytes, Purges, Put, Store, StoreKey, StoreStats
from llmcache.memory.stores.disk_index import FILE, DamagedError, DiskIndex
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

GIB = 1024**3
LARGE_BYTES = 32 * 1024  # a larger value gets its own file
_PART = ".part"
_PART_AGE_S = 60.0  # a temporary file not written to for so long is abandoned
_PATIENCE_S = 60.0  # wait for other processes that open the store
_INDEX, _DAMAGED, _LOCK = "index.sqlite", ".damaged", ".lock"
_INDEX_FILES = [f"{_INDEX}{log}" for log in ("", "-wal", "-shm", "-journal")]
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "fuse.glusterfs", "ceph", "lustre", "afs", "beegfs")


class DiskStore(Store):
    """`disk`: files in a folder on a local disk, kept across restarts and shared by the processes of one machine."""

    def __init__(self, folder: str, max_bytes: int = 10 * GIB) -> None:
        """Open the store in a folder, created if needed. Over `max_bytes` the least recently used values are evicted.

        Raises:
            ValueError: The folder is not writable, belongs to another user or can be written to by others, is on a
                network file system, holds other files or a store of another version; or `max_bytes` is not positive.
        """
        if max_bytes < 1:
            raise ValueError(f"max_bytes: give a budget in bytes, at least 1 (got {max_bytes})")
        self._folder, self._max_bytes = Path(folder), max_bytes
        self._values = self._folder / "values"
        self._lost: set[tuple[bytes, str | None]] = set()  # key and file of values whose file is missing or truncated
        self._n_evicted = 0
        self._opening = forkable(threading.Lock(), is_waited_for=False)
        self._opened: DiskIndex | None = self._open()

    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        digests = [key.digest for key in keys]
        found = self._index.find(digests, with_bodies=True) if time.monotonic() < deadline else {}
        values: list[Bytes | None] = []
        for digest in digests:
            held, value = found.get(digest), None
            if held is not None and time.monotonic() < deadline:
                value = held.body if held.file is None else self._map(held.file, held.nbytes)
                if value is None or len(value) < held.nbytes:
                    self._lost.add((digest, held.file))
            values.append(value)
        self._index.use([digest for digest, value in zip(digests, values, strict=True) if value is not None])
        return values

    def put_many(self, puts: Sequence[Put]) -> None:
        fitting = [put for put in puts if len(put.value) <= self._max_bytes]
        large = [i for i, put in enumerate(fitting) if len(put.value) > LARGE_BYTES]
        parts = {i: self._values / f"{uuid.uuid4().hex}{_PART}" for i in large}
        named: list[Path] = []
        try:
            for i, part in parts.items():
                part.touch(mode=0o600, exist_ok=False)
                part.write_bytes(fitting[i].value)
            with self._index.writing() as changes:
                lost, self._lost = self._lost, set()
                useless = changes.remove_lost(lost)
                for i, put in enumerate(fitting):
                    name = parts[i].stem if i in parts else None
                    if changes.put(put, name) and name is not None:
                        named.append(parts[i].rename(self._values / name))
                changes.use([put.key.digest for put in reversed(fitting)])  # a chain's first block is evicted last
                evicted = changes.evict(self._max_bytes)
            self._n_evicted += len(evicted)
            self._unlink([*useless, *evicted])
        except BaseException as error:
            for path in named:
                path.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise StoreError(f"{self._folder}: could not write: {error}") from error
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)

    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        found = self._index.find([key.digest for key in keys], with_bodies=False)
        whole = {digest for digest, held in found.items() if (digest, held.file) not in self._lost}
        return [key for key in keys if key.digest not in whole]

    def numbers(self, namespaces: Sequence[str]) -> list[int]:
        self._index.totals()
        return [self._index.number(namespace) for namespace in namespaces]

    def purge(self, namespace: str | None) -> int:
        with self._index.writing() as changes:
            n_removed = changes.renew(namespace)
        with self._index.writing() as changes:  # a second transaction: the values are unreachable even if it fails
            gone = changes.drop()
        self._unlink(gone)
        self._index.truncate_log()
        return n_removed

    def forget(self, keys: Sequence[StoreKey]) -> None:
        with self._index.writing() as changes:
            gone = changes.forget([key.digest for key in keys], keys[0].namespace, [key.name for key in keys])
        self._unlink(gone)
        self._index.truncate_log()

    def purges(self, since: str | None) -> Purges:
        return self._index.purges(since)

    def stats(self) -> StoreStats:
        n_values, nbytes = self._index.totals()
        return StoreStats(n_values, nbytes, self._max_bytes, self._n_evicted)

    def close(self) -> None:
        with self._opening:
            index, self._opened = self._opened, None
        if index is not None:
            with suppress(StoreError), index.writing():  # writes the pending notes of use
                pass
            index.close()

    @property
    def _index(self) -> DiskIndex:
        """The open index, reopened if its file was removed or replaced, which may have lost purges."""
        if (index := self._opened) is not None and not index.is_in_place:
            with self._opening:
                if (index := self._opened) is not None and not index.is_in_place:
                    index.close()
                    try:
                        index = self._opened = self._open()
                    except ValueError as error:
                        raise StoreError(f"{error}") from error
        if index is None:
            raise StoreError(f"{self._folder}: the store is closed")
        return index

    def _open(self) -> DiskIndex:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (kind := _file_system(self._folder)) in _NETWORK:
                raise ValueError(
                    f"{self._folder}: on a network ({kind}), where SQLite's locks do not hold: name a local folder"
                )
            self._refuse_strangers()
            with FileLock(self._folder / _LOCK, timeout=_PATIENCE_S, mode=0o600):
                self._values.mkdir(exist_ok=True, mode=0o700)
                try:
                    return self._open_index()
                except DamagedError as error:
                    self._put_aside(error)
                    return self._open_index()
        except Timeout as error:
            raise ValueError(f"{self._folder}: another process has been opening it for {_PATIENCE_S:.0f} s") from error
        except (OSError, StoreError) as error:
            raise ValueError(f"{self._folder}: cannot be used: {error}; name a folder you may write to") from error

    def _refuse_strangers(self) -> None:
        """Raise if the folder holds foreign files or links, or other users may change what it holds."""
        known = {_LOCK, self._values.name, *_INDEX_FILES, *(f"{name}{_DAMAGED}" for name in _INDEX_FILES)}
        for path in self._folder.iterdir():
            if path.name not in known or path.is_symlink():
                kind = "a link" if path.is_symlink() else "something else"
                raise ValueError(f"{self._folder}: holds {kind} ({path.name}): name a folder of its own")
        for path in (self._folder, self._values):
            if os.name != "nt" and path.exists():
                about = path.stat()
                if about.st_uid not in (os.geteuid(), 0):
                    raise ValueError(f"{path}: belongs to another user: name a folder of its own, or chown this one")
                if about.st_mode & 0o022:
                    raise ValueError(f"{path}: others may write to it: chmod go-w {path}, or name a folder within it")

    def _open_index(self) -> DiskIndex:
        index = DiskIndex(self._folder / _INDEX)
        for name in _INDEX_FILES:
            with suppress(OSError):  # not there, or root's
                (self._folder / name).chmod(0o600)  # earlier versions left it to the umask
        try:
            self._tidy(index)
        except BaseException:
            index.close()
            raise
        return index

    def _put_aside(self, error: DamagedError) -> None:
        """Rename a damaged index, over an older one. Its values lose their rows, so they are removed."""
        for name in _INDEX_FILES:
            with suppress(FileNotFoundError):
                (self._folder / name).replace(self._folder / f"{name}{_DAMAGED}")
        logger.warning("llmcache: %s; the store begins empty, and the file is kept as %s", error, f"{_INDEX}{_DAMAGED}")

    def _tidy(self, index: DiskIndex) -> None:
        """Remove leftovers of purges and killed processes, and evict values over the budget."""
        with index.writing() as changes:  # no other process is between renaming a file and adding its row
            gone = [*changes.drop(), *changes.evict(self._max_bytes)]
            files = changes.files()
            for path in self._values.iterdir():
                if not FILE.fullmatch(path.name.removesuffix(_PART)):
                    continue  # not ours
                if path.suffix != _PART and path.name not in files:
                    gone.append(path.name)
                with suppress(FileNotFoundError):  # its writer has just removed it
                    if path.suffix == _PART and time.time() - path.stat().st_mtime > _PART_AGE_S:
                        gone.append(path.name)
        self._unlink(gone)

    def _unlink(self, names: Sequence[str | None]) -> None:
        """Remove files without a row. Existing memory maps of them stay readable."""
        for name in names:
            if name is not None:
                with suppress(OSError):  # the next process to open the store removes the rest
                    (self._values / name).unlink()

    def _map(self, name: str, nbytes: int) -> memoryview | None:
        """Map a file of `nbytes` bytes into memory; fewer bytes if it is truncated, None if there is no such file.

        Uses torch, whose maps hold no file descriptor: a long prompt has a thousand blocks.
        """
        path = self._values / name
        with suppress(OSError, RuntimeError), torch.inference_mode(False):
            about = path.lstat()
            if not stat.S_ISREG(about.st_mode):
                return None  # a link, which the store never makes
            if (nbytes := min(nbytes, about.st_size)) == 0:
                return memoryview(b"")
            return torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8).numpy().data
        return None


def _file_system(folder: Path) -> str:
    """Return the type of a folder's file system from /proc/self/mounts; "" if that does not exist."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    at, kind = "", ""
    for line in mounts:
        _, place, this, *_ = line.split(" ")
        place = place.encode().decode("unicode_escape")  # spaces are written as \040
        if len(place) >= len(at) and folder.resolve().is_relative_to(place):
            at, kind = place, this
    return kind
