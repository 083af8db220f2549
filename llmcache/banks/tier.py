"""A store behind the memory of one cache: asked for what is not in memory, written to behind the answers.

    a local miss  -> fetch     values of a request or of blocks, checked; who asks holds them in memory from then on
    a local put   -> put       written behind, with the generation that its namespace had when the call was read
    an eviction   -> put       likewise: what the store has is not written again
    each call     -> follow    namespaces that other processes purged leave the memory as well, and what they announced
                               is heard
    at first, and -> the same, of all that was announced before, by the thread that writes
    after a gap

Trouble here costs speed, never correctness: it is counted, logged once, and the request is computed.
"""

import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import monotonic, perf_counter
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from llmcache.banks.generations import Generations
from llmcache.banks.stores import Bytes, Store, StoreKey
from llmcache.banks.stores.base import MOST_NOTED
from llmcache.banks.stores.seal import FORMAT, MismatchError, Opened, Seal
from llmcache.banks.write_behind import Job, WriteBehind
from llmcache.counters import Counters
from llmcache.request.rows import Scope
from llmcache.stats import TierStats
from llmcache.threads import at_fork, forkable

logger = logging.getLogger("llmcache")

_T = TypeVar("_T")
_LEAST_S = 0.005  # that a read may take
_MOST_S = 1.0  # where it was not measured what it saves
_MOST_TOLD = MOST_NOTED // 2  # bytes, to which a seal adds some
_LAG_S = 2.0  # by which stores tell events late, at most: on Redis half of it
_AT_ONCE = 32  # announcements that are heard together, while calls wait
_MOST_AT_ONCE = 256  # in one call

#: Takes in announcements: under which key each was made, and its note.
Hear: TypeAlias = Callable[[Sequence[tuple[StoreKey, Bytes]]], object]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From how many tokens on a value is read rather than computed.

    Attributes:
        least_tokens: Shorter values are computed; None: all are.
        token_s: Seconds that computing a token takes; None: that was not measured.
    """

    least_tokens: int | None = 0
    token_s: float | None = None

    def pays(self, n_tokens: int) -> bool:
        return self.least_tokens is not None and n_tokens >= self.least_tokens

    def patience_s(self, n_tokens: int) -> float:
        """How long a read may take: as long as computing."""
        return _MOST_S if self.token_s is None else max(_LEAST_S, self.token_s * n_tokens)


class Tier:
    """A store and how one cache uses it. Thread-safe."""

    def __init__(self, store: Store, seal: Seal, settings: str, counters: Counters) -> None:
        """Use an open store, which is closed when this is gone.

        Args:
            store: It may hold what others stored.
            seal: Makes and checks its values.
            settings: All that decides values beside a scope and the tokens.
            counters: Told what fails.
        """
        self._store = store
        self._seal = seal
        self._settings = settings
        self._behind = WriteBehind(store, seal, counters)
        weakref.finalize(self, self._behind.close)  # also when the interpreter ends, which must not meet it in torch
        self._following = forkable(threading.RLock())
        self._cursor: str | None = None
        self._has_missed = False  # maybe purges of what was loaded
        self._silent_since: float | None = None  # when it first told events and no numbers
        self._generations = Generations()
        self._noting = forkable(threading.Lock())
        self._n_reading = 0  # namespaces of which announcements are being read
        self._scopes: dict[Scope, str] = {}
        self._counts: Counter[str] = Counter()
        self._mismatched: Counter[str] = Counter()
        self._read_s = 0.0
        self.break_even = BreakEven()
        at_fork(self._begin_anew)
        self.follow(lambda namespace: None)  # from now on: what was purged before is not in memory
        self._cursor = self._cursor or ""  # of a store that is not there yet, events may be missing when it is

    def generation(self, namespace: str) -> int:
        """That of what is put in a namespace from now on, see `Generations.of`."""
        return self._generations.of(namespace, self._now)

    def generations(self) -> Mapping[str, int | None]:
        """The numbers of the namespaces of which anything is in memory; None: not known."""
        return self._generations.all()

    @contextmanager
    def loading(self, generations: Mapping[str, int | None]) -> Iterator[Set[str]]:
        """Within, memory takes in what was saved when namespaces had these numbers; no call begins meanwhile.

        Yields those of which nothing is to be taken in: their number is another one now, or is not known (None). While
        the store is silent none has another; `follow` compares before anything is served once the store was heard.
        """
        with self._following:
            known = {name: number for name, number in generations.items() if number is not None}
            outdated = self._outdated(known)
            gone = {*generations} - {*known} | {*(outdated or ())}
            self._generations.expect({name: number for name, number in known.items() if name not in gone})
            self._has_missed = outdated is None
            yield gone

    def follow(self, forget: Callable[[str | None], object], hear: Hear | None = None) -> None:
        """Have namespaces forgotten that were purged in the store, None: all, before this returns.

        Announcements in namespaces that calls asked for, or that were loaded, are given to `hear`: those that came
        since the last time at once, those from before behind the calls. It is a bound method.
        """
        with self._following:  # another call that comes meanwhile is not to find what is being forgotten
            since, began = self._cursor, monotonic()
            try:  # whether or not it is asked for values: no purge is to be missed
                events = self._store.events(since)
            except Exception as error:
                if not self._behind.breaker.is_open:
                    self._behind.failed("follow the store", error)
                self._silent_since = None
                return
            if events.cursor == since and not self._has_missed:
                # Otherwise more may follow of what a store heard before it lost its server.
                self._generations.settle(self._now, began - _LAG_S)
                self._hear_all(hear)
                return
            asked = self._generations.all()
            cleared = [event.namespace for event in events.found if event.kind == "cleared"]
            is_gap = since is not None and not events.is_complete
            if cleared or is_gap:
                self._generations.purged()
            has_missed = False
            if is_gap or self._has_missed:
                outdated = self._outdated(asked)
                has_missed = outdated is None and not is_gap and self._may_still_say(began)
                if outdated is None:
                    outdated = [] if has_missed else [*asked]
                cleared += outdated
                if outdated and self._has_missed:
                    logger.warning("llmcache: forgotten, as it may have been purged, is %s", named(outdated))
            for name in dict.fromkeys(name for name in cleared if name in asked or (name is None and asked)):
                self._forget(name, forget)
            if not events.is_complete:
                self.hear_again()
            if hear is not None:
                gone = {*cleared}  # of these, all that is still there is read when they are asked for
                told = [
                    (one.key, one.note)
                    for one in (() if None in gone else events.found)
                    if one.key and one.note and one.namespace not in gone
                    if self._generations.get(one.key.namespace) is not None
                ]
                if len(told) > _MOST_AT_ONCE:
                    self.hear_again()
                else:
                    self._tell(hear, told)
            self._cursor, self._has_missed = events.cursor, has_missed
            self._hear_all(hear)

    def hear_again(self) -> None:
        """Have all announcements given to `follow`'s `hear` once more: some were missed, or of no use before."""
        self._generations.renew()

    @property
    def has_heard_all(self) -> bool:
        """Whether all announcements were heard that had been made when calls first asked for their namespaces."""
        return not (self._generations.has_new or self._n_reading)

    def later(self, what: str, act: Callable[[], object]) -> None:
        """Have something done behind the calls, once the store answers; `act` is a bound method, which may be gone."""
        method = weakref.WeakMethod(act)

        def do() -> None:
            if (alive := method()) is not None:
                with self._behind.counters.guard(what):
                    alive()

        self._behind.do(what, do)

    def refused(self, reason: str) -> None:
        """Count a value that was there and is not used; see `TierStats.n_mismatched`."""
        self._mismatched[reason] += 1

    def remove(self, namespace: str | None, forget: Callable[[str | None], object]) -> None:
        """Purge a namespace, None: all, from the store and from memory.

        Raises:
            StoreError: The store could not, and may still serve what it holds. It is gone from memory.
        """
        try:
            self._store.remove(namespace)  # which may take its time; calls go on meanwhile
        finally:  # whether or not the store can tell of it
            with self._following:
                self._forget(namespace, forget)
        self.follow(forget)  # with what others did
        self.hear_again()

    def discard(self, namespace: str) -> None:
        """Remove from the store what lies in a namespace of this cache's own, of which nothing is in memory.

        Raises:
            StoreError: The store could not.
        """
        try:
            self._store.discard(namespace)
        finally:
            with self._following:
                self._forget(namespace, lambda name: None)

    def held(self, scope: Scope, names: Sequence[str]) -> int:
        """How many of these values the store has, from the first on."""
        keys = [self._key(scope, name) for name in names]
        return self._ask("look what the store has", lambda: self._store.contains_prefix(keys)) or 0

    def fetch(self, scope: Scope, names: Sequence[str], n_tokens: int) -> Iterator[Opened | None]:
        """Values by name, in order; `n_tokens` of computing are saved by all.

        Each is checked when its turn comes, which is also when a file is read; not those that are late.
        """
        keys, started = [self._key(scope, name) for name in names], perf_counter()
        deadline = monotonic() + self.break_even.patience_s(n_tokens)
        values = self._ask("read from the store", lambda: self._store.get_many(keys, deadline))
        self._counts["asked"] += len(keys)
        self._read_s += perf_counter() - started
        for key, value in zip(keys, values or [None] * len(keys), strict=True):
            started = perf_counter()
            opened = None if value is None or monotonic() >= deadline else self.opened(key, value)
            self._counts["found"] += opened is not None
            self._read_s += perf_counter() - started
            yield opened

    def put(
        self, scope: Scope, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], generation: int
    ) -> None:
        """Have a value written behind, unless the store has one. Nobody writes to its tensors any more."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._behind.add(Job(self._key(scope, name), generation, tensors, about, nbytes))

    @property
    def has_dropped(self) -> bool:
        """Whether values were dropped that may be put again; see `lacks`."""
        return self._behind.has_dropped

    def lacks(self, scope: Scope, name: str) -> bool:
        """Whether a value that was put was dropped; who asks puts it again."""
        return self._behind.take_dropped(self._key(scope, name))

    def announce(
        self, scope: Scope, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], generation: int
    ) -> None:
        """Have something told to all that share the store, behind what was put before, unless it is long; see `put`."""
        if (nbytes := sum(tensor.nbytes for tensor in tensors.values())) <= _MOST_TOLD:
            self._behind.add(Job(self._key(scope, name), generation, tensors, about, nbytes, is_note=True))
        else:
            self._behind.n_dropped += 1

    def is_of(self, scope: Scope, key: StoreKey) -> bool:
        """Whether a key is one of a scope, with all else that decides values as it is here."""
        return self._key(scope, key.name) == key

    @property
    def is_answering(self) -> bool:
        """Whether the store answered when it was asked last."""
        return not self._behind.breaker.n_failed

    def drain(self) -> None:
        """Wait until what was put is written or dropped."""
        self._behind.drain()

    def close(self) -> None:
        """Write what waits, and close the store."""
        self._behind.close()

    def stats(self) -> TierStats:
        """What was read and written by this cache, and what the store holds."""
        held = self._ask("ask the store what it holds", self._store.stats, is_of_call=False)
        return TierStats(
            n_asked=self._counts["asked"],
            n_found=self._counts["found"],
            n_mismatched=dict(self._mismatched),
            n_written=self._behind.n_written,
            n_dropped=self._behind.n_dropped,
            read_ms=1e3 * self._read_s,
            least_tokens=self.break_even.least_tokens,
            is_answering=not self._behind.breaker.is_open,
            n_values=None if held is None else held.n_values,
            nbytes=None if held is None else held.nbytes,
            max_bytes=None if held is None else held.max_bytes,
            n_evicted=None if held is None else held.n_evicted,
        )

    def _hear_all(self, hear: Hear | None) -> None:
        """Have the announcements read of namespaces that are new here, or of which some were missed."""
        if hear is None or self._behind.breaker.is_open:
            return
        unheard = self._generations.taken_new()
        with self._noting:
            self._n_reading += len(unheard)
        for name in unheard:
            if (generation := self._generations.get(name)) is not None:  # else it comes again
                task = partial(self._read_notes, name, generation, weakref.WeakMethod(hear))
                self._behind.do("read what was announced", task)
            else:
                with self._noting:
                    self._n_reading -= 1

    def _tell(self, hear: Hear, told: Sequence[tuple[StoreKey, Bytes]]) -> None:
        """Have announcements heard; what fails about them is no failure of the store."""
        with self._behind.counters.guard("hear what was announced"):
            hear(told)

    def _read_notes(self, namespace: str, generation: int, hear: "weakref.WeakMethod[Any]") -> None:
        try:
            notes = self._store.notes(namespace)
            while some := list(islice(notes, _AT_ONCE)):
                with self._following:  # nobody forgets the namespace between this look and what is heard
                    if (act := hear()) is None or self._generations.get(namespace) != generation:
                        return
                    self._tell(act, some)
        except Exception:
            self._generations.renew({namespace})
            raise
        finally:
            with self._noting:
                self._n_reading -= 1

    def _begin_anew(self) -> None:
        """In a forked process: what the parent's thread was to read is read by this one's."""
        self._n_reading = 0
        self.hear_again()

    def _forget(self, namespace: str | None, forget: Callable[[str | None], object]) -> None:
        """Have a namespace forgotten, None: all."""
        with self._generations.forgetting(namespace):
            forget(namespace)

    def _key(self, scope: Scope, name: str) -> StoreKey:
        if (digest := self._scopes.get(scope)) is None:
            if len(self._scopes) >= 1024:  # a namespace for each session, say
                self._scopes.clear()
            digest = hashlib.sha256(scope.key + f"{FORMAT} {self._settings}".encode()).hexdigest()
            self._scopes[scope] = digest
        return StoreKey(scope.namespace, digest, name)

    def opened(self, key: StoreKey, value: Bytes) -> Opened | None:
        """What is in a value, or was announced, checked."""
        try:
            return self._seal.open(key, value)
        except MismatchError as error:
            self._mismatched[error.reason] += 1
            return None

    def _may_still_say(self, now_s: float) -> bool:
        """Whether a store that tells events may yet tell numbers as well; not for ever: it is there."""
        self._silent_since = self._silent_since or now_s
        return now_s - self._silent_since < _LAG_S

    def _outdated(self, generations: Mapping[str, int | None]) -> list[str] | None:
        """Namespaces that may have been purged since they had these numbers; None: the store does not say."""
        names = [name for name, number in generations.items() if number is not None]

        def ask() -> dict[str, int]:
            return dict(zip(names, self._store.generations(names), strict=True))

        if (now := self._ask("ask the store for generations", ask, is_urgent=True) if names else {}) is None:
            return None
        return [name for name, number in generations.items() if number is None or number != now[name]]

    def _now(self, namespace: str) -> int | None:
        ask = partial(self._store.generation, namespace)
        # Urgent where reads are late and writes are not: nothing is written of a namespace without its number.
        return self._ask("ask the store for a generation", ask, is_urgent=not self._behind.is_resting)

    def _ask(self, what: str, act: Callable[[], _T], is_urgent: bool = False, is_of_call: bool = True) -> _T | None:
        """What the store says; None where it fails, or failed so often that it is not asked unless it is urgent."""
        if (self._behind.breaker.is_open and not is_urgent) or self._behind.is_closed:
            return None
        try:
            said = act()
        except Exception as error:
            if not self._behind.breaker.is_open:
                self._behind.failed(what, error, is_of_call)
            return None
        if not self._behind.breaker.is_open:  # else the thread that writes pings first
            self._behind.breaker.succeeded()
        return said


def named(namespaces: Collection[str]) -> str:
    """Some namespaces in words."""
    first = repr(min(namespaces))
    return f"namespace {first}" if len(namespaces) == 1 else f"{len(namespaces)} namespaces, {first} say"
