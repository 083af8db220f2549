"""The audit of one wrapped model: draws hits, has them recomputed, and acts on the verdicts.

A changed answer quarantines its source: it serves no other request approximately any more, but still votes. The bound
of a frozen calibration survives this: the chosen source and its risk stay the same for every request, and some requests
are computed (not drafted) instead of served. So no answer changes that would not have changed before. Under a
user-defined metric no source is quarantined: a changed answer may be better, and fewer hits may raise the mean loss.

Requests are also compared with those of the calibration. This recomputes nothing, so it runs with `audit=0` as well.
Once requests are unlike, the calibration is void.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any, get_args

from llmcache.config import CacheConfig
from llmcache.reuse.audit.account import MOST_WAITING, AuditAccount, Audited
from llmcache.reuse.audit.idle_worker import IdleWorker, Job
from llmcache.reuse.audit.known_features import KnownFeatures
from llmcache.reuse.audit.recomputer import Recomputer
from llmcache.reuse.audit.renewal import RenewalBuffer
from llmcache.reuse.calibration.calibration import SEMANTIC, Calibration
from llmcache.reuse.calibration.drift import BATCH, DriftDetector, Features, features_of
from llmcache.reuse.calibration.risk_target import MetricName
from llmcache.reuse.call import Call, Hit
from llmcache.reuse.decide import Semantic
from llmcache.reuse.observation import Observation
from llmcache.stats import AuditStats
from llmcache.support.threads import forkable


class Audit:
    """Audits approximate hits of calibrated reuse. Thread-safe. A hit whose recomputation fails is counted as lost."""

    def __init__(self, recomputer: Recomputer, semantic: Semantic, config: CacheConfig) -> None:
        self.worker: IdleWorker[Audit] = IdleWorker(self, config.audit.in_background, share=config.audit.share)
        self._recomputer = recomputer
        self._semantic = semantic
        self._calibrated = recomputer.calibrated
        self._weights = recomputer.weights
        self._counters = recomputer.counters
        self.observer = recomputer.observer
        self._answers = self.observer.answers
        self._floor = config.audit.rate
        self.is_on = bool(config.audit)  # else nothing is drawn, and the worker gets no jobs
        self._renewal = RenewalBuffer(config.recalibrate)
        self._calibration: Calibration | None = None  # that `_account` and `_detector` belong to
        self._account: AuditAccount | None = None
        self._detector: DriftDetector | None = None  # while `_calibration` is certified
        self._known_features = KnownFeatures(semantic)
        self._batch: dict[str, Features] = {}  # not compared yet, by key
        self._is_renewing = False
        self._n_accounts = 0
        self._process = os.getpid()
        self._n_alarms = 0
        self._lock = forkable(threading.RLock())  # reentrant: a log handler may call `stats`

    # -- while a call is served ----------------------------------------------------------------------------------------

    def draw(self, call: Call) -> None:
        """Count a call's requests, draw from its approximate hits, and remove hits that must not be served.

        No hit is served once requests are unlike those of the calibration. A hit drawn while the queue is full is
        computed in the call: its own answer is known at once, and the estimate keeps every sample.
        """
        try:
            if self._recomputer.queue.parked:
                self._resume()
            with self._lock:
                if not self._sync_account(call.scope.weights):
                    return
                is_alike, account = self._detector is None or self._are_alike(call, self._detector), self._account
                if is_alike and account is None:
                    return
                hits = {number: hit for number, hit in call.hits.items() if hit.answer is not None}
                taken_back = set() if is_alike else set(hits)
                if account is not None:
                    is_full = self.worker.is_full or len(self._recomputer.queue) >= MOST_WAITING
                    # A long queue lowers the draw probabilities; `scale` is fixed before these requests are seen.
                    self._draw(account, call, hits if is_alike else {}, self.worker.scale)
                    taken_back |= hits.keys() & call.audited.keys() if is_full else set()
            for number in taken_back:
                del call.hits[number]
        except Exception as error:  # no approximate hit is served unaudited; only these have an `answer`
            self._counters.error("draw for the audit", error)
            call.hits = {number: hit for number, hit in call.hits.items() if hit.answer is None}
            self.withdraw(call)
        if call.is_activated and len(call.hits) < len(call.rows):  # PEFT's hooks expect all rows of a batch, or none
            call.hits.clear()
            self.withdraw(call)

    def _draw(self, account: AuditAccount, call: Call, hits: Mapping[int, Hit], scale: float) -> None:
        """Draw from the rows of a call; `hits` are its approximate hits by row number."""
        for row in call.rows:
            if row.bypass_reason:
                continue
            hit = hits.get(row.number)
            sample = account.see(None if hit is None else hit.share, scale)
            if sample is not None and hit is not None:
                # Hits drawn more often, for their risk or early, are thinned out to the probability of all rows.
                stands_for_all = account.toss(scale * self._floor * sample.weight)
                call.audited[row.number] = Audited(sample, hit.source, hit.answer, stands_for_all)
            elif row.number not in call.hits and account.toss(scale * self._floor):
                call.audited[row.number] = Audited(None, "", None, True)
        self._on_alarm(account, account.lose_overdue())

    def served(self, call: Call) -> None:
        """Queue the drawn hits of a finished call for recomputation."""
        for number in call.hits.keys() & call.audited.keys():
            drawn = call.audited.pop(number)
            with self._counters.guard("queue a hit for the audit") as tried:
                self._recomputer.add(call, call.rows[number], drawn)
            if tried.has_failed:
                self._lose(drawn)
            else:
                self.worker.add(Job(Audit._recompute_next))

    def withdraw(self, call: Call) -> None:
        """Cancel the draws of a call whose hits are not served."""
        with self._lock:
            for drawn in call.audited.values():
                if drawn.sample is not None:
                    drawn.sample.account.withdraw(drawn.sample)
        call.audited.clear()

    def observe(self, call: Call, output: Any) -> None:
        """Use computed rows as growing sources, to learn from, and as verdicts on drawn rows; see `Observer.read`."""
        calibrated = self._calibrated
        if self.observer.collected.get() is not None:
            self.observer.see(call, output)
            return
        with self._counters.guard("observe an answer"):
            wanted = range(len(call.rows)) if calibrated.is_learning or calibrated.is_growing else call.audited
            seen = self.observer.read(call, output, wanted, calibrated.may_learn)
            if not seen:
                return
            if calibrated.is_growing:
                calibrated.grow(call.calibration, seen, call.vectors)
            if calibrated.is_learning:
                calibrated.observe(list(seen.values()))
            for number, drawn in call.audited.items():
                if number in seen:
                    self._settle(drawn, seen[number])

    def alarm(self, calibration: Calibration) -> None:
        """React to an alarm of this cache, or of another cache with the same calibration."""
        self._n_alarms += 1
        self._calibrated.alarm(calibration)

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def drain(self) -> int:
        """Do all waiting jobs that can be done now; return how many this thread did."""
        self._resume()
        return self.worker.drain()

    def forget(self, namespace: str | None = None) -> None:
        """Drop queued hits, and requests kept for a renewal, of a namespace (None: all)."""
        with self.worker.paused():
            self._recomputer.queue.drop(namespace)
        with self._lock:
            self._renewal.forget(namespace)
            self._known_features.forget()  # of all namespaces: repeats are searched again
            self._batch = {}
            if self._detector is not None:
                self._detector.forget()

    def stats(self) -> AuditStats:
        calibration, status = self._semantic.calibration, self._calibrated.status(self._weights.digest())
        n_quarantined = len(self._semantic.sources.quarantined)
        with self._lock:
            n_waiting = len(self._recomputer.queue) + self._is_renewing
            account = self._account if calibration is not None and self._sync_account(calibration.weights) else None
            return AuditStats(
                status=status,
                n_waiting=n_waiting,
                n_alarms=self._n_alarms,
                n_quarantined=n_quarantined,
                recomputing_ms=1e3 * self.worker.worked_s,
                bound=calibration.chosen.bound
                if calibration is not None and calibration.chosen is not None and calibration.is_certified
                else None,
                allowed=None if calibration is None else calibration.max_drop,
                **({} if account is None else account.figures()),
            )

    # -- in idle time -------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Queue again the hits that waited for the weights that served them."""
        for task in self._recomputer.resume():
            self.worker.add(Job(Audit._recompute_next, task.since_s))

    def _recompute_next(self) -> None:
        """Recompute the oldest hit, and others with it."""
        for task, case in self._recomputer.run():
            if case is None:
                self._lose(task.drawn)
                continue
            try:
                self._settle(task.drawn, case)
                self._counters.look()
            except Exception as error:
                self._counters.look(error)
                self._lose(task.drawn)

    def _settle(self, drawn: Audited, case: Observation) -> None:
        """Compare a drawn request's own answer with its source's: count the verdict, quarantine, raise the alarm."""
        if not self._is_current():  # weights of the trunk or the head changed: the answer is another model's
            return
        if drawn.sample is not None:
            assert drawn.answer is not None
            account, is_changed = drawn.sample.account, not self._answers.agree(case.answer, drawn.answer)
            with self._lock:
                calibration = self._calibration
                self._on_alarm(account, account.settle(drawn.sample, is_changed))
            if is_changed and drawn.source and calibration is not None and calibration.metric in get_args(MetricName):
                self._semantic.sources.quarantine(drawn.source, case.scope.namespace)
        if drawn.stands_for_all:
            self._keep_for_renewal(case)

    def _lose(self, drawn: Audited) -> None:
        """Count a drawn hit that will never be audited."""
        if drawn.sample is not None:
            account = drawn.sample.account
            with self._lock:
                self._on_alarm(account, account.lose(drawn.sample))

    def _on_alarm(self, account: AuditAccount, rings: bool) -> None:
        """React if the alarm of an account rings, unless the account was closed."""
        if rings and account is self._account and self._calibration is not None:
            self.alarm(self._calibration)

    def _keep_for_renewal(self, case: Observation) -> None:
        """Keep a request for the next renewal; queue the renewal when it is due."""
        with self._lock:
            if not self._calibrated.remaining([case]):
                return
            self._renewal.add(case)
            is_due = self._account is not None and self._renewal.is_due(self._account.rate.n) and not self._is_renewing
            self._is_renewing |= is_due
        if is_due:
            self.worker.add(Job(Audit._renew, is_short=False))  # takes seconds: no call does it

    def _renew(self) -> None:
        """Calibrate from the kept requests, unless the calibration that they renew has ended."""
        with self._lock:
            calibration, cases = self._calibration, self._renewal.cases
        try:
            with self._counters.guard("renew the calibration"):
                if calibration is not None and self._is_current():
                    self._calibrated.renew(calibration, cases)
        finally:
            self._is_renewing = False

    def _is_current(self) -> bool:
        return self._calibrated.is_made_for(self._weights.digest())

    def _are_alike(self, call: Call, detector: DriftDetector) -> bool:
        """Compare a call's requests with the calibration's; if they are unlike, void it and return False."""
        calibration, scope = self._calibration, call.scope
        assert calibration is not None
        if scope.namespace not in self._calibrated.namespaces:
            return True
        if (
            call.calibration is None and self._semantic.serving(scope.weights) is None
        ):  # rows not searched have no features
            return True
        for row in call.rows:
            if row.bypass_reason or row.key in self._batch or row.key in detector.seen:  # a request counts once
                continue
            choice = call.choices.get(row.number)
            if choice is not None and not self._semantic.bank.is_pinned(row.key):
                self._batch[row.key] = features_of(choice, call.forecasts[row.number])
            elif (features := self._known_features.find(call, row, SEMANTIC in calibration.shares)) is not None:
                self._batch[row.key] = features
            if len(self._batch) < BATCH:
                continue
            self._known_features.keep(self._batch)
            batch, self._batch = self._batch, {}
            if detector.see(batch):
                self._calibration, self._detector = self._calibrated.drifted(calibration), None
                self._renewal.forget(None)  # requests before the drift must not enter the next calibration
                return False
        return True

    def _sync_account(self, weights: str) -> bool:
        """Open an account if the calibration in force is new; return whether it serves for these weights.

        Each calibration has its own account, and a new one after an alarm.
        """
        calibration = self._semantic.calibration
        if (
            calibration is None
            or calibration.watch is None
            or calibration.chosen is None
            or calibration.weights != weights
        ):
            return False
        if calibration is not self._calibration or self._process != os.getpid():  # a forked process has its own account
            self._batch = {}
            self._calibration, self._n_accounts, self._process = calibration, self._n_accounts + 1, os.getpid()
            self._account = self._detector = None
            if self._floor:
                self._account = AuditAccount(
                    calibration.watch.most_changed, self._floor, calibration.delta, self._n_accounts
                )
            if calibration.is_certified and calibration.watch.profile is not None:
                self._detector = DriftDetector(calibration.watch.profile)
            self._known_features.forget()
            self._renewal.begin(calibration)
        return True
