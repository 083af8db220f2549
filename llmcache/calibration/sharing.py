"""One calibration for all caches that share a store: published, taken up by the others, and ended for all of them.

made here         -> publish   what decides, and the states of its sources, are written; then its standing is announced
a standing heard  -> take up   they are read behind the calls, and serve from then on
an alarm, drift   -> told      by another standing of the same body; every cache follows at its next call

A call asks whether there is something to do (`step`). What takes time is done by the thread that writes to the store.
Trouble costs speed, never correctness: what cannot be read, or is not ours, is counted and passed over.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.generations import NO_GENERATION
from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.banks.tier import Tier
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration
from llmcache.calibration.published import FORMAT, Published, Standing, digest_of
from llmcache.config import CacheConfig
from llmcache.request.rows import Scope
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

_MOST_TOKENS = 1_000_000  # for whose computing time a body may be waited for: behind the calls nobody waits
_REST = 32  # calls after which a body that was not there is asked for again
_LOOK = 256  # calls after which it is seen to that the store still has what is in force
_STRANGE = (
    "llmcache: something that others told of a calibration in the store is passed over: %s. All that share a store "
    "need the same LLMCACHE_STORE_SECRET and the same version of llmcache"
)
#: What of the settings decides how requests are compared and served, and what a calibration has to show.
_SETTINGS = ("answer", "gate", "max_drop", "delta", "sources", "audit")
_COMPONENTS = ("fingerprint_component", "decide_component", "index_component")


class Place(NamedTuple):
    """Where caches that share a calibration meet: the scope of its sources, as it was when they were computed."""

    scope: Scope
    generation: int
    by: str  # digest of all else that they share

    def body(self, standing: Standing) -> str:
        """The name of what a standing tells of."""
        return f"b{self.by}.{standing.body}"


class Shared(NamedTuple):
    """A calibration in force that the store has."""

    made: Calibration
    standing: Standing
    place: Place


class SharedCalibration:
    """What one cache has to do with the calibrations on its store. Thread-safe."""

    def __init__(
        self,
        tier: Tier,
        banks: CacheBanks,
        calibrated: CalibratedReuse,
        alarm: Callable[[Calibration], object],
        config: CacheConfig,
        special_ids: Sequence[int],
    ) -> None:
        """Share what is `calibrated`; `alarm` follows another's, `special_ids` are left out of fingerprints."""
        self._tier = tier
        self._banks = banks
        self._calibrated = calibrated
        self._alarm = alarm
        self._config = config
        components = {name: getattr(config, name).model_dump() for name in _COMPONENTS}
        settings = {name: getattr(config, name) for name in _SETTINGS}
        self._settings = json.dumps([components, settings, list(special_ids)])
        self._standings: dict[Scope, Standing] = {}  # the latest that were heard
        self._shared: Shared | None = None  # None while there is no calibration here, or one that is not shared
        self._asked: Scope | None = None  # of the latest call
        self._seen: Calibration | None = None  # in force when it was looked at last
        self._is_mine = False  # made here, and to be published
        self._word: tuple[Standing, Place] | None = None  # the latest that was told, or followed
        self._passed_over: set[str] = set()  # bodies that ended here, or cannot be used
        self._n_steps = self._resume_at = 0
        self._is_busy = False  # something is done behind the calls
        self._has_warned = False
        self._lock = forkable(threading.RLock())
        #: Told that one was taken up: what calls cost is no longer what it was.
        self.on_taken_up: Callable[[], object] = lambda: None
        calibrated.on_void = self._tell

    # -- in calls ------------------------------------------------------------------------------------------------------

    def step(self, scope: Scope | None, is_asked: bool = False) -> None:
        """Follow what was heard, and have done what is to be done.

        Args:
            scope: The call's; None: as in the call before.
            is_asked: It is seen to now that the store has what is in force.
        """
        with self._lock:
            self._n_steps += 1
            self._asked = scope or self._asked
            self._follow_others()
            if self._is_busy:
                return
            self._look_at_own()
            if not self._tier.has_heard_all:
                return
            if self._is_mine:
                self._have_done("publish a calibration", self._publish)
            elif self._wanted() is not None:
                self._have_done("take up a calibration", self._take_up)
            elif self._word is not None and (is_asked or self._n_steps % _LOOK == 0):
                self._have_done("keep a calibration in the store", self._keep)

    def settle(self, follow: Callable[[], object]) -> None:
        """Do now what would be done behind the calls; `follow` hears what was announced."""
        for turn in range(3):  # what was announced is read, then a body, or it is written
            follow()
            self.step(None, is_asked=not turn)
            self._tier.drain()

    def hear(self, told: Sequence[tuple[StoreKey, Bytes]]) -> None:
        """Take in what was announced of calibrations. One call at a time."""
        mine = f"c{self._by()}."
        for at, note in told:
            if at.name.startswith(mine) and not self._hear_standing(at, note):
                self._warn("it was made with another secret, by another version, or is damaged")

    def forget(self, namespace: str | None) -> None:
        """A namespace was purged, None: all, and with it what was published there."""
        for scope in [scope for scope in self._standings if namespace in (None, scope.namespace)]:
            del self._standings[scope]
        if self._word is not None and namespace in (None, self._word[1].scope.namespace):
            self._shared = self._word = None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _follow_others(self) -> None:
        """Do as others did with the calibration in force, after an alarm or drift of theirs."""
        if (shared := self._shared) is None or shared.made is not self._calibrated.calibration:
            return
        known, mine, place = self._standings.get(shared.place.scope), shared.standing, shared.place
        if known is None or known.body != mine.body or known == mine:
            return
        self._shared = None  # they know
        for _ in range(known.n_alarms - mine.n_alarms):
            if (made := self._calibrated.calibration) is not None:
                self._alarm(made)
        if known.has_drifted and (made := self._calibrated.calibration) is not None:
            self._calibrated.drifted(made)
        self._seen = made = self._calibrated.calibration
        self._shared = None if made is None else Shared(made, known, place)
        self._word = known, place

    def _look_at_own(self) -> None:
        """See whether a calibration was made here, or has ended."""
        made = self._calibrated.calibration
        if made is self._seen:
            return
        self._seen, self._shared = made, None
        self._is_mine = made is not None and self._is_for_all(made)
        if made is None:  # it is not to come back from the store
            self._passed_over |= {standing.body for standing in list(self._standings.values())}

    def _is_for_all(self, made: Calibration) -> bool:
        """Whether a calibration shows what the settings ask for, so that it is one for all that have these."""
        config, is_new = self._config, not (made.n_alarms or made.has_drifted)
        shows = made.metric == "changed" and made.max_drop <= config.max_drop and made.delta <= config.delta
        origin = self._calibrated.origin
        # Without a generation nobody can tell whether they were purged since.
        is_known = origin is not None and origin[1] > NO_GENERATION
        return is_new and shows and made.watch is not None and made.sources == config.sources and is_known

    def _wanted(self) -> tuple[Scope, Standing] | None:
        """What is to be taken up: there is no calibration here, or an older one of the store."""
        shared = self._shared
        scope = self._asked if shared is None else shared.place.scope
        known = None if scope is None else self._standings.get(scope)
        if scope is None or known is None or known.is_over or known.body in self._passed_over:
            return None
        if self._seen is not None and (shared is None or shared.standing.joined(known).body == shared.standing.body):
            return None
        return (scope, known) if self._n_steps >= self._resume_at else None

    def _have_done(self, what: str, act: Callable[[], object]) -> None:
        self._is_busy = True
        self._tier.later(what, act)

    # -- behind the calls ----------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        try:
            with self._calibrated.held():
                origin, published = self._calibrated.origin, self._calibrated.published()
                if published is None or origin is None or published.calibration is not self._seen:
                    return
                place = Place(*origin, self._by())
                known = self._standings.get(place.scope)
                standing = Standing(1 if known is None else known.version + 1, digest_of(*published.pack()))
                self._shared, self._is_mine = Shared(published.calibration, standing, place), False
            self._write(published, standing, place)
        finally:
            self._is_busy = False

    def _keep(self) -> None:
        """Write what the store has lost of what was told last, unless others have told something newer."""
        try:
            if (told := self._word) is None or told[0] != self._standings.get(told[1].scope):
                return
            standing, place = told
            is_lost = not self._tier.held(place.scope, [place.body(standing)])
            with self._calibrated.held():
                shared = self._shared
                is_here = shared is not None and shared.made is self._calibrated.calibration
                published = self._calibrated.published() if is_lost and is_here else None
            if published is not None:
                self._write(published, standing, place)
            else:
                self._announce(standing, place)
        finally:
            self._is_busy = False

    def _write(self, published: Published, standing: Standing, place: Place) -> None:
        """Have all of a calibration written, its standing last."""
        self._banks.share(published.sources, place.generation)
        tensors, about = published.pack()
        self._tier.put(place.scope, place.body(standing), tensors, about, place.generation)
        self._announce(standing, place)

    def _take_up(self) -> None:
        try:
            if (wanted := self._wanted()) is None:
                return
            scope, standing = wanted
            place = Place(scope, self._tier.generation(scope.namespace), self._by())
            if (published := self._read(standing, place)) is None:
                return
            sources = list(self._banks.with_states(published.sources))
            made = replace(published.calibration, n_alarms=standing.n_alarms, has_drifted=False)
            with self._calibrated.held():
                is_late = self._calibrated.calibration is not self._seen or self._standings.get(scope) != standing
                if is_late or self._tier.generation(scope.namespace) != place.generation:
                    return
                self._passed_over.add(standing.body)  # unless it can be taken up
                self._calibrated.take_up(replace(published, calibration=made, sources=sources), place.generation)
                self._passed_over.remove(standing.body)
                self._seen, self._shared, self._word = made, Shared(made, standing, place), (standing, place)
            self.on_taken_up()
            logger.info("llmcache: took up calibration %s of the store", standing.name)
        finally:
            self._is_busy = False

    def _read(self, standing: Standing, place: Place) -> Published | None:
        """What a standing tells of; None where it is not there now, or cannot be used."""
        (value,) = self._tier.fetch(place.scope, [place.body(standing)], _MOST_TOKENS)
        if value is None:
            self._resume_at = self._n_steps + _REST
            return None
        try:
            published = Published.unpack(value.tensors, value.about, place.scope)
            if published.calibration.head != self._calibrated.head_digest():
                raise ValueError("made with another head")
            return published
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            self._passed_over.add(standing.body)
            self._tier.refused("damaged")
            self._warn(f"it cannot be read: {error!r}")
            return None

    # -- telling and hearing -------------------------------------------------------------------------------------------

    def _tell(self, told: Calibration) -> None:
        """An alarm or drift here has changed the calibration in force."""
        if (shared := self._shared) is None:
            return
        standing = replace(shared.standing, n_alarms=told.n_alarms, has_drifted=told.has_drifted)
        self._seen = made = self._calibrated.calibration
        self._shared = None if made is None else Shared(made, standing, shared.place)
        self._announce(standing, shared.place)

    def _announce(self, standing: Standing, place: Place) -> None:
        self._word, scope = (standing, place), place.scope
        self._standings[scope] = standing.joined(self._standings.get(scope))
        about = {"format": FORMAT, "scope": [scope.weights, scope.dtype, scope.attention], **standing.about()}
        self._tier.announce(scope, f"c{place.by}.{standing.name}", {}, about, place.generation)

    def _hear_standing(self, at: StoreKey, note: Bytes) -> bool:
        """Take in which calibration is in force, and how it stands; False where it cannot be used."""
        if (told := self._tier.opened(at, note)) is None:
            return False
        try:
            if told.about["format"] != FORMAT:
                self._tier.refused("other_format")
                return False
            standing, scope = Standing.read(told.about), Scope(at.namespace, *map(str, told.about["scope"]))
            is_whole = at.name.partition(".")[2] == standing.name and self._tier.is_of(scope, at)
        except (KeyError, TypeError, ValueError):  # without a secret, anybody may have made it
            is_whole = False
        if is_whole:
            self._standings[scope] = standing.joined(self._standings.get(scope))
        else:
            self._tier.refused("damaged")
        return is_whole

    def _by(self) -> str:
        """Digest of all that caches have to share beside a scope."""
        return hashlib.sha256(f"{self._settings} {self._calibrated.head_digest()}".encode()).hexdigest()[:16]

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            logger.warning(_STRANGE, why)
        self._has_warned = True
