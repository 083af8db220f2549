"""The index of a store on disk: an SQLite database, so that a process that is killed at any moment leaves it whole.

    held        a row a value: the key's digest, namespace, number, file if it has one, when it was used last
    bodies      values of up to 32 KiB, which would waste files of their own
    namespaces  the number of each; beside `totals.number`, which counts for all of them
    purges      the latest ones

In WAL mode, readers and a writer do not wait for each other, in whatever processes they are. What was committed
survives a process; of a machine that loses power, the latest commits may be lost, never part of one.
"""

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from llmcache.errors import StoreError
from llmcache.stores.base import FORMAT, Purge, Purges, Put
from llmcache.threads import at_fork, forkable

_OURS = int.from_bytes(b"LLMC")  # by which a database of ours is known
_PATIENCE_S = 10.0  # for another process that writes
_MOST_PURGES = 1_000
_MOST_USES = 65_536  # noted until the next write
_AT_ONCE = 500  # keys a query
#: What SQLite says of a file that is none of its own, or damaged; and of tables that are gone.
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_GONE = ("no such table", "no such column")
#: Connections that could not be closed before a fork, in the child: closing them there would not be safe.
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
#: Rows that may be returned; others have a number that is gone.
_VALID = """held JOIN namespaces ON namespaces.id = held.namespace
    AND held.number = namespaces.number + (SELECT number FROM totals)"""


class DamagedError(StoreError):
    """The file is no database, or damaged."""


class Held(NamedTuple):
    """The place of a value: a file, or the index itself."""

    file: str | None
    nbytes: int
    body: bytes | None


class DiskIndex:
    """Rows of one database. Thread-safe: one connection reads, one writes."""

    def __init__(self, path: Path) -> None:
        """Open a database, and make it where there is none.

        Raises:
            ValueError: It is another application's, or of another version, or cannot be opened.
            DamagedError: It is no database, or damaged.
        """
        self._path = path
        self._reading, self._writing = forkable(threading.Lock()), forkable(threading.Lock())
        self._used: dict[bytes, None] = {}  # keys, the one used last at the end
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # which the connections are of
        self._is_lost = self._is_closed = False
        try:
            with _as_store_error():
                self._writer = self._connect()
                self._make(self._writer)
            self._file = _identity(path)
        except (StoreError, ValueError) as error:
            self._disconnect()
            if not isinstance(error, StoreError) or isinstance(error, DamagedError):
                raise
            raise ValueError(f"{path}: cannot be opened: {error}") from error
        at_fork(self._begin_anew, before=self._disconnect)

    @property
    def is_in_place(self) -> bool:
        """Whether the database is the one that other processes find under its name."""
        return self._file == _identity(self._path)

    def _make(self, writer: sqlite3.Connection) -> None:
        path = self._path
        if not writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            start = secrets.randbits(48)  # not 0: numbers of a store that was removed must not come again
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
        """Return the places of valid values, by key."""
        body = "(SELECT body FROM bodies WHERE bodies.id = held.id)" if with_bodies else "NULL"
        found: dict[bytes, Held] = {}
        for begin in range(0, len(keys), _AT_ONCE):
            asked = keys[begin : begin + _AT_ONCE]
            marks = ",".join("?" * len(asked))
            rows = self._read(f"SELECT key, file, nbytes, {body} FROM {_VALID} WHERE key IN ({marks})", asked)
            found |= {key: Held(*row) for key, *row in rows}
        return found

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that keys were used, the first of them last. It is written with the next values."""
        with self._reading:
            for key in reversed(keys):
                self._used.pop(key, None)
                self._used[key] = None
            while len(self._used) > _MOST_USES:
                del self._used[next(iter(self._used))]

    def number(self, namespace: str) -> int:
        """The number of a namespace."""
        own = "(SELECT number FROM namespaces WHERE name = ?)"
        return int(self._read(f"SELECT number + coalesce({own}, 0) FROM totals", [namespace])[0][0])

    def totals(self) -> tuple[int, int]:
        """Values and their bytes."""
        ((n_values, nbytes),) = self._read("SELECT n_values, nbytes FROM totals")
        return n_values, nbytes

    def purges(self, since: str | None) -> Purges:
        """See `Store.purges`."""
        folder, _, number = (since or "").partition(":")
        is_known = folder == self._folder and number.isdigit()
        asked = int(number) if is_known else 1 << 62
        # In one statement, which is one moment: what is found, and after it the least and the largest number.
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
        """Within: one transaction, which is undone if something is raised. Nobody else writes meanwhile."""
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
                if writer.in_transaction:  # of a full disk SQLite has undone it by itself
                    writer.execute("ROLLBACK")
                raise

    def truncate_log(self) -> None:
        """Have nothing of what was removed stay in the write-ahead log, if no reader holds it up."""
        with self._writing, _as_store_error():
            self._writer = self._writer or self._connect()
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close both connections for good."""
        with self._reading, self._writing:
            self._is_closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        """Close both connections; they are opened anew when they are needed.

        Before a fork: SQLite notes in the memory of a process which locks it holds on a file, and a child would take
        these for its own.
        """
        for connection in self._reader, self._writer:
            if connection is not None:
                connection.close()
        self._reader = self._writer = None

    def _begin_anew(self) -> None:
        """In a forked process: where the connections could not be closed before, it has no store."""
        if self._reader is not None or self._writer is not None:
            _parents.append((self._reader, self._writer))
            self._reader, self._writer, self._is_lost = None, None, True

    def _connect(self) -> sqlite3.Connection:
        if self._is_closed or self._is_lost:
            raise StoreError(f"{self._path}: {'closed' if self._is_closed else 'in use while the process was forked'}")
        if self._file is not None and not self.is_in_place:
            raise StoreError(f"{self._path}: removed or replaced")
        made = sqlite3.connect(self._path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        made.execute("PRAGMA synchronous = NORMAL")
        made.execute("PRAGMA secure_delete = ON")  # what was purged is not to be read from the file
        return made

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
        """Keys were used one after the other."""
        for key in keys:
            self._tick += 1
            self._do("UPDATE held SET used = ? WHERE key = ?", (self._tick, key))

    def put(self, put: Put, file: str | None) -> bool:
        """Add a value that lies in a file, or else here; False if its number is gone, or it is held."""
        self._do("INSERT OR IGNORE INTO namespaces (name, number) VALUES (?, 0)", (put.key.namespace,))
        asked = "SELECT id, number + (SELECT number FROM totals) FROM namespaces WHERE name = ?"
        namespace, number = self._do(asked, (put.key.namespace,)).fetchone()
        if put.number != number:
            return False
        added = self._do(
            "INSERT OR IGNORE INTO held (key, namespace, number, nbytes, file, used) VALUES (?, ?, ?, ?, ?, ?)",
            (put.key.digest, namespace, number, len(put.value), file, self._tick),
        )
        if added.rowcount and file is None:
            self._do("INSERT INTO bodies VALUES (?, ?)", (added.lastrowid, put.value))
        return bool(added.rowcount)

    def evict(self, max_bytes: int) -> list[str | None]:
        """Remove what was used longest ago until the rest is within a budget; the file of each, if it has one."""
        gone: list[str | None] = []
        while self._one("SELECT nbytes FROM totals") > max_bytes:
            gone += self._remove("id = (SELECT id FROM held ORDER BY used LIMIT 1)")
        return gone

    def renew(self, namespace: str | None) -> int:
        """Give a namespace, or all, another number; how many values that makes unreachable."""
        before = self._one(f"SELECT count(*) FROM {_VALID}")
        if namespace is None:
            self._do("UPDATE totals SET number = number + 1")
        else:
            again = "ON CONFLICT (name) DO UPDATE SET number = number + 1"
            self._do(f"INSERT INTO namespaces (name, number) VALUES (?, 1) {again}", (namespace,))
        self._tell(namespace, ())
        return before - self._one(f"SELECT count(*) FROM {_VALID}")

    def drop(self) -> list[str | None]:
        """Remove all that is unreachable; the file of each, if it has one."""
        return self._remove(f"id NOT IN (SELECT held.id FROM {_VALID})")

    def forget(self, keys: Sequence[bytes], namespace: str, names: Sequence[str]) -> list[str | None]:
        """Remove values by key, and tell of it; the file of each, if it has one."""
        self._tell(namespace, names)
        return [file for key in keys for file in self._remove("key = ?", key)]

    def lose(self, lost: Iterable[tuple[bytes, str | None]]) -> list[str | None]:
        """Remove values by key and file, and return the files; one that was put anew since has another file."""
        return [file for one in lost for file in self._remove("key = ? AND file = ?", *one)]

    def files(self) -> set[str]:
        """All files that have a row."""
        return {file for (file,) in self._do("SELECT file FROM held WHERE file IS NOT NULL")}

    def _remove(self, which: str, *values: Any) -> list[str | None]:
        return [file for (file,) in self._do(f"DELETE FROM held WHERE {which} RETURNING file", values).fetchall()]

    def _tell(self, namespace: str | None, names: Sequence[str]) -> None:
        told = self._do("INSERT INTO purges (namespace, names) VALUES (?, ?)", (namespace, json.dumps(names)))
        self._do("DELETE FROM purges WHERE id <= ?", ((told.lastrowid or 0) - _MOST_PURGES,))

    def _one(self, query: str) -> int:
        return int(self._do(query).fetchone()[0])


@contextmanager
def _as_store_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:  # also of a connection that was closed
        code = getattr(error, "sqlite_errorcode", None) or 0  # an extended one: its last byte is the kind
        is_damaged = code & 0xFF in _DAMAGED or str(error).startswith(_GONE)
        raise (DamagedError if is_damaged else StoreError)(f"the store's index: {error}") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, which tell a file from another one of its name; None where there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
