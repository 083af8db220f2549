"""The index of a disk store: an SQLite database, which stays intact if a process is killed at any moment.

    held        one row per value: digest of its key, namespace, number, file (if any), time of last use
    bodies      values of up to 32 KiB, too small for a file of their own
    namespaces  the number of each namespace, to which `totals.number` is added
    purges      the latest purges

In WAL mode readers and a writer do not block each other, also across processes. A commit survives the end of the
process; a power loss may lose the latest commits, but never part of one.
"""

import json
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmcache.errors import StoreError
from llmcache.memory.stores.base import FORMAT, Purge, Purges, Put, forgets_of
from llmcache.support.threads import at_fork, forkable

_OURS = int.from_bytes(b"LLMC")  # the application id of our databases
FILE = re.compile("[0-9a-f]{32}")  # the name of a value's file
_PATIENCE_S = 10.0  # wait for another process that writes
_MOST_PURGES = 1_000
_MOST_USES = 65_536  # notes of use kept until the next write
_AT_ONCE = 500  # keys per query
#: SQLite's error codes for a damaged file or one of another format, and its messages for missing tables.
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_GONE = ("no such table", "no such column")
#: In a forked child: the parent's connections that were open at the fork, kept because closing them is not safe.
_parents: list[Any] = []

_SCHEMA = f"""
PRAGMA application_id = {_OURS};
PRAGMA user_version = {FORMAT};
CREATE TABLE held (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, namespace INTEGER NOT NULL,
    number INTEGER NOT NULL, nbytes INTEGER NOT NULL, file TEXT, used INTEGER NOT NULL);
CREATE INDEX by_use ON held (used);
CREATE TABLE bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, number INTEGER NOT NULL);
CREATE TABLE purges (id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT, names TEXT NOT NULL);
CREATE TABLE totals (folder TEXT NOT NULL, number INTEGER NOT NULL, n_values INTEGER NOT NULL, nbytes INTEGER NOT NULL);
CREATE TRIGGER added AFTER INSERT ON held BEGIN
    UPDATE totals SET n_values = n_values + 1, nbytes = nbytes + new.nbytes; END;
CREATE TRIGGER removed AFTER DELETE ON held BEGIN
    DELETE FROM bodies WHERE id = old.id;
    UPDATE totals SET n_values = n_values - 1, nbytes = nbytes - old.nbytes; END;
"""
#: Rows that may be returned: their number is the current one of their namespace.
_VALID = """held JOIN namespaces ON namespaces.id = held.namespace
    AND held.number = namespaces.number + (SELECT number FROM totals)"""


class DamagedError(StoreError):
    """The file is damaged or not a database."""


class Held(NamedTuple):
    """The location of a value: a file, or the index itself."""

    file: str | None
    nbytes: int
    body: bytes | None


class DiskIndex:
    """The rows of one database. Thread-safe: one connection reads, one writes."""

    def __init__(self, path: Path) -> None:
        """Open a database, creating it if needed.

        `ValueError`: it belongs to another application or version, or cannot be opened. `DamagedError`: see there.
        """
        self._path = path
        self._reading, self._writing = forkable(threading.Lock()), forkable(threading.Lock())
        self._used: dict[bytes, None] = {}  # keys, the most recently used last
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the file the connections are open on
        self._is_lost = self._is_closed = False
        try:
            with suppress(OSError):  # of an index that exists, or cannot be made; its log files take over its mode
                path.touch(mode=0o600, exist_ok=False)
            with _as_store_error():
                self._writer = self._connect()
                self._make(self._writer)
            self._file = _identity(path)
        except (StoreError, ValueError) as error:
            self._disconnect()
            if not isinstance(error, StoreError) or isinstance(error, DamagedError):
                raise
            raise ValueError(f"{path}: cannot be opened: {error}") from error
        at_fork(self._reset_after_fork, before=self._disconnect)

    @property
    def is_in_place(self) -> bool:
        """Whether the open file is still the one at its path."""
        return self._file == _identity(self._path)

    def _make(self, writer: sqlite3.Connection) -> None:
        path = self._path
        if not writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            start = secrets.randbits(48)  # not 0: numbers of a removed store must not repeat
            totals = f"INSERT INTO totals VALUES ('{secrets.token_hex(8)}', {start}, 0, 0);"
            writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {totals} COMMIT;")
        (ours,), (found,) = (writer.execute(f"PRAGMA {what}").fetchone() for what in ("application_id", "user_version"))
        if ours != _OURS:
            raise ValueError(f"{path}: a database of another application: name another folder")
        if found != FORMAT:
            raise ValueError(
                f"{path}: written in format {found}, this version of llmcache reads {FORMAT}: name another folder, or "
                "use the version that wrote it"
            )
        if writer.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise ValueError(f"{path}: this file system has no write-ahead log for SQLite: name a local folder")
        if (folder := writer.execute("SELECT folder FROM totals").fetchone()) is None:
            raise DamagedError("its totals are gone")
        (self._folder,) = folder

    # -- reading -------------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], with_bodies: bool) -> dict[bytes, Held]:
        """Return the locations of valid values by key; `with_bodies` reads the small values too."""
        body = "(SELECT body FROM bodies WHERE bodies.id = held.id)" if with_bodies else "NULL"
        found: dict[bytes, Held] = {}
        for begin in range(0, len(keys), _AT_ONCE):
            asked = keys[begin : begin + _AT_ONCE]
            marks = ",".join("?" * len(asked))
            rows = self._read(f"SELECT key, file, nbytes, {body} FROM {_VALID} WHERE key IN ({marks})", asked)
            found |= {key: Held(*row) for key, *row in rows if row[0] is None or _checked(row[0])}
        return found

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that keys were used, the first most recently. The notes are written with the next transaction."""
        with self._reading:
            for key in reversed(keys):
                self._used.pop(key, None)
                self._used[key] = None
            while len(self._used) > _MOST_USES:
                del self._used[next(iter(self._used))]

    def number(self, namespace: str) -> int:
        own = "(SELECT number FROM namespaces WHERE name = ?)"
        return int(self._read(f"SELECT number + coalesce({own}, 0) FROM totals", [namespace])[0][0])

    def totals(self) -> tuple[int, int]:
        """Return the number of values and their size in bytes."""
        ((n_values, nbytes),) = self._read("SELECT n_values, nbytes FROM totals")
        return n_values, nbytes

    def purges(self, since: str | None) -> Purges:
        folder, _, number = (since or "").partition(":")
        is_known = folder == self._folder and number.isdigit()
        asked = int(number) if is_known else 1 << 62
        # One statement, so one consistent snapshot: the purges, then a last row with the smallest and the largest id.
        *rows, (_, first, last) = self._read(
            "SELECT id, namespace, names FROM purges WHERE id > ? UNION ALL "
            "SELECT 1 << 62, (SELECT coalesce(min(id), 1) FROM purges), "
            "coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'purges'), 0) ORDER BY 1",
            [asked],
        )
        cursor = f"{self._folder}:{last}"
        if not is_known or not int(first) - 1 <= asked <= int(last):
            return Purges((), cursor, is_complete=since is None)
        return Purges([Purge(namespace, tuple(json.loads(names))) for _, namespace, names in rows], cursor)

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator["Changes"]:
        """Open a write transaction, rolled back if the block raises. No other process can write meanwhile."""
        with self._writing, _as_store_error():
            writer = self._writer = self._writer or self._connect()
            writer.execute("BEGIN IMMEDIATE")
            try:
                with self._reading:
                    used, self._used = self._used, {}
                changes = Changes(writer)
                changes.use(used)
                yield changes
                writer.execute("COMMIT")
            except BaseException:
                if writer.in_transaction:  # SQLite itself rolls back when the disk is full
                    writer.execute("ROLLBACK")
                raise

    def truncate_log(self) -> None:
        """Truncate the write-ahead log, so that it holds no removed values, unless a reader still uses it."""
        with self._writing, _as_store_error():
            self._writer = self._writer or self._connect()
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._reading, self._writing:
            self._is_closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        """Close both connections, also before a fork: a child would take SQLite's file locks for its own."""
        for connection in self._reader, self._writer:
            if connection is not None:
                connection.close()
        self._reader = self._writer = None

    def _reset_after_fork(self) -> None:
        """Disable the store in a forked child if connections were still open at the fork."""
        if self._reader is not None or self._writer is not None:
            _parents.append((self._reader, self._writer))
            self._reader, self._writer, self._is_lost = None, None, True

    def _connect(self) -> sqlite3.Connection:
        if self._is_closed or self._is_lost:
            raise StoreError(f"{self._path}: {'closed' if self._is_closed else 'in use while the process was forked'}")
        if self._file is not None and not self.is_in_place:
            raise StoreError(f"{self._path}: removed or replaced")
        connection = sqlite3.connect(self._path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = ON")  # purged values must not remain in the file
        except BaseException:
            connection.close()
            raise
        return connection

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._reading, _as_store_error():
            self._reader = self._reader or self._connect()
            return self._reader.execute(query, values).fetchall()


class Changes:
    """The changes of one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._do = connection.execute
        self._tick = self._one("SELECT coalesce(max(used), 0) FROM held")

    def use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._tick += 1
            self._do("UPDATE held SET used = ? WHERE key = ?", (self._tick, key))

    def put(self, put: Put, file: str | None) -> bool:
        """Add a value, in `file` or in the database; return False if it is outdated or the key has a value."""
        self._do("INSERT OR IGNORE INTO namespaces (name, number) VALUES (?, 0)", (put.key.namespace,))
        asked = "SELECT id, number + (SELECT number FROM totals) FROM namespaces WHERE name = ?"
        namespace, number = self._do(asked, (put.key.namespace,)).fetchone()
        if put.number != number or self._is_forgotten(put):
            return False
        added = self._do(
            "INSERT OR IGNORE INTO held (key, namespace, number, nbytes, file, used) VALUES (?, ?, ?, ?, ?, ?)",
            (put.key.digest, namespace, number, len(put.value), file, self._tick),
        )
        if added.rowcount and file is None:
            self._do("INSERT INTO bodies VALUES (?, ?)", (added.lastrowid, put.value))
        return bool(added.rowcount)

    def evict(self, max_bytes: int) -> list[str | None]:
        """Evict the least recently used values down to a budget in bytes; return the file of each, or None."""
        gone: list[str | None] = []
        oldest = "id = (SELECT id FROM held ORDER BY used LIMIT 1)"
        while self._one("SELECT nbytes FROM totals") > max_bytes and (removed := self._remove(oldest)):
            gone += removed
        return gone

    def renew(self, namespace: str | None) -> int:
        """Change the number of a namespace, or of all (None); return how many values become unreachable."""
        before = self._one(f"SELECT count(*) FROM {_VALID}")
        if namespace is None:
            self._do("UPDATE totals SET number = number + 1")
        else:
            self._renumber(namespace)
        self._record_purge(namespace, ())
        return before - self._one(f"SELECT count(*) FROM {_VALID}")

    def drop(self) -> list[str | None]:
        """Remove all unreachable values and rows that are damaged; return the file of each, or None."""
        is_damaged = "length(file) <> 32 OR file GLOB '*[^0-9a-f]*'"
        return self._remove(f"id NOT IN (SELECT held.id FROM {_VALID}) OR {is_damaged}")

    def forget(self, keys: Sequence[bytes], namespace: str, names: Sequence[str]) -> list[str | None]:
        """Remove values by key and record the purge; return the file of each, or None."""
        self._renumber(forgets_of(namespace))
        self._record_purge(namespace, names)
        return [file for key in keys for file in self._remove("key = ?", key)]

    def remove_lost(self, lost: Iterable[tuple[bytes, str | None]]) -> list[str | None]:
        """Remove values by key and file; return the files. A value stored again since has another file, so it stays."""
        return [file for one in lost for file in self._remove("key = ? AND file = ?", *one)]

    def files(self) -> set[str]:
        return {name for (file,) in self._do("SELECT file FROM held") if (name := _checked(file)) is not None}

    def _remove(self, which: str, *values: Any) -> list[str | None]:
        gone = self._do(f"DELETE FROM held WHERE {which} RETURNING file", values).fetchall()
        return [_checked(file) for (file,) in gone]

    def _is_forgotten(self, put: Put) -> bool:
        """Whether a value was forgotten since its cursor, or may have been."""
        folder, _, since = put.since.partition(":")
        asked = int(since) if since.isdigit() else -1
        ours, first = self._do("SELECT folder, (SELECT coalesce(min(id), 1) FROM purges) FROM totals").fetchone()
        if folder != ours or asked < first - 1:
            return True
        later = "SELECT 1 FROM purges WHERE id > ? AND instr(names, ?)"
        return self._do(later, (asked, json.dumps(put.key.name))).fetchone() is not None

    def _renumber(self, namespace: str) -> None:
        again = "ON CONFLICT (name) DO UPDATE SET number = number + 1"
        self._do(f"INSERT INTO namespaces (name, number) VALUES (?, 1) {again}", (namespace,))

    def _record_purge(self, namespace: str | None, names: Sequence[str]) -> None:
        added = self._do("INSERT INTO purges (namespace, names) VALUES (?, ?)", (namespace, json.dumps(names)))
        self._do("DELETE FROM purges WHERE id <= ?", ((added.lastrowid or 0) - _MOST_PURGES,))

    def _one(self, query: str) -> int:
        return int(self._do(query).fetchone()[0])


@contextmanager
def _as_store_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:  # also raised on a closed connection
        code = getattr(error, "sqlite_errorcode", None) or 0  # extended code: its last byte is the primary code
        is_damaged = code & 0xFF in _DAMAGED or str(error).startswith(_GONE)
        raise (DamagedError if is_damaged else StoreError)(f"the store's index: {error}") from error


def _checked(file: Any) -> str | None:
    """Return the file of a row; None if its name is not ours, so that nothing else is ever read or removed."""
    return file if isinstance(file, str) and FILE.fullmatch(file) else None


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, which differ after it is replaced; None if there is no file."""
    with suppress(OSError):
        return (about := path.stat()).st_dev, about.st_ino
    return None
