"""How things are called in Redis. Numbers of namespaces and the stream of events stand beside the values.

    PREFIX:RUN:generations                  hash: a number for all namespaces, and one for each that was purged
    PREFIX:RUN:events                       stream of what was stored and cleared
    PREFIX:RUN:NAMESPACE:GENERATION:KEY     a value; NAMESPACE and KEY are hashes
    PREFIX:RUN:NAMESPACE:GENERATION:KEY:note    its key in words, and what it was announced with

A server that starts again has another run. It may have lost the last of what was written, a purge say, so nothing from
before is looked at again. A namespace that was never purged has the number of all. All these numbers are in one place,
so none is lost alone; and they are drawn, so a lost one never comes again.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from llmcache.banks.stores.base import Put, StoreKey
from llmcache.banks.stores.redis_wire import Command

ALL = "all"  # field of the number of all namespaces
_NUMBERS_S = 30 * 86_400  # after which numbers leave that nobody asked for, and no folder from before is served


@dataclass(frozen=True, slots=True)
class Keys:
    """Names under a prefix, in one run of a server."""

    prefix: str
    run: str

    @property
    def generations(self) -> str:
        return f"{self.prefix}:{self.run}:generations"

    @property
    def events(self) -> str:
        return f"{self.prefix}:{self.run}:events"

    @property
    def values(self) -> str:
        """Matches values and notes, for SCAN."""
        return f"{self.prefix}:{self.run}:*:*:*"

    def value(self, key: StoreKey, generation: int) -> str:
        return f"{self.prefix}:{self.run}:{field_of(key.namespace)}:{generation:x}:{key.digest.hex()}"

    def note(self, key: StoreKey, generation: int) -> str:
        return f"{self.value(key, generation)}:note"

    def notes(self, namespace: str, generation: int) -> str:
        """Matches the notes of a namespace, for SCAN."""
        return f"{self.prefix}:{self.run}:{field_of(namespace)}:{generation:x}:*:note"

    def live_on(self, ttl_s: int) -> list[Command]:
        """Have events outlive the values, and numbers what was saved to folders."""
        return [("EXPIRE", self.generations, max(ttl_s, _NUMBERS_S)), ("EXPIRE", self.events, ttl_s)]

    def ask_generations(self, namespaces: Sequence[str]) -> Command:
        """A command; `told` reads its answer."""
        return ("HMGET", self.generations, ALL, *map(field_of, namespaces))


def told(namespaces: Sequence[str], answer: Sequence[bytes | None]) -> dict[str, int]:
    """The number of each namespace; empty where the server has lost them."""
    every, *own = answer
    return {} if every is None else {n: int(one or every) for n, one in zip(namespaces, own, strict=True)}


def write_note(put: Put) -> bytes:
    """A note, with its key in a line before it, which a name does not tell."""
    return json.dumps([put.key.scope, put.key.name]).encode() + b"\n" + put.note


def read_note(namespace: str, value: bytes) -> tuple[StoreKey, bytes] | None:
    """The reverse; None of what is no note."""
    line, _, note = value.partition(b"\n")
    try:
        scope, name = json.loads(line)
        return StoreKey(namespace, str(scope), str(name)), note
    except (TypeError, ValueError):
        return None


def new_generation() -> int:
    """A number that was never given."""
    return secrets.randbits(62)


def field_of(namespace: str) -> str:
    """A name of fixed length for any text."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


def pattern(prefix: str, namespace: str | None) -> str:
    """Matches the values of a namespace, None: all, and perhaps more; for SCAN."""
    return f"{prefix}:*" if namespace is None else f"{prefix}:*:{field_of(namespace)}:*"


def generation_of(prefix: str, name: bytes) -> int | None:
    """The number in the name of a value, or of its note; None of other names."""
    found = re.fullmatch(rf"{re.escape(prefix)}:\w+:[0-9a-f]{{32}}:([0-9a-f]+):[0-9a-f]{{64}}(?::note)?".encode(), name)
    return None if found is None else int(found[1], 16)


def is_ours(prefix: str, name: bytes) -> bool:
    """Whether a name may be one of these, in any run of the server."""
    beside = rf"{re.escape(prefix)}:\w+:(?:generations|events)".encode()
    return generation_of(prefix, name) is not None or re.fullmatch(beside, name) is not None
