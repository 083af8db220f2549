"""A store on a Redis or Valkey server, for all machines that reach it: see `docs/stores.md`.

    redis_wire        connections, and answers in time or not at all
    redis_keys        how values, numbers of namespaces and the stream of events are called
    redis_follower    the thread that reads this stream

A value's name has the number of its namespace, so a purge is one change of that number. Whoever reads asks for it with
the values, in one exchange. The server evicts as it is configured to; whatever it lost is a miss.
"""

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from llmcache.banks.stores.base import Bytes, Events, Put, Store, StoreKey, StoreStats
from llmcache.banks.stores.redis_follower import AWAY, LEASE_S, PATIENCE_S, Follower, tell_cleared, tell_stored
from llmcache.banks.stores.redis_keys import (
    ALL,
    Keys,
    field_of,
    is_ours,
    is_stale,
    is_value,
    new_generation,
    pattern,
    read_note,
    told,
    write_note,
)
from llmcache.banks.stores.redis_wire import Command, PatientWire, Server, UnusableError, Wire, Wires
from llmcache.errors import StoreError
from llmcache.threads import at_fork, forkable

logger = logging.getLogger("llmcache")

_WIRES = 4  # for requests
_WRITE_S = 10.0  # for values that are put together
_NUMBER_S = 0.1  # for the number of a namespace that is new to this process
_LARGEST = 512 << 20  # bytes of a value that Redis takes
_MOST_NAMESPACES = 10_000  # with a number of their own; beyond, all get a new one
_SCANNED = 1_000  # names looked at in one step of a search
_COUNTED = 20_000  # names looked at for the stats
_LOOKED_AT = 100_000  # at the start, for those of others


@dataclass(frozen=True, slots=True)
class _Links:
    """What one process has open."""

    wires: Wires
    patient: PatientWire
    follower: Follower

    def close(self, is_parents: bool = False) -> None:
        self.follower.close()
        self.wires.close(is_parents)
        self.patient.close()


class RedisStore(Store):
    """`redis`: a Redis or Valkey server that many machines share."""

    def __init__(self, url: str, prefix: str = "llmcache", ttl_s: int = 86_400, timeout_ms: float = 5.0) -> None:
        """Open the store; a server that is not there yet is looked for, and nothing is served from it meanwhile.

        Args:
            url: `redis://[[user]:password@]host[:port][/database]`, `rediss://` with TLS, or `unix://`.
            prefix: Of all names in the database: letters, digits, `_`, `.` and `-`.
            ttl_s: Seconds after which a value leaves, used or not.
            timeout_ms: Milliseconds for which the server may be silent before a request is computed instead.

        Raises:
            ValueError: The server cannot be used as it was named: a wrong address or password, a replica, part of a
                cluster, no Redis, or one that has something else under these names; or an option is out of range.
        """
        if not re.fullmatch(r"[\w.-]{1,64}", prefix, re.ASCII):
            raise ValueError(f"prefix: give 1 to 64 letters, digits, '_', '.' or '-' (got {prefix!r})")
        if ttl_s < 1 or not timeout_ms > 0:
            raise ValueError(f"ttl_s, timeout_ms: give more than 0 (got {ttl_s}, {timeout_ms})")
        self._server = Server(url)
        self._prefix, self._ttl_s, self._timeout_s = prefix, ttl_s, timeout_ms / 1e3
        self._generations: dict[str, int] = {}  # as they were when last asked for
        self._n_evicted_before = 0
        self._closing = forkable(threading.Event())
        self._opening = forkable(threading.Lock(), is_waited_for=False)
        self._opened: _Links | None = self._open()
        at_fork(self._begin_anew)

    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        if monotonic() >= deadline or not keys:
            self._check_open()
            return [None] * len(keys)
        return [answer if isinstance(answer, bytes) else None for answer in self._look("GET", keys, deadline)]

    def put_many(self, puts: Sequence[Put]) -> None:
        names = list(dict.fromkeys(put.key.namespace for put in puts))
        if not names:
            return
        with self._links.patient.taken() as wire:
            at, now = Keys(self._prefix, wire.run), self._now(wire, names)
            kept = [p for p in puts if p.generation == now[p.key.namespace] and len(p.value) <= _LARGEST]
            commands: list[Command] = []
            for put in kept:
                name = at.value(put.key, put.generation)
                commands.append(("SET", name, memoryview(put.value), "EX", self._ttl_s))
                if put.note:
                    commands.append(("SET", at.note(put.key, put.generation), write_note(put), "EX", self._ttl_s))
                commands.append(tell_stored(at, put))
            wire.ask_all([*commands, *at.live_on(self._ttl_s)], monotonic() + _WRITE_S)
            after = self._now(wire, names)
            gone = [(put.key, put.generation) for put in kept if put.generation != after[put.key.namespace]]
            if late := [
                name(*one) for one in gone for name in (at.value, at.note)
            ]:  # a purge came between, which may have looked for what to remove before
                wire.ask_all([("UNLINK", *late)], monotonic() + _WRITE_S)

    def contains_prefix(self, keys: Sequence[StoreKey]) -> int:
        if not keys:
            self._check_open()
            return 0
        found = self._look("TOUCH", keys, monotonic() + self._timeout_s)
        return next((i for i, answer in enumerate(found) if answer != 1), len(keys))

    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        names = list(dict.fromkeys(key.namespace for key in keys))
        with self._links.patient.taken() as wire:
            at, now = Keys(self._prefix, wire.run), self._now(wire, names)
            looks: list[Command] = [("TOUCH", at.value(key, now[key.namespace])) for key in keys]
            found = wire.ask_all(looks, monotonic() + _WRITE_S) if looks else []
        return [key for key, n in zip(keys, found, strict=True) if n != 1]

    def generation(self, namespace: str) -> int:
        """Likewise; the server may be silent for longer than in a read, since nothing is written without the number."""
        silence_s = max(self._timeout_s, _NUMBER_S)
        deadline = monotonic() + silence_s
        with self._links.wires.one(deadline) as wire, wire.patient(silence_s):
            return self._now(wire, [namespace], deadline)[namespace]

    def generations(self, namespaces: Sequence[str]) -> list[int]:
        """Likewise, in one exchange, for which the server may take its time."""
        deadline = monotonic() + PATIENCE_S
        with self._links.wires.one(deadline) as wire, wire.patient(PATIENCE_S):
            now = self._now(wire, namespaces, deadline)
        return [now[namespace] for namespace in namespaces]

    def remove(self, namespace: str | None) -> int:
        """Likewise; a server that is out of memory gives all namespaces another number.

        Waits for a second, after which no process serves from its memory what was removed.
        """
        return self._remove(namespace, LEASE_S)

    def discard(self, namespace: str) -> None:
        """Likewise, without a wait."""
        self._remove(namespace, 0.0)

    def events(self, since: str | None) -> Events:
        return self._links.follower.events(since)

    def notes(self, namespace: str) -> Iterator[tuple[StoreKey, Bytes]]:
        patient, cursor = self._links.patient, b"0"
        while True:
            with patient.taken() as wire:
                at, number = Keys(self._prefix, wire.run), self._now(wire, [namespace])[namespace]
                step: Command = ("SCAN", cursor, "MATCH", at.notes(namespace, number), "COUNT", _SCANNED)
                ((cursor, names),) = wire.ask_all([step], monotonic() + PATIENCE_S)
                found = wire.ask_all([("MGET", *names)], monotonic() + PATIENCE_S)[0] if names else []
            yield from (note for value in found if value is not None and (note := read_note(namespace, value)))
            if cursor == b"0":
                return

    def stats(self) -> StoreStats:
        """Likewise, of values under this prefix; in a large database estimated from a part of it."""
        commands: list[Command] = [("DBSIZE",), ("INFO", "memory"), ("INFO", "stats")]
        with self._links.patient.taken() as wire:
            n_names, memory, counts = wire.ask_all(commands, monotonic() + PATIENCE_S)
            found, n_seen = self._names(wire, Keys(self._prefix, wire.run).values, _COUNTED)
            values = [name for name in found if is_value(self._prefix, name)]
            sizes = [("STRLEN", name) for name in values[:_SCANNED]]
            nbytes = sum(wire.ask_all(sizes, monotonic() + PATIENCE_S)) if sizes else 0
        n_values = len(values) if n_seen is None else round(len(values) * max(1.0, n_names / n_seen))
        n_evicted = _number(counts, "evicted_keys") - self._n_evicted_before
        return StoreStats(
            n_values,
            round(nbytes * n_values / max(1, len(sizes))),
            _number(memory, "maxmemory") or None,
            max(0, n_evicted),
        )

    def ping(self) -> None:
        deadline = monotonic() + self._timeout_s
        with self._links.wires.one(deadline) as wire:
            wire.ask_all([("PING",)], deadline)

    def close(self) -> None:
        self._closing.set()
        with self._opening:
            if self._opened is not None:
                self._opened.close()

    @property
    def _links(self) -> _Links:
        """What is open; a forked process opens its own when it first needs it."""
        self._check_open()
        if (links := self._opened) is None:
            with self._opening:
                links = self._opened = self._opened or self._open()
        return links

    def _begin_anew(self) -> None:
        """In a forked process: what the parent has open is closed here, which it does not notice."""
        if (links := self._opened) is not None:
            self._opened = None
            links.close(is_parents=True)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise StoreError(f"{self._server.name}: the store is closed")

    def _open(self) -> _Links:
        wires = Wires(partial(self._server.open, self._timeout_s), _WIRES)
        patient = PatientWire(partial(self._server.open, PATIENCE_S))
        is_away = False
        try:
            with patient.taken() as wire:
                self._refuse_others(wire)
                self._now(wire, [])
                commands: list[Command] = [("XLEN", Keys(self._prefix, wire.run).events), ("INFO", "stats")]
                self._n_evicted_before = _number(wire.ask_all(commands, monotonic() + PATIENCE_S)[1], "evicted_keys")
            wires.fill()
        except UnusableError as error:
            raise ValueError(f"{error}") from error
        except StoreError as error:
            is_away = True
            logger.warning(AWAY, error)
        follower = Follower(partial(self._server.open, PATIENCE_S), wires, self._prefix, self._ttl_s, is_away)
        return _Links(wires, patient, follower)

    def _refuse_others(self, wire: Wire) -> None:
        """Refuse a prefix under which something else is kept, as far as a look at part of a large database tells."""
        found, _ = self._names(wire, pattern(self._prefix, None), _LOOKED_AT)
        if others := [name for name in found if not is_ours(self._prefix, name)]:
            raise UnusableError(
                f"{self._server.name}: something else is kept under the prefix {self._prefix!r} "
                f"({min(others).decode(errors='replace')!r}): name another prefix"
            )

    def _names(self, wire: Wire, matching: str, most: int) -> tuple[set[bytes], int | None]:
        """Names in the database; and among how many they were found, None if that were all, `most` being enough."""
        cursor, found, n_seen = b"0", set[bytes](), 0
        while n_seen < most:
            step: Command = ("SCAN", cursor, "MATCH", matching, "COUNT", _SCANNED)
            ((cursor, names),) = wire.ask_all([step], monotonic() + PATIENCE_S)
            found.update(names)
            n_seen += _SCANNED
            if cursor == b"0":
                return found, None
        return found, n_seen

    def _look(self, command: str, keys: Sequence[StoreKey], deadline: float) -> list[Any]:
        """What the server answers about each value; None where it had lost all, or the answer was late."""
        names = list(dict.fromkeys(key.namespace for key in keys))
        with self._links.wires.one(deadline) as wire:
            at = Keys(self._prefix, wire.run)
            while True:
                known = {name: self._generations[name] for name in names if name in self._generations}
                commands = [at.ask_generations(names)]
                if len(known) == len(names):
                    commands += [(command, at.value(key, known[key.namespace])) for key in keys]
                first, *answers = wire.ask(commands, deadline)
                now = told(names, wire.check(first))
                if not now or now == known:
                    return [*answers, *[None] * len(keys)][: len(keys)] if now else [None] * len(keys)
                if len(self._generations) > _MOST_NAMESPACES:
                    self._generations.clear()
                self._generations |= now

    def _now(self, wire: Wire, names: Sequence[str], deadline: float | None = None) -> dict[str, int]:
        """The number of each namespace; where the server lost them, all get one anew."""
        at, deadline = Keys(self._prefix, wire.run), deadline or monotonic() + PATIENCE_S
        ask = at.ask_generations(names)
        (answer,) = wire.ask_all([ask], deadline)
        if answer[0] is None:
            begin: list[Command] = [
                ("HSETNX", at.generations, ALL, new_generation()),
                ("XTRIM", at.events, "MAXLEN", 0),  # so that all who follow it ask for the numbers again
                *at.live_on(self._ttl_s),
            ]
            *_, answer = wire.ask_all([*begin, ask], deadline)
        return told(names, answer)

    def _remove(self, namespace: str | None, lease_s: float) -> int:
        links = self._links
        with links.patient.taken() as wire:
            which, number = self._renew(wire, namespace)
        self._closing.wait(lease_s)
        with suppress(StoreError):  # what is left leaves at the end of its time
            return self._sweep(links.patient, which, number)
        return 0

    def _renew(self, wire: Wire, namespace: str | None) -> tuple[str | None, int]:
        """Give a namespace another number, or all of them where that is not possible; returns which, and the number."""
        from redis.exceptions import OutOfMemoryError

        at, number, deadline = Keys(self._prefix, wire.run), new_generation(), monotonic() + PATIENCE_S
        try:
            self._now(wire, [], deadline)
            (n_namespaces,) = wire.ask_all([("HLEN", at.generations)], deadline)
            if n_namespaces > _MOST_NAMESPACES:
                namespace = None
            changes: list[Command] = [
                ("HSET", at.generations, ALL if namespace is None else field_of(namespace), number)
            ]
            if namespace is None:
                changes.insert(0, ("DEL", at.generations))
            told_of = tell_cleared(at, namespace, number)
            wire.ask_all([("MULTI",), *changes, told_of, *at.live_on(self._ttl_s), ("EXEC",)], deadline)
        except StoreError as error:
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
            namespace = None
            wire.ask_all([("DEL", at.generations), ("XTRIM", at.events, "MAXLEN", 0)], deadline)
        return namespace, number

    def _sweep(self, patient: PatientWire, namespace: str | None, number: int) -> int:
        """Remove the values of a namespace that have another number; returns how many."""
        cursor, n_removed = b"0", 0
        while True:
            with patient.taken() as wire:
                step: Command = ("SCAN", cursor, "MATCH", pattern(self._prefix, namespace), "COUNT", _SCANNED)
                ((cursor, names),) = wire.ask_all([step], monotonic() + PATIENCE_S)
                if stale := [name for name in names if is_stale(self._prefix, name, number)]:
                    (n,) = wire.ask_all([("UNLINK", *stale)], monotonic() + PATIENCE_S)
                    n_removed += n
            if cursor == b"0":
                return n_removed


def _number(info: bytes, name: str) -> int:
    """A number in an answer to INFO; 0 where it is not."""
    found = re.search(rf"^{name}:(\d+)".encode(), info, re.MULTILINE)
    return 0 if found is None else int(found[1])
