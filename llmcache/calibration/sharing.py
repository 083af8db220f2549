"""One calibration for all caches that share a store: published, taken up by the others, and ended for all of them.

    s.BY.VERSION             which body is in force: its digest
    b.BY.DIGEST              the body: the calibration with its sources, as in a save
    n.BY.DIGEST.a1, .a2, .d  notes: a first alarm, a second one, drift

BY is a digest of the settings and of the head. Versions only rise, and of two values that are written under one name at
once one stays: so all agree. A cache looks for the next versions and for notes once a second, in a call; what takes
longer, to read a body, is done in a thread. Trouble costs speed, never correctness.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch

from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration
from llmcache.config import CacheConfig
from llmcache.counters import Counters
from llmcache.request.rows import Scope
from llmcache.stores.tier import Tier
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

_EVERY_S = 1.0  # between two looks
_PATIENCE_S = 0.05  # for a look
_BODY_S = 30.0  # for a body, which no call waits for
_AT_FIRST, _NEXT = 1024, 32  # versions that are looked for
_META = "__meta__"  # JSON of a body, beside its tensors
#: What of the settings decides how requests are compared and served, and what a calibration has to show.
_SETTINGS = {"answer", "gate", "max_drop", "delta", "sources", "audit"}


class Place(NamedTuple):
    """Scope and number of a namespace under which a calibration lies in the store."""

    scope: Scope  # of its sources
    number: int  # that the namespace had in the store when they were computed


class SharedCalibration:
    """Publishes one cache's calibration on its store, and follows those of others. Thread-safe."""

    def __init__(
        self,
        tier: Tier,
        calibrated: CalibratedReuse,
        alarm: Callable[[Calibration], object],
        counters: Counters,
        config: CacheConfig,
        special_ids: Sequence[int],
    ) -> None:
        """Share what is `calibrated`; `alarm` follows another's, `special_ids` are left out of fingerprints."""
        self._tier, self._calibrated, self._alarm, self._counters = tier, calibrated, alarm, counters
        self._config = config
        self._settings = json.dumps(
            [
                config.fingerprint_component.model_dump(),
                config.model_dump(mode="json", include=_SETTINGS),
                list(special_ids),
            ]
        )
        self._version = 0  # the latest that was seen
        self._body = ""  # digest of the one in force here; "" without
        self._place: Place | None = None  # where it lies
        self._made: Calibration | None = None  # in force at the latest look
        self._asked: Place | None = None  # of the latest call
        self._passed_over = 0, ""  # version and body of one that cannot be used
        self._look_at = 0.0
        self._thread: threading.Thread | None = None  # takes a body up
        self._lock = forkable(threading.RLock(), is_waited_for=False)

    def step(self, scope: Scope, number: int) -> None:
        """In a call: publish what was calibrated here, follow the others once a second.

        Args:
            scope: The scope of the call.
            number: The number of its namespace in the store.
        """
        self._asked = Place(scope, number)
        if self._made is not self._calibrated.calibration or monotonic() >= self._look_at:
            with self._lock:
                self._step()

    def settle(self) -> None:
        """Publish and follow now, and wait until a body that is in force is taken up."""
        for _ in range(2):  # what is written is read by others only afterwards
            with self._lock:
                self._look_at = 0.0
                self._step()
            if (thread := self._thread) is not None and thread is not threading.current_thread():
                thread.join()
            self._tier.drain()

    def _step(self) -> None:
        if self._thread is not None:
            return
        if (made := self._calibrated.calibration) is not self._made:
            self._tell(made)
        if monotonic() >= self._look_at and (place := self._place or self._asked) is not None:
            self._look_at = monotonic() + _EVERY_S
            self._look(place)

    def _tell(self, made: Calibration | None) -> None:
        """Publish a change of the calibration in force here: a new one, an alarm, or drift."""
        before, told = self._made, self._calibrated.latest  # also of one that has ended
        self._made = made
        if self._place is not None and before is not None and told is not None and told.is_of(before):
            for note, holds in (("a1", told.n_alarms > 0), ("a2", told.n_alarms > 1), ("d", told.has_drifted)):
                if holds:
                    self._write(self._place, f"n.{self._by()}.{self._body}.{note}", {}, {"is": note})
        if made is not None and not (before is not None and made.is_of(before)):
            self._body, self._place = "", None
            scopes = {one.entry.scope for one in self._calibrated.fitter.sources}
            if len(scopes) == 1 and self._is_for_all(made):
                scope = scopes.pop()
                self._publish(Place(scope, self._tier.number(scope.namespace)))

    def _is_for_all(self, made: Calibration) -> bool:
        """Whether a calibration keeps the settings' claim, so that caches with the same settings may use it."""
        config = self._config
        shows = made.metric == "changed" and made.max_drop <= config.max_drop and made.delta <= config.delta
        return shows and made.watch is not None and made.sources == config.sources and not made.n_alarms

    def _publish(self, place: Place) -> None:
        meta, tensors = self._calibrated.state(place.scope.weights)
        packed = json.dumps(meta).encode()
        sha = hashlib.sha256(packed)
        for name, one in sorted(tensors.items()):
            sha.update(name.encode() + one.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self._body, self._version, self._place = sha.hexdigest()[:24], self._version + 1, place
        told = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._write(place, f"b.{self._by()}.{self._body}", {**tensors, _META: told}, {})
        self._write(place, f"s.{self._by()}.{self._version}", {}, {"body": self._body})

    def _look(self, place: Place) -> None:
        """Look for another calibration, and for notes on the present one."""
        by = self._by()
        versions = range(max(1, self._version), self._version + (_NEXT if self._version else _AT_FIRST))
        notes = [f"n.{by}.{self._body}.{note}" for note in ("a1", "a2", "d")] if self._body else []
        names = [*notes, *(f"s.{by}.{version}" for version in versions)]
        told = self._tier.peek([(place.scope, name) for name in names], _PATIENCE_S)
        are_noted, standings = [one is not None for one in told[: len(notes)]], told[len(notes) :]
        latest = max((v for v, one in zip(versions, standings, strict=True) if one is not None), default=None)
        if latest is not None and (standing := standings[latest - versions.start]) is not None:
            body = str(standing.about.get("body"))
            if body != self._body and (latest, body) != self._passed_over:
                self._version = latest
                self._thread = threading.Thread(target=self._take_up, args=(body, place), name="llmcache-share")
                self._thread.start()
                return
        if are_noted:
            self._follow(*are_noted)

    def _follow(self, has_alarm: bool, has_second: bool, has_drifted: bool) -> None:
        """Apply alarms and drift that others noted."""
        for n, is_told in enumerate((has_alarm, has_second)):
            made = self._calibrated.calibration
            if is_told and made is not None and made.n_alarms <= n:
                self._alarm(made)
        made = self._calibrated.calibration
        if has_drifted and made is not None and not made.has_drifted:
            self._calibrated.drifted(made)
        self._made = self._calibrated.calibration

    def _take_up(self, body: str, place: Place) -> None:
        """Take up a body, unless its namespace was purged meanwhile; notes on it are read at the next look."""
        try:
            with self._counters.guard("take up a calibration of the store"):
                namespace, bank = place.scope.namespace, self._calibrated.fitter.bank
                generation = bank.generation(namespace)
                (found,) = self._tier.peek([(place.scope, f"b.{self._by()}.{body}")], _BODY_S)
                if found is None:  # not there yet, or no longer
                    return
                self._passed_over = self._version, body  # unless it can be taken up
                meta = json.loads(found.tensors.pop(_META).numpy().tobytes())
                with self._calibrated.held():
                    if bank.generation(namespace) != generation:  # purged since
                        return
                    self._calibrated.restore(meta, found.tensors)
                self._tier.follow()  # a purge elsewhere drops what was restored, and ends the calibration
                made = self._calibrated.calibration
                if made is not None and made.head != self._calibrated.head_digest():
                    self._calibrated.end()
                    made = None
                if made is None:
                    return
                self._made, self._body, self._place, self._look_at = made, body, place, 0.0
                self._passed_over = 0, ""
                logger.info("llmcache: took up a calibration of the store, made of %d requests", made.n_sources)
        finally:
            self._made = self._calibrated.calibration
            self._thread = None

    def _write(self, place: Place, name: str, tensors: dict[str, Any], about: dict[str, Any]) -> None:
        self._tier.write(place.scope, name, tensors, about, place.number)

    def _by(self) -> str:
        """Return a digest of the settings and head that caches must have in common, beside the scope."""
        return hashlib.sha256(f"{self._settings} {self._calibrated.head_digest()}".encode()).hexdigest()[:16]
