"""API keys: each identifies a tenant and what it may do. They are in a file, which is read again when it changes.

The file is YAML: a list of

    - name: search              # for logs and metrics; never the key
      hash: 5e884898da28...     # SHA-256 of the key, in hexadecimal digits
      namespace: search         # where its requests are stored and looked up
      scopes: [infer]           # `metrics`: see metrics and the page; `admin`: also purge, disable and drain
      max_concurrent: 8         # limit of concurrent requests; optional

A key has 256 random bits, so a plain hash is enough. Salts and slow hashes protect secrets that can be guessed, such as
passwords; a slow hash would take longer than a hit.
"""

import hashlib
import hmac
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmcache.errors import ConfigError
from llmcache.serving.refusals import Refusal
from llmcache.support.yaml_file import parse_yaml

logger = logging.getLogger("llmcache")

Scope = Literal["infer", "metrics", "admin"]

#: Namespace that all keys read. Its entries answer every tenant, so only keys of it with the scope `admin` write it.
PUBLIC: Final = "public"

_KEY_PREFIX = "llmcache_"  # lets secret scanners find keys published by mistake
_MAX_BYTES = 1_000_000
_LOCK_TIMEOUT_S = 10.0  # changing the file takes milliseconds
_NAME = r"^[A-Za-z0-9._-]{1,64}$"  # safe in logs and metrics
_EXPECTED: Final = {
    "name": "1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-', in quotes if it looks like a number",
    "hash": "64 hexadecimal digits, the SHA-256 of the key: `llmcache keys add` writes them",
    "namespace": "1 to 64 of the same characters; every key needs one, as there is no default namespace",
    "scopes": "a list of `infer`, `metrics` and `admin`, or some of them",
    "max_concurrent": "a whole number from 1",
}


class Tenant(BaseModel):
    """Holder of a key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=_NAME)]  # name of the key, for logs and metrics; never the key itself
    namespace: Annotated[str, Field(pattern=_NAME)]  # of all its requests; they cannot choose another
    scopes: Annotated[list[Scope], Field(min_length=1)]
    max_concurrent: Annotated[int | None, Field(ge=1)] = None  # concurrent requests; None: the server's limit

    def may(self, scope: Scope) -> bool:
        """Whether a request that needs this scope is allowed; `admin` includes `metrics`."""
        return scope in self.scopes or (scope == "metrics" and "admin" in self.scopes)


#: Every client of a server without keys. By default such a server listens on the loopback address only.
ANYONE: Final = Tenant(name="anyone", namespace="default", scopes=["infer", "admin"])


class KeyEntry(Tenant):
    """One entry of the key file."""

    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _check_public(self) -> Self:
        if self.namespace == PUBLIC and "admin" not in self.scopes:
            raise ConfigError(f"namespace {PUBLIC!r} is read by all: it is written with the scope `admin` only")
        return self


def read_keys(path: Path) -> list[KeyEntry]:
    """Return the entries of a key file; `ConfigError` if its content is invalid, or if other users may write it.

    Errors never quote a hash: it may be a key entered by mistake.
    """
    with path.open("rb") as file:
        _check_owner(path, os.fstat(file.fileno()))
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: more than {_MAX_BYTES:,} bytes: too large for a key file")
    try:
        found = parse_yaml(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: save it in that encoding") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path}: expected a list of keys, found {type(found).__name__}; `[]` is an empty list")
    return _checked(path, found)


def add_key(path: Path, name: str, namespace: str, scopes: Sequence[Scope], max_concurrent: int | None = None) -> str:
    """Return a new key, whose hash is written to the file; the file is created if needed."""
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    added = {"name": name, "hash": _hash(key.encode()), "namespace": namespace, "scopes": list(scopes)}
    with _locked(path):
        entries = read_keys(path) if path.exists() else []
        added_last = [*(entry.model_dump() for entry in entries), added | {"max_concurrent": max_concurrent}]
        _write(path, _checked(path, added_last))
    return key


def remove_key(path: Path, name: str) -> None:
    with _locked(path):
        entries = read_keys(path)
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            known = ", ".join(entry.name for entry in entries) or "none"
            raise ConfigError(f"{path}: no key is named {name!r}; there are: {known}")
        _write(path, kept)


class Keys:
    """Keys of a file, which `look` checks for changes.

    If the file becomes unreadable or invalid, the previous keys stay valid; failures are counted, and logged once.
    """

    def __init__(self, path: Path, count_failure: Callable[[], None]) -> None:
        """Read the file; errors are those of `read_keys`. Later failures call `count_failure`."""
        self.path = path
        self._count_failure = count_failure
        self._is_failing = False
        self._seen: tuple[int, ...] | None = _file_state(path)
        self._known = {known.hash: known for known in read_keys(path)}
        self._log_warnings()

    @property
    def namespaces(self) -> set[str]:
        """Namespaces of all keys, and the one that all of them read."""
        return {PUBLIC, *(known.namespace for known in self._known.values())}

    def check(self, tenant: KeyEntry) -> None:
        """Raise `Refusal` if a tenant's key was removed since `find` returned it, or may no longer be used as it is."""
        known = self._known.get(tenant.hash)
        if known is None or known.namespace != tenant.namespace or not set(tenant.scopes) <= set(known.scopes):
            raise Refusal("unauthorised", "this key is no longer valid here")

    def find(self, key: bytes) -> KeyEntry | None:
        """Return the holder of a key, or None if it is unknown. The time taken does not depend on the key."""
        given, found = _hash(key), None
        for known in self._known.values():  # no early exit: its time would reveal which key matched
            if hmac.compare_digest(known.hash, given):
                found = known
        return found

    def look(self) -> None:
        """Read the file again if it has changed or could not be read."""
        try:
            before, self._seen = self._seen, _file_state(self.path)  # invalid content is parsed once
            if self._seen == before:
                if self._is_failing:
                    self._count_failure()
                return
            known = {known.hash: known for known in read_keys(self.path)}
        except Exception as error:  # of any kind: the server keeps its current keys
            if isinstance(error, OSError):
                self._seen = None
            self._count_failure()
            if not self._is_failing:
                # Only the type of other errors: their text may quote the file.
                reason = error if isinstance(error, ConfigError | OSError) else type(error).__name__
                logger.error("the key file cannot be used, its %d old keys stay valid: %s", len(self._known), reason)
            self._is_failing = True
            return
        self._known, self._is_failing = known, False
        logger.info("%s: read again, %d keys", self.path, len(known))
        self._log_warnings()

    def _log_warnings(self) -> None:
        if not self._known:
            logger.warning("%s: it has no keys, so every request is refused; add one with llmcache keys add", self.path)
        with suppress(OSError):
            if os.name != "nt" and self.path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                text = "%s: other users may read it. It reveals names and namespaces, not keys. To hide them: chmod 600"
                logger.warning(text, self.path)


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _file_state(path: Path) -> tuple[int, ...]:
    """Return identity, size, times and mode of a file, to detect changes."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raise `ConfigError` for a file to which other users could add keys, as sshd does for `authorized_keys`."""
    if os.name == "nt":
        return
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path}: other users may write it, and could add their own keys: chmod 600 it")
    if os.geteuid() not in (0, found.st_uid) and found.st_uid != 0:
        raise ConfigError(f"{path}: it belongs to another user, who could add keys: chown it")


def _checked(path: Path, found: Sequence[Any]) -> list[KeyEntry]:
    """Return validated entries; names and hashes must be unique."""
    entries = [_entry(path, number, one) for number, one in enumerate(found)]
    for field in ("name", "hash"):
        seen: set[str] = set()
        for entry in entries:
            if getattr(entry, field) in seen:
                raise ConfigError(f"{path}: key {entry.name!r}: another key has the same {field}")
            seen.add(getattr(entry, field))
    return entries


def _entry(path: Path, number: int, given: Any) -> KeyEntry:
    """Return a validated entry. Errors name the entry, and quote no value that may be a key."""
    try:
        return KeyEntry.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)
        fields = [str(one["loc"][0]) if one["loc"] else "" for one in wrong]
        kind, field = wrong[0]["type"], fields[0]
        if kind == "value_error":
            reason = str(wrong[0]["ctx"]["error"])
        elif field in _EXPECTED:
            reason = f"{field} {'is missing' if kind == 'missing' else 'is wrong'}: give {_EXPECTED[field]}"
        else:
            reason = f"expected a mapping of {', '.join(_EXPECTED)}, and no other field"
        named = given.get("name") if isinstance(given, dict) and "name" not in fields else None
        name = f"key {named!r}" if isinstance(named, str) else f"entry {number + 1}"
        raise ConfigError(f"{path}: {name}: {reason}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file against changes by other llmcache processes."""
    target = path.resolve()
    try:
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=_LOCK_TIMEOUT_S):
            yield
    except Timeout as error:
        raise ConfigError(f"{path}: locked by another change for {_LOCK_TIMEOUT_S:.0f} s") from error


def _write(path: Path, entries: Sequence[KeyEntry]) -> None:
    """Replace the file atomically. Only its owner may read the new file."""
    target = path.resolve()  # keep a symbolic link
    number, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yaml.safe_dump([entry.model_dump(exclude_none=True) for entry in entries], file, sort_keys=False)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() and os.name != "nt":  # root may add keys for a server that runs as another user
            before = target.stat()
            os.chown(draft, before.st_uid, before.st_gid)
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
