"""Keys of the server: a file that says who may use it, and is read again when it changes.

The file is YAML, or JSON where its name ends so: a list of

    - name: search              # for logs and metrics; never the key
      hash: 5e884898da28...     # SHA-256 of the key, in hexadecimal digits
      namespace: search         # in which its requests are stored and found
      scopes: [infer]           # and `admin` for metrics, the page, purging and draining
      max_concurrent: 8         # requests under way at once; may be left out

A key is 256 random bits, which is why a plain hash is enough. Salts and slow hashes protect what can be guessed, as
passwords can; this cannot, and a slow hash would take longer than a hit does.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Self

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmcache.errors import ConfigError
from llmcache.serving.tenants import PUBLIC, Scope, Tenant
from llmcache.yaml_file import parse_yaml

logger = logging.getLogger("llmcache")

_MARK = "llmcache_"  # by which a key that was published by mistake is found
_MOST_BYTES = 1_000_000
_PATIENCE_S = 10.0  # a change of the file takes milliseconds
_NAME = r"^[A-Za-z0-9._-]{1,64}$"  # logs and metrics hold it

_WANTED: Final = {
    "name": "1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-', in quotes if it looks like a number",
    "hash": "64 hexadecimal digits, the SHA-256 of the key: `llmcache keys add` writes them",
    "namespace": "a name of the same kind: every key has one, nothing is served in a namespace that nobody chose",
    "scopes": "a list of `infer`, `admin` or both",
    "max_concurrent": "a whole number from 1",
}


class KeyEntry(BaseModel):
    """One key of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=_NAME)]
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    namespace: Annotated[str, Field(pattern=_NAME)]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    max_concurrent: Annotated[int | None, Field(ge=1)] = None

    @model_validator(mode="after")
    def _check_public(self) -> Self:
        if self.namespace == PUBLIC and "admin" not in self.scopes:
            raise ConfigError(f"namespace {PUBLIC!r} is read by all: it is written with the scope `admin` only")
        return self

    @property
    def tenant(self) -> Tenant:
        """Its holder."""
        return Tenant(self.name, self.namespace, frozenset(self.scopes), self.max_concurrent)


def read_keys(path: Path) -> list[KeyEntry]:
    """Read a file of keys. No error quotes a hash: it may be a key that was put in its place.

    Raises:
        ConfigError: It is no list of keys, an entry is wrong, or others than its owner may write it.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        _check_owner(path, os.fstat(file.fileno()))
        content = file.read(_MOST_BYTES + 1)
    return _parse(path, content)


def add_key(path: Path, name: str, namespace: str, scopes: Sequence[Scope], max_concurrent: int | None = None) -> str:
    """Make a key, write its hash to the file, which is made if there is none, and return it. It is nowhere else.

    Raises:
        ConfigError: The name is taken, or something given is wrong; or see `read_keys`.
    """
    key = _MARK + secrets.token_urlsafe(32)
    with _changing(path):
        entries = read_keys(path) if path.exists() else []
        given: dict[str, Any] = {
            "name": name,
            "hash": _hash(key.encode()).hex(),
            "namespace": namespace,
            "scopes": list(scopes),
        }
        if max_concurrent is not None:
            given["max_concurrent"] = max_concurrent
        _write(path, _checked(path, [*(entry.model_dump() for entry in entries), given]))
    return key


def remove_key(path: Path, name: str) -> None:
    """Take a key out of the file.

    Raises:
        ConfigError: There is no key of this name; or see `read_keys`.
    """
    with _changing(path):
        entries = read_keys(path)
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            known = ", ".join(entry.name for entry in entries) or "none"
            raise ConfigError(f"{path}: no key is named {name!r}; there are: {known}")
        _write(path, kept)


class Keys:
    """The keys of a file as it is now. Thread-safe: a change replaces one tuple, and holds from the next request on.

    Once it is followed, a thread looks whether the file has changed, so that no request waits for the disk. A file that
    cannot be used any more leaves the keys as they were: that is counted, and logged once.
    """

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: See `read_keys`.
            OSError: It cannot be read.
        """
        self.path = path
        self.n_failures = 0
        self._is_failing = False
        self._seen = _fingerprint(path)
        self._known = _by_hash(read_keys(path))
        self._closed = threading.Event()
        self._warn()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Keys that are known."""
        return len(self._known)

    def find(self, key: bytes) -> Tenant | None:
        """Who holds a key; None: nobody. Takes as long for every key."""
        given, found = _hash(key), None
        for known, tenant in self._known:  # to the end: when it is found tells which one it is
            if hmac.compare_digest(known, given):
                found = tenant
        return found

    def look(self) -> None:
        """Read the file again, if it has changed or could not be used when it was last looked at."""
        try:
            seen = _fingerprint(self.path)
            if seen == self._seen and not self._is_failing:
                return
            known = _by_hash(read_keys(self.path))
        except Exception as error:  # whatever it is, the server goes on with the keys it has
            self._failed(error)
            return
        self._seen, self._known, self._is_failing = seen, known, False
        logger.info("%s: read again, %d keys", self.path, len(known))
        self._warn()

    def follow(self, every_s: float = 1.0) -> None:
        """Look at the file every so many seconds, in a thread, until `close`; once."""
        self._thread = threading.Thread(target=self._follow, args=(every_s,), name="llmcache-keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follow the file no longer. Twice does nothing."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self, look_every_s: float) -> None:
        while not self._closed.wait(look_every_s):
            self.look()

    def _failed(self, error: Exception) -> None:
        self.n_failures += 1
        if not self._is_failing:
            # Of other errors only the kind: their text may quote the file.
            told = error if isinstance(error, ConfigError | OSError) else type(error).__name__
            logger.error("the keys stay as they were, %d of them: %s", len(self._known), told)
        self._is_failing = True

    def _warn(self) -> None:
        if not self._known:
            logger.warning("%s: there is no key, so every request is refused: llmcache keys add", self.path)
        with suppress(OSError):
            if os.name != "nt" and self.path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                logger.warning(
                    "%s: other users may read it. They learn names and namespaces, not keys. To keep those: chmod 600",
                    self.path,
                )


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _by_hash(entries: Sequence[KeyEntry]) -> tuple[tuple[bytes, Tenant], ...]:
    return tuple((bytes.fromhex(entry.hash), entry.tenant) for entry in entries)


def _fingerprint(path: Path) -> tuple[int, ...]:
    """What changes with a file."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Refuse a file into which others could write keys of their own, as sshd does with `authorized_keys`."""
    if os.name == "nt":
        return
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path}: other users may write it, and so let themselves in: chmod 600 it")
    if os.geteuid() not in (0, found.st_uid) and found.st_uid != 0:
        raise ConfigError(f"{path}: it belongs to another user, who could let anybody in: chown it")


def _parse(path: Path, content: bytes) -> list[KeyEntry]:
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: more than {_MOST_BYTES:,} bytes: too large for a file of keys")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: save it in that encoding") from error
    found = _parse_json(path, text) if path.suffix == ".json" else parse_yaml(text, str(path))
    if not isinstance(found, list):
        raise ConfigError(f"{path}: expected a list of keys, found {type(found).__name__}; `[]` is a list without any")
    return _checked(path, found)


def _checked(path: Path, found: Sequence[Any]) -> list[KeyEntry]:
    """Entries of which each is right, and no two are of one name or key."""
    entries = [_entry(str(path), number, one) for number, one in enumerate(found)]
    for field in ("name", "hash"):
        seen: set[str] = set()
        for entry in entries:
            if getattr(entry, field) in seen:
                raise ConfigError(f"{path}: key {entry.name!r}: another key has the same {field}")
            seen.add(getattr(entry, field))
    return entries


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{path}: not valid JSON{where}") from error


def _entry(path: str, number: int, given: Any) -> KeyEntry:
    """An entry of the file, checked; errors name it."""
    named = given.get("name") if isinstance(given, dict) else None
    try:
        return KeyEntry.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        told = _told(first["type"], str(first["loc"][0]) if first["loc"] else "", first.get("ctx", {}))
        # What stands in the place of a name that is wrong may be a key.
        is_name = isinstance(named, str) and "name" not in {str(one["loc"][0]) for one in error.errors() if one["loc"]}
        raise ConfigError(f"{path}: {f'key {named!r}' if is_name else f'entry {number + 1}'}: {told}") from None


def _told(kind: str, field: str, context: dict[str, Any]) -> str:
    if kind == "value_error":
        return str(context["error"])
    if not field:
        return f"expected a mapping of {', '.join(_WANTED)}"
    if kind == "extra_forbidden":
        return f"a field that is not known; known: {', '.join(_WANTED)}"
    return f"{field} {'is missing' if kind == 'missing' else 'is wrong'}: give {_WANTED[field]}"


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Within: nobody else changes the file by this program."""
    target = path.resolve()
    try:
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=_PATIENCE_S):
            yield
    except Timeout as error:
        raise ConfigError(f"{path}: another change of it has not ended for {_PATIENCE_S:.0f} s") from error


def _write(path: Path, entries: Sequence[KeyEntry]) -> None:
    """Put a new file in the place of the old one, or leave that whole. Only its owner may read it."""
    rows = [entry.model_dump(exclude_none=True) for entry in entries]
    is_json = path.suffix == ".json"
    text = json.dumps(rows, indent=2) + "\n" if is_json else yaml.safe_dump(rows, sort_keys=False)
    target = path.resolve()  # a link stays one
    number, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() and os.name != "nt":  # root adds keys to the file of a server that is another user
            before = target.stat()
            os.chown(draft, before.st_uid, before.st_gid)
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
