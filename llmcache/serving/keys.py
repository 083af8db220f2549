"""Who makes a request, and what it may do. Keys are in a file, which is read again when it changes.

The file is YAML: a list of

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
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Final, Literal, Self

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmcache.errors import ConfigError
from llmcache.yaml_file import parse_yaml

logger = logging.getLogger("llmcache")

Scope = Literal["infer", "admin"]

#: The namespace that everybody may read. Who writes it answers all, so only keys of it with the scope `admin` may.
PUBLIC: Final = "public"

_MARK = "llmcache_"  # by which a key that was published by mistake is found
_MOST_BYTES = 1_000_000
_PATIENCE_S = 10.0  # a change of the file takes milliseconds
_LOOK_EVERY_S = 1.0
_NAME = r"^[A-Za-z0-9._-]{1,64}$"  # logs and metrics hold it
_WANTED: Final = {
    "name": "1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-', in quotes if it looks like a number",
    "hash": "64 hexadecimal digits, the SHA-256 of the key: `llmcache keys add` writes them",
    "namespace": "a name of the same kind: every key has one, nothing is served in a namespace that nobody chose",
    "scopes": "a list of `infer`, `admin` or both",
    "max_concurrent": "a whole number from 1",
}


class Tenant(BaseModel):
    """The holder of a key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=_NAME)]  # of the key, for logs and metrics; never the key itself
    namespace: Annotated[str, Field(pattern=_NAME)]  # in which requests are stored and found; none says otherwise
    scopes: Annotated[list[Scope], Field(min_length=1)]
    max_concurrent: Annotated[int | None, Field(ge=1)] = None  # requests under way at once; None: as the server


#: Whoever reaches a server without keys, which listens on this machine alone unless the operator says otherwise.
ANYONE: Final = Tenant(name="anyone", namespace="default", scopes=["infer", "admin"])


class KeyEntry(Tenant):
    """One key of the file."""

    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _check_public(self) -> Self:
        if self.namespace == PUBLIC and "admin" not in self.scopes:
            raise ConfigError(f"namespace {PUBLIC!r} is read by all: it is written with the scope `admin` only")
        return self


def read_keys(path: Path) -> list[KeyEntry]:
    """Read a file of keys. No error quotes a hash: it may be a key that was put in its place."""
    with path.open("rb") as file:
        _check_owner(path, os.fstat(file.fileno()))
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: more than {_MOST_BYTES:,} bytes: too large for a file of keys")
    try:
        found = parse_yaml(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: save it in that encoding") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path}: expected a list of keys, found {type(found).__name__}; `[]` is a list without any")
    return _checked(path, found)


def add_key(path: Path, name: str, namespace: str, scopes: Sequence[Scope], max_concurrent: int | None = None) -> str:
    """Make a key, write its hash to the file, which is made if there is none, and return the key."""
    key = _MARK + secrets.token_urlsafe(32)
    added = {
        "name": name,
        "hash": _hash(key.encode()),
        "namespace": namespace,
        "scopes": list(scopes),
        "max_concurrent": max_concurrent,
    }
    with _changing(path):
        entries = read_keys(path) if path.exists() else []
        _write(path, _checked(path, [*(entry.model_dump() for entry in entries), added]))
    return key


def remove_key(path: Path, name: str) -> None:
    """Take a key out of the file."""
    with _changing(path):
        entries = read_keys(path)
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            known = ", ".join(entry.name for entry in entries) or "none"
            raise ConfigError(f"{path}: no key is named {name!r}; there are: {known}")
        _write(path, kept)


class Keys:
    """The keys of a file as it is now, looked at once a second. For one event loop.

    A file that cannot be used any more leaves the keys as they were: that is counted, and logged once.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; errors are those of `read_keys`."""
        self.path = path
        self.n_failures = 0
        self._is_failing = False
        self._looked_at = monotonic()
        self._seen = _state(path)
        self._known = read_keys(path)
        self._warn()

    def find(self, key: bytes) -> Tenant | None:
        """Return the holder of a key; None: there is none. Takes as long for every key."""
        if monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self.look()
        given, found = _hash(key), None
        for known in self._known:  # to the end: when it is found tells which one it is
            if hmac.compare_digest(known.hash, given):
                found = known
        return found

    def look(self) -> None:
        """Read the file again, if it has changed or could not be used when it was last looked at."""
        self._looked_at = monotonic()
        try:
            seen = _state(self.path)
            if seen == self._seen and not self._is_failing:
                return
            known = read_keys(self.path)
        except Exception as error:  # whatever it is, the server goes on with the keys it has
            self.n_failures += 1
            if not self._is_failing:
                # Of other errors only the kind: their text may quote the file.
                told = error if isinstance(error, ConfigError | OSError) else type(error).__name__
                logger.error("the keys stay as they were, %d of them: %s", len(self._known), told)
            self._is_failing = True
            return
        self._seen, self._known, self._is_failing = seen, known, False
        logger.info("%s: read again, %d keys", self.path, len(known))
        self._warn()

    def _warn(self) -> None:
        if not self._known:
            logger.warning("%s: there is no key, so every request is refused: llmcache keys add", self.path)
        with suppress(OSError):
            if os.name != "nt" and self.path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                logger.warning(
                    "%s: other users may read it. They learn names and namespaces, not keys. To keep those: chmod 600",
                    self.path,
                )


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    """Return numbers that change with a file."""
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


def _checked(path: Path, found: Sequence[Any]) -> list[KeyEntry]:
    """Check each entry, and that no two have the same name or key."""
    entries = [_entry(path, number, one) for number, one in enumerate(found)]
    for field in ("name", "hash"):
        seen: set[str] = set()
        for entry in entries:
            if getattr(entry, field) in seen:
                raise ConfigError(f"{path}: key {entry.name!r}: another key has the same {field}")
            seen.add(getattr(entry, field))
    return entries


def _entry(path: Path, number: int, given: Any) -> KeyEntry:
    """Check an entry of the file; errors name it, and quote nothing that may be a key."""
    try:
        return KeyEntry.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)
        fields = [str(one["loc"][0]) if one["loc"] else "" for one in wrong]
        kind, field = wrong[0]["type"], fields[0]
        if kind == "value_error":
            told = str(wrong[0]["ctx"]["error"])
        elif field in _WANTED:
            told = f"{field} {'is missing' if kind == 'missing' else 'is wrong'}: give {_WANTED[field]}"
        else:
            told = f"expected a mapping of {', '.join(_WANTED)}, and no other field"
        named = given.get("name") if isinstance(given, dict) and "name" not in fields else None
        name = f"key {named!r}" if isinstance(named, str) else f"entry {number + 1}"
        raise ConfigError(f"{path}: {name}: {told}") from None


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Within: no other process changes the file by this program."""
    target = path.resolve()
    try:
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=_PATIENCE_S):
            yield
    except Timeout as error:
        raise ConfigError(f"{path}: another change of it has not ended for {_PATIENCE_S:.0f} s") from error


def _write(path: Path, entries: Sequence[KeyEntry]) -> None:
    """Put a new file in the place of the old one, or leave that whole. Only its owner may read it."""
    target = path.resolve()  # a link stays one
    number, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yaml.safe_dump([entry.model_dump(exclude_none=True) for entry in entries], file, sort_keys=False)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() and os.name != "nt":  # root adds keys to the file of a server that is another user
            before = target.stat()
            os.chown(draft, before.st_uid, before.st_gid)
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
