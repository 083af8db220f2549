"""What the audits of all caches found that serve by one calibration, told and heard through their store.

a worker's counts   -> reported    whenever so many of its requests have come, whatever was found in them
reports of all      -> account     the latest of each worker; the alarm is asked over all of them
a quarantined source -> told       it serves no other request in any of them
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmcache.audit.audit import Audit
from llmcache.audit.tally import Tally
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.banks.tier import Tier
from llmcache.calibration.calibration import Calibration
from llmcache.calibration.published import FORMAT, Standing
from llmcache.request.rows import Scope

_MOST_ACCOUNTS = 8  # whose reports are kept
_MOST_UNHEARD = 4  # reports of one's own that the store has not told to all


class Report(NamedTuple):
    """The latest that a worker told."""

    number: int  # the higher replaces the lower
    tally: Tally


@dataclass(frozen=True, slots=True)
class Place:
    """Where caches that share a calibration meet: the scope of its sources, as it was when they were computed."""

    scope: Scope
    generation: int
    by: str  # digest of all else that they share

    def is_of(self, tier: Tier, at: StoreKey, name: str) -> bool:
        """Whether something was announced here, under this name."""
        return at.name == name and tier.is_of(self.scope, at)

    @property
    def about(self) -> dict[str, object]:
        """What is told with all that is announced here; `read` takes it."""
        return {"format": FORMAT, "scope": [self.scope.weights, self.scope.dtype, self.scope.attention]}

    @classmethod
    def read(cls, at: StoreKey, about: Mapping[str, object], by: str) -> "Place":
        """Where something was announced; `KeyError` or `TypeError` where it does not tell."""
        scope = about["scope"]
        if not isinstance(scope, list) or len(scope) != 3:
            raise TypeError(f"scope {scope!r}")
        return cls(Scope(at.namespace, *map(str, scope)), 0, by)


class PooledAudit:
    """One cache's part in it. `SharedCalibration` sees to it that one thread at a time tells."""

    def __init__(self, tier: Tier, banks: CacheBanks, audit: Audit) -> None:
        """Pool what an audit finds."""
        self._tier = tier
        self._banks = banks
        self._audit = audit
        self._name = secrets.token_hex(4)
        self._n_told = self._n_heard = 0  # the latest report of one's own that was told, and that the store told to all
        self._reports: dict[tuple[Scope, str], dict[str, Report]] = {}  # by account, and by worker
        self._has_news = False
        self._made: Calibration | None = None  # whose account has what was heard until then
        audit.name = self._name

    def exchange(self, made: Calibration, standing: Standing, place: Place, is_asked: bool) -> None:
        """Tell what was counted, where it is time to or `is_asked`; ask the alarm once others, or the store, told."""
        account = _account_of(standing)
        if (tally := self._audit.report(made, is_asked)) is not None:
            self._n_told += 1
            tensors, figures = tally.pack()
            about = {**place.about, "figures": figures}
            name = f"a{place.by}.{account}.{self._me}.{self._n_told:x}"
            self._tier.announce(place.scope, name, tensors, about, place.generation)
        if not self._tier.is_answering or self._n_told - self._n_heard >= _MOST_UNHEARD:
            self._audit.hear(made, {}, None)
        elif (self._has_news or made is not self._made) and self._tier.has_heard_all:  # half of it may mislead
            self._has_news = False
            known = dict(self._reports.get((place.scope, account), {}))
            own = known.pop(self._me, None)
            others = {name: one.tally for name, one in known.items()}
            if self._audit.hear(made, others, Tally() if own is None else own.tally):
                self._made = made

    def tell_quarantined(self, key: str, place: Place) -> None:
        """A source serves no other request any more."""
        self._tier.announce(place.scope, f"q{place.by}.{key}", {}, place.about, place.generation)

    def hear_report(self, at: StoreKey, note: Bytes, by: str) -> bool:
        """Take in a report; False where it is none."""
        if (told := self._tier.opened(at, note)) is None:
            return False
        try:
            _, account, worker, number = at.name.split(".")
            place = Place.read(at, told.about, by)
            if told.about["format"] != FORMAT or not place.is_of(self._tier, at, at.name):
                return False
            report = Report(int(number, 16), self._audit.read(told.tensors, told.about["figures"]))
        except (AttributeError, KeyError, TypeError, ValueError):  # without a secret, anybody may have made it
            return False
        if worker == self._me:
            self._n_heard = max(self._n_heard, report.number)
        known = self._reports.setdefault((place.scope, account), {})
        if worker not in known or known[worker].number < report.number:
            known[worker], self._has_news = report, True
        while len(self._reports) > _MOST_ACCOUNTS:
            del self._reports[next(iter(self._reports))]
        return True

    def hear_quarantined(self, at: StoreKey, note: Bytes, by: str) -> bool:
        """Likewise of a source that was quarantined."""
        if (told := self._tier.opened(at, note)) is None:
            return False
        try:
            is_ours = Place.read(at, told.about, by).is_of(self._tier, at, at.name)
        except (KeyError, TypeError):
            return False
        if is_ours:
            self._banks.quarantine(at.name.partition(".")[2], at.namespace)
        return is_ours

    def forget(self, namespace: str | None) -> None:
        """A namespace was purged, None: all."""
        for account in [one for one in self._reports if namespace in (None, one[0].namespace)]:
            del self._reports[account]

    @property
    def _me(self) -> str:
        """A name that no other process has, be it forked from this one."""
        return f"{self._name}{os.getpid():x}"


def _account_of(standing: Standing) -> str:
    """Of one calibration, and anew after an alarm."""
    return f"{standing.body[:12]}{standing.n_alarms}"
