"""One calibration for all caches that share a store: published, taken up by the others, and ended for all of them.

made here    -> publish   what is needed to decide, and the states of its sources, are written; then a head is announced
head heard   -> take up   they are read behind the calls, and serve from then on
alarm, drift -> told      by another head of the same body; every cache follows at its next call

A call asks whether there is something to do (`step`). What takes time is done by the thread that writes to the store.
Trouble costs speed, never correctness: what cannot be read, or is not ours, is counted and passed over.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmcache.audit.audit import Audit
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.banks.tier import Tier
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration
from llmcache.calibration.record import FORMAT, Head, Record, digest_of
from llmcache.config import CacheConfig
from llmcache.request.rows import Scope

logger = logging.getLogger("llmcache")

_MOST_TOKENS = 1_000_000  # for whose computing time a body may be waited for: behind the calls nobody waits
_LEAST_REST, _MOST_REST = 16, 4096  # calls after which a body that was not there is asked for again
_STRANGE = (
    "llmcache: a calibration in the store is not taken up: %s. Set one LLMCACHE_STORE_SECRET and one version of llmcache "
    "for all that share it"
)
#: What of the settings decides how requests are compared and served, and what a calibration has to show.
_SETTINGS = ("answer", "gate", "max_drop", "delta", "sources", "audit")
_COMPONENTS = ("fingerprint_component", "decide_component", "index_component")


class SharedCalibration:
    """What one cache has to do with the calibrations on its store. Thread-safe."""

    def __init__(
        self,
        tier: Tier,
        banks: CacheBanks,
        calibrated: CalibratedReuse,
        audit: Audit,
        config: CacheConfig,
        special: Any,
    ) -> None:
        """Share what is `calibrated`; `special` are the tokens that fingerprints leave out."""
        self._tier = tier
        self._banks = banks
        self._calibrated = calibrated
        self._audit = audit
        self._config = config
        components = {name: getattr(config, name).model_dump() for name in _COMPONENTS}
        settings = {name: getattr(config, name) for name in _SETTINGS}
        self._settings = json.dumps([components, settings, special])
        self._heads: dict[Scope, Head] = {}  # the latest that were heard
        self._head: Head | None = None  # of the calibration in force
        self._scope: Scope | None = None  # of its sources; else of the latest call
        self._generation = 0  # that its sources were computed in
        self._seen: Calibration | None = None  # in force when it was looked at last
        self._is_mine = False  # made here, and to be published
        self._passed_over: set[str] = set()  # bodies that ended here, or cannot be used
        self._rest, self._next_rest = 0, _LEAST_REST
        self._is_busy = False  # something is done behind the calls
        self._has_warned = False
        self._lock = threading.RLock()
        calibrated.on_void = self._tell

    # -- in calls ------------------------------------------------------------------------------------------------------

    def step(self, scope: Scope | None) -> None:
        """Follow what was heard; have done what is to be done. `scope` is the call's, None: as in the call before."""
        with self._lock:
            self._follow_others()
            if self._is_busy:
                return
            self._look_at_own()
            if self._head is None:
                self._scope = scope or self._scope
            if not self._tier.has_heard_all:
                return
            if self._is_mine:
                self._have_done("publish a calibration", self._publish)
            elif self._scope is not None and self._is_wanted(self._heads.get(self._scope)):
                self._have_done("take up a calibration", self._take_up)

    def settle(self, follow: Callable[[], object]) -> None:
        """Do now what would be done behind the calls; `follow` hears what was announced."""
        for _ in range(3):  # what was announced is read, then a body, or it is written
            follow()
            self.step(None)
            self._tier.drain()

    def hear(self, told: Sequence[tuple[StoreKey, Bytes]]) -> None:
        """Take in what was announced of calibrations. One call at a time."""
        by = self._by()
        for at, note in told:
            if at.name.startswith(f"c{by}."):
                self._hear_head(at, note, by)

    def forget(self, namespace: str | None) -> None:
        """A namespace was purged, None: all, and with it what was published there."""
        gone = [scope for scope in self._heads if namespace in (None, scope.namespace)]
        for scope in gone:
            del self._heads[scope]
        if self._scope is not None and namespace in (None, self._scope.namespace):
            self._head = None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _follow_others(self) -> None:
        """Do as others did with the calibration in force, after an alarm or drift of theirs."""
        mine, made = self._head, self._calibrated.calibration
        known = None if self._scope is None else self._heads.get(self._scope)
        if mine is None or known is None or made is not self._seen or known.body != mine.body or known == mine:
            return
        self._head = None  # they know
        for _ in range(known.n_alarms - mine.n_alarms):
            if (made := self._calibrated.calibration) is not None:
                self._audit.alarm(made)
        if known.has_drifted and (made := self._calibrated.calibration) is not None:
            self._calibrated.drifted(made)
        self._seen = self._calibrated.calibration
        self._head = None if self._seen is None else known

    def _look_at_own(self) -> None:
        """See whether a calibration was made here, or has ended."""
        made = self._calibrated.calibration
        if made is self._seen:
            return
        self._seen, self._head = made, None
        self._is_mine = made is not None and self._is_for_all(made)
        if made is None:  # it is not to come back from the store
            self._passed_over |= {head.body for head in self._heads.values()}

    def _is_for_all(self, made: Calibration) -> bool:
        """Whether a calibration shows what the settings ask for, so that it is one for all that have these."""
        config, is_new = self._config, not (made.n_alarms or made.has_drifted)
        shows = made.metric == "changed" and made.max_drop <= config.max_drop and made.delta <= config.delta
        is_of_one_scope = self._calibrated.origin is not None
        return is_new and shows and made.watch is not None and made.sources == config.sources and is_of_one_scope

    def _is_wanted(self, known: Head | None) -> bool:
        """Whether a calibration is to be taken up: there is none here, or an older one of the store."""
        if known is None or known.is_over or known.body in self._passed_over:
            return False
        if self._seen is not None and (self._head is None or self._head.joined(known).body == self._head.body):
            return False
        self._rest -= 1
        return self._rest < 0

    def _have_done(self, what: str, act: Callable[[], object]) -> None:
        self._is_busy = True
        self._tier.later(what, act)

    # -- behind the calls ----------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        try:
            with self._calibrated.held():
                origin, record = self._calibrated.origin, self._calibrated.record()
                if record is None or origin is None or record.calibration is not self._seen:
                    return
                scope, generation = origin
                tensors, about = record.pack()
                known = self._heads.get(scope)
                head = Head(1 if known is None else known.version + 1, digest_of(tensors, about))
                self._head, self._scope, self._generation, self._is_mine = head, scope, generation, False
            self._banks.share(record.sources, generation)
            self._tier.put(scope, f"b{self._by()}.{head.body}", tensors, about, generation)
            self._announce(head, scope, generation)
        finally:
            self._is_busy = False

    def _take_up(self) -> None:
        try:
            scope = self._scope
            head = None if scope is None else self._heads.get(scope)
            if scope is None or head is None:
                return
            generation = self._tier.generation(scope.namespace)
            if (record := self._read(scope, head)) is None:
                return
            sources = list(self._banks.with_states(record.sources))
            made = replace(record.calibration, n_alarms=head.n_alarms, has_drifted=False)
            with self._calibrated.held():
                is_late = self._calibrated.calibration is not self._seen or self._heads.get(scope) != head
                if is_late or self._tier.generation(scope.namespace) != generation:
                    return
                stand = lambda: self._banks.stand_all(sources)  # noqa: E731
                self._calibrated.take_up(replace(record, calibration=made), (scope, generation), stand)
                self._seen, self._head, self._generation = self._calibrated.calibration, head, generation
            logger.info("llmcache: took up calibration %s of the store", head.name)
        finally:
            self._is_busy = False

    def _read(self, scope: Scope, head: Head) -> Record | None:
        """What a head tells of; None where it is not there now, or cannot be used."""
        (value,) = self._tier.fetch(scope, [f"b{self._by()}.{head.body}"], _MOST_TOKENS)
        if value is None:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _MOST_REST)
            return None
        self._next_rest = _LEAST_REST
        try:
            record = Record.unpack(value.tensors, value.about, scope)
            if record.calibration.head != self._calibrated.head_digest():
                raise ValueError("made with another head")
            return record
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            self._passed_over.add(head.body)
            self._refuse("damaged", f"it cannot be read: {error!r}")
            return None

    # -- heads ---------------------------------------------------------------------------------------------------------

    def _tell(self, told: Calibration) -> None:
        """An alarm or drift here has changed the calibration in force."""
        if (head := self._head) is None or self._scope is None:
            return
        head = replace(head, n_alarms=told.n_alarms, has_drifted=told.has_drifted)
        self._seen = self._calibrated.calibration
        self._head = None if self._seen is None else head
        self._announce(head, self._scope, self._generation)

    def _announce(self, head: Head, scope: Scope, generation: int) -> None:
        self._heads[scope] = head.joined(self._heads.get(scope))
        about = head.about() | {"scope": [scope.weights, scope.dtype, scope.attention]}
        self._tier.announce(scope, f"c{self._by()}.{head.name}", {}, about, generation)

    def _hear_head(self, at: StoreKey, note: Bytes, by: str) -> None:
        if (told := self._tier.opened(at, note)) is None:
            self._warn("it was made with another secret, or is damaged")
            return
        if (number := told.about.get("format")) != FORMAT:
            self._refuse("other_format", f"its format is {number}, and this version reads {FORMAT}")
            return
        try:
            head, scope = Head.read(told.about), Scope(at.namespace, *told.about["scope"])
            is_whole = self._tier.is_of(scope, at) and at.name == f"c{by}.{head.name}"
        except (KeyError, TypeError, ValueError):  # without a secret, anybody may have made it
            is_whole = False
        if is_whole:
            self._heads[scope] = head.joined(self._heads.get(scope))
        else:
            self._refuse("other_key", "what was announced of it does not fit")

    def _by(self) -> str:
        """Digest of all that two caches have to share beside a scope."""
        return hashlib.sha256(f"{self._settings} {self._calibrated.head_digest()}".encode()).hexdigest()[:16]

    def _refuse(self, reason: str, why: str) -> None:
        self._tier.refused(reason)
        self._warn(why)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            logger.warning(_STRANGE, why)
        self._has_warned = True
