"""One calibration for all caches that share a store: published by one, adopted by the others, and ended for all.

    s.GROUP.VERSION             the digest of the body in force
    b.GROUP.DIGEST              the body: the calibration with its sources, as in a save
    n.GROUP.DIGEST.a1, .a2, .d  notes: a first alarm, a second alarm, drift

GROUP is a digest of the settings and of the head. Versions only rise, and of two values written at once under one name
one stays, so all caches agree. A cache checks for later versions and for notes once a second, in a call. A body takes
longer to read, so a thread does it. Trouble costs speed, never correctness.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch

from llmcache.config import CacheConfig
from llmcache.memory.stores.tier import Tier
from llmcache.request.counters import Counters
from llmcache.request.rows import Scope
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

_CHECK_EVERY_S = 1.0
_CHECK_TIMEOUT_S = 0.05
_BODY_TIMEOUT_S = 30.0  # no call waits for it
_N_FIRST, _N_NEXT = 1024, 32  # versions that the first check and later ones look for
_META = "__meta__"  # JSON of a body, beside its tensors
#: Settings that decide how requests are compared and served, and what a calibration claims.
_SETTINGS = {"answer", "gate", "max_drop", "delta", "draft", "sources", "audit"}


class Place(NamedTuple):
    """Where a calibration lies in the store."""

    scope: Scope  # of its sources
    number: int  # of their namespace in the store when they were computed


class SharedCalibration:
    """Publishes a cache's calibration on its store and follows those of other caches. Thread-safe."""

    def __init__(
        self,
        tier: Tier,
        calibrated: CalibratedReuse,
        alarm: Callable[[Calibration], object],
        counters: Counters,
        config: CacheConfig,
        special_ids: Sequence[int],
    ) -> None:
        """Share `calibrated`. `alarm` is called for another cache's alarm; fingerprints leave out `special_ids`."""
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
        self._body = ""  # digest of the body in force here; "" without one
        self._place: Place | None = None  # of this body
        self._calibration: Calibration | None = None  # in force at the latest check
        self._call_place: Place | None = None  # of the latest call
        self._unusable = 0, ""  # version and digest of a body that cannot be adopted
        self._next_check_s = 0.0
        self._thread: threading.Thread | None = None  # adopts a body
        self._lock = forkable(threading.RLock(), is_waited_for=False)

    def step(self, scope: Scope, number: int) -> None:
        """Publish a new local calibration, and follow other caches once a second; runs in each call."""
        self._call_place = Place(scope, number)
        if self._calibration is not self._calibrated.calibration or monotonic() >= self._next_check_s:
            with self._lock:
                self._step()

    def settle(self) -> None:
        """Publish and follow now, and wait until the body in force is adopted."""
        for _ in range(2):  # what the first round writes can be read in the second
            with self._lock:
                self._next_check_s = 0.0
                self._step()
            if (thread := self._thread) is not None and thread is not threading.current_thread():
                thread.join()
            self._tier.drain()

    def _step(self) -> None:
        if self._thread is not None:
            return
        if (calibration := self._calibrated.calibration) is not self._calibration:
            self._publish_changes(calibration)
        if monotonic() >= self._next_check_s and (place := self._place or self._call_place) is not None:
            self._next_check_s = monotonic() + _CHECK_EVERY_S
            self._check(place)

    def _publish_changes(self, calibration: Calibration | None) -> None:
        """Publish a change of the calibration in force here: a new one, an alarm, or drift."""
        before, latest = self._calibration, self._calibrated.latest  # `latest` is kept when it ends
        self._calibration = calibration
        if self._place is not None and before is not None and latest is not None and latest.is_of(before):
            for note, holds in (("a1", latest.n_alarms > 0), ("a2", latest.n_alarms > 1), ("d", latest.has_drifted)):
                if holds:
                    self._write(self._place, f"n.{self._group()}.{self._body}.{note}", {}, {"is": note})
        if calibration is not None and not (before is not None and calibration.is_of(before)):
            self._body, self._place = "", None
            scopes = {source.entry.scope for source in self._calibrated.fitter.sources}
            if len(scopes) == 1 and self._is_shareable(calibration):
                scope = scopes.pop()
                self._publish(Place(scope, self._tier.number(scope.namespace)))

    def _is_shareable(self, calibration: Calibration) -> bool:
        """Whether a calibration meets the settings' claim, so that caches with the same settings may use it."""
        config = self._config
        return (
            calibration.metric == "changed"
            and calibration.max_drop <= config.max_drop
            and calibration.delta <= config.delta
            and calibration.watch is not None
            and calibration.sources == config.sources
            and not calibration.n_alarms
        )

    def _publish(self, place: Place) -> None:
        now = self._tier.now(place.scope.namespace)
        meta, tensors = self._calibrated.state(place.scope.weights)
        packed = json.dumps(meta).encode()
        sha = hashlib.sha256(packed)
        for name, tensor in sorted(tensors.items()):
            sha.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self._body, self._version, self._place = sha.hexdigest()[:24], self._version + 1, place
        packed_meta = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._write(place, f"b.{self._group()}.{self._body}", {**tensors, _META: packed_meta}, now)
        self._write(place, f"s.{self._group()}.{self._version}", {}, {"body": self._body})

    def _check(self, place: Place) -> None:
        """Check the store for another calibration and for notes on the present one."""
        group = self._group()
        versions = range(max(1, self._version), self._version + (_N_NEXT if self._version else _N_FIRST))
        notes = [f"n.{group}.{self._body}.{note}" for note in ("a1", "a2", "d")] if self._body else []
        names = [*notes, *(f"s.{group}.{version}" for version in versions)]
        found = self._tier.peek([(place.scope, name) for name in names], _CHECK_TIMEOUT_S)
        are_noted, records = [record is not None for record in found[: len(notes)]], found[len(notes) :]
        latest = max((v for v, record in zip(versions, records, strict=True) if record is not None), default=None)
        if latest is not None and (record := records[latest - versions.start]) is not None:
            body = str(record.about.get("body"))
            if body != self._body and (latest, body) != self._unusable:
                self._version = latest
                self._thread = threading.Thread(target=self._adopt, args=(body, place), name="llmcache-share")
                self._thread.start()
                return
        if are_noted:
            self._follow(*are_noted)

    def _follow(self, has_alarm: bool, has_second: bool, has_drifted: bool) -> None:
        """Apply alarms and drift that other caches noted."""
        for n, is_noted in enumerate((has_alarm, has_second)):
            calibration = self._calibrated.calibration
            if is_noted and calibration is not None and calibration.n_alarms <= n:
                self._alarm(calibration)
        calibration = self._calibrated.calibration
        if has_drifted and calibration is not None and not calibration.has_drifted:
            self._calibrated.drifted(calibration)
        self._calibration = self._calibrated.calibration

    def _adopt(self, body: str, place: Place) -> None:
        """Adopt a body, unless its namespace was purged meanwhile; notes on it are read at the next check."""
        try:
            with self._counters.guard("adopt a calibration from the store"):
                namespace, bank = place.scope.namespace, self._calibrated.fitter.bank
                (found,) = self._tier.peek([(place.scope, f"b.{self._group()}.{body}")], _BODY_TIMEOUT_S)
                if found is None:  # not written yet, or gone
                    return
                self._unusable = self._version, body  # until it is adopted
                meta = json.loads(found.tensors.pop(_META).numpy().tobytes())
                with self._calibrated.held():
                    generation, gone = bank.purges.generation, self._tier.forgotten_since(namespace, found.about)
                    if gone is None:
                        return
                    self._calibrated.restore(meta, found.tensors, gone)
                    if bank.purges.generation != generation:  # something was forgotten meanwhile: try again
                        self._calibrated.end()
                        self._unusable = 0, ""
                        return
                self._tier.follow()  # a purge elsewhere drops the restored sources and ends the calibration
                calibration = self._calibrated.calibration
                if calibration is not None and calibration.head != self._calibrated.head.digest():
                    self._calibrated.end()
                    calibration = None
                if calibration is None:
                    return
                self._calibration, self._body, self._place, self._next_check_s = calibration, body, place, 0.0
                self._unusable = 0, ""
                logger.info("llmcache: adopted a calibration from the store, with %d sources", calibration.n_sources)
        finally:
            self._calibration = self._calibrated.calibration
            self._thread = None

    def _write(self, place: Place, name: str, tensors: dict[str, Any], about: dict[str, Any]) -> None:
        self._tier.write(place.scope, name, tensors, about, place.number, self._tier.follow())

    def _group(self) -> str:
        """Return a digest of the settings and head that caches must share, beside the scope."""
        return hashlib.sha256(
            f"{self._settings} {self._calibrated.draft_name} {self._calibrated.head.digest()}".encode()
        ).hexdigest()[:16]
