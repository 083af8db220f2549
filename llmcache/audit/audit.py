"""The audit of one wrapped model: what is drawn from its calls, what becomes of it, and what follows from that.

A changed answer quarantines its source: it serves no other request approximately any more, though it still votes. What
a frozen calibration claims survives that. Which neighbour is chosen, and how risky that is, stays the same for every
request; some of those that would be served are computed instead. So no answer changes that would not have changed
before. Under a metric of the user's, where a changed answer may be the better one, sources stay: the mean of losses and
gains, which is what is claimed then, may rise when hits are taken away.

Beside that, requests are compared with those of the calibration. That computes nothing again, and is done with
`audit=0`, too: once requests are unlike, the calibration is void.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from llmcache.audit.account import MOST_WAITING, AuditAccount, Audited
from llmcache.audit.idle_worker import GaveWay, IdleWorker, Job
from llmcache.audit.marking import Marking
from llmcache.audit.recompute import Origin, Recompute, RecomputeQueue, look_at
from llmcache.audit.renewal import RenewalBuffer
from llmcache.banks.cache_banks import CacheBanks
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration
from llmcache.calibration.drift import DriftDetector
from llmcache.calibration.observer import Observer, collect
from llmcache.calibration.risk_target import MetricName
from llmcache.counters import Counters
from llmcache.errors import CalibrationError
from llmcache.fingerprint import Fingerprint
from llmcache.matching.answers import Answers
from llmcache.models.weights import Weights
from llmcache.request.call import Call, Reuse
from llmcache.request.observation import Observation
from llmcache.stats import AuditStats

Compute = Callable[[str, Mapping[str, Tensor]], Any]

_ROUNDING = 0.02  # of the largest output: that much may differ between rows alone and together, in 16 bits


class Audit:
    """Looks into approximate hits of calibrated reuse. Thread-safe; what fails is counted and costs the look."""

    def __init__(
        self,
        banks: CacheBanks,
        fingerprint: Fingerprint,
        calibrated: CalibratedReuse,
        observer: Observer,
        weights: Weights,
        counters: Counters,
        compute: Compute,
        looks: RecomputeQueue,
        origin: Callable[[], Origin],
        floor: float,
        renew_every: int | None,
        in_background: bool,
        share: float,
    ) -> None:
        """Wait for a calibration.

        Args:
            banks: Where sources are.
            fingerprint: That of the calibration.
            calibrated: Told of alarms.
            observer: Reads the answers of what is computed.
            weights: What states depend on.
            counters: Told of failures.
            compute: Runs the model in a namespace on tokenised inputs, in inference mode.
            looks: Empty.
            origin: What decides the model's answers now.
            floor: Least probability with which a hit is audited, 0 to 1; 0: none is.
            renew_every: Requests after which a calibration is renewed; None: never.
            in_background: What waits is done in idle moments, too, not only by `drain` of the shadow.
            share: Of the time of calls, what it may take where they leave no idle moments, 0 to 1.
        """
        self.worker: IdleWorker[Audit] = IdleWorker(self, in_background, share=share)
        self._looks = looks
        self._origin = origin
        self._banks = banks
        self._fingerprint = fingerprint
        self._calibrated = calibrated
        self._observer = observer
        self._answers: Answers = observer.answers
        self._weights = weights
        self._counters = counters
        self._compute = compute
        self._floor = floor
        self._fresh = RenewalBuffer(renew_every)
        self._made: Calibration | None = None  # whose account it is
        self._account: AuditAccount | None = None
        self._likeness: DriftDetector | None = None  # of a certificate that is not void
        self._marking = Marking(banks, calibrated.chooser)
        self._is_renewing = False
        self._n_accounts = 0
        self._n_alarms = 0
        self._lock = threading.RLock()  # who handles a log record may ask for the stats

    # -- while a call is served ----------------------------------------------------------------------------------------

    def catch_up(self) -> float:
        """Before a call: audit hits that have waited for long; returns the seconds that it took, or 0."""
        self._resume()
        return self.worker.catch_up()

    def draw(self, call: Call, decided: Sequence[Reuse]) -> list[Reuse]:
        """Count a call's requests, draw among its approximate hits, and return those that are served.

        None is once requests are unlike those of the calibration. A hit that is drawn while the queue is full is
        computed in the call, not served: so it is audited at once, and the estimate keeps every sample. A hit whose
        source has no known answer could not be audited, and is computed as well.
        """
        ease = self.worker.ease  # where looks wait, fewer are drawn: before anything is known of these requests
        with self._lock:
            if not self._follow(call.read.scope.weights):
                return list(decided)
            kept = decided if self._are_alike(call) else ()
            if self._account is None:
                return list(kept)
            hits = {reuse.row: reuse for reuse in kept if reuse.answer is not None}
            self._draw(self._account, call, hits, ease)
        is_full = self.worker.is_full or len(self._looks) >= MOST_WAITING
        return [hit for hit in hits.values() if not (is_full and hit.row in call.plan.audited)]

    def _draw(self, account: AuditAccount, call: Call, hits: Mapping[int, Reuse], ease: float) -> None:
        """Draw among the rows of a call; those that would be hits are given by row."""
        for row in call.active_rows:
            hit = hits.get(row.number)
            sample = account.see(None if hit is None else hit.share, ease)
            if sample is not None and hit is not None:
                # Of all hits alike: those that were drawn for being risky, or early, are thinned out again.
                stands_for_all = account.toss(ease * self._floor * sample.weight)
                # An example of an answer is not to blame for the forecast that chose it.
                source = "" if hit.rung == "student" else hit.key
                call.plan.audited[row.number] = Audited(sample, source, hit.answer, stands_for_all)
            elif row.number not in call.plan.reused and hit is None and account.toss(ease * self._floor):
                call.plan.audited[row.number] = Audited(None, "", None, True)
        self._hear(account, account.lose_overdue())

    def served(self, call: Call) -> None:
        """Queue hits of a call that has ended to be audited, where they were drawn."""
        served_by = {
            "weights": call.read.scope.weights,
            "attention": call.read.scope.attention,
        }  # others may be there by now
        for row in call.active_rows:
            drawn: Audited | None = call.plan.audited.get(row.number)
            if drawn is None or row.number not in call.plan.reused:
                continue
            with self._counters.guard("have a hit audited") as tried:
                self._looks.add(look_at(call, row, drawn, self._origin()._replace(**served_by)))
            if tried.has_failed:
                self._lose(drawn)
            else:
                self.worker.add(Job(Audit._look_on))

    def withdraw(self, call: Call) -> None:
        """Take back what was drawn of a call whose hits are not served after all."""
        with self._lock:
            for drawn in call.plan.audited.values():
                if drawn.sample is not None:
                    drawn.sample.account.withdraw(drawn.sample)
        call.plan.audited.clear()

    def wanted(self, call: Call) -> Collection[int]:
        """Rows of a call that are to be observed, if they were computed."""
        return range(call.n_rows) if self._calibrated.is_learning else call.plan.audited

    def observe(self, call: Call, seen: Mapping[int, Observation]) -> None:
        """Take in computed rows of a call that has ended."""
        if self._calibrated.is_learning:
            self._calibrated.observe(list(seen.values()))
        for number, drawn in call.plan.audited.items():
            if number in seen:
                self._settle(drawn, seen[number])

    # -- from time to time ---------------------------------------------------------------------------------------------

    def drain(self) -> int:
        """Do all that waits and can be done now; returns how many jobs this thread did."""
        self._resume()
        return self.worker.drain()

    def forget(self, namespace: str | None = None) -> None:
        """Look into nothing that waits, and renew no calibration from what was seen, of one namespace or all."""
        with self.worker.paused():
            self._looks.drop(namespace)
        with self._lock:
            self._fresh.forget(namespace)
            self._marking.forget()  # what is left of others is looked up once more
            if self._likeness is not None:
                self._likeness.forget()

    def stats(self) -> AuditStats:
        """How it stands now."""
        made, status = self._calibrated.calibration, self._calibrated.status(self._weights.digest())
        n_quarantined = len(self._banks.quarantined)
        with self._lock:
            n_waiting = len(self._looks) + self._is_renewing
            account = self._account if made is not None and self._follow(made.weights) else None
            lower, upper = (0.0, 1.0) if account is None else account.bounds
            return AuditStats(
                status=status,
                n_requests=0 if account is None else account.rate.n,
                n_drawn=0 if account is None else account.n_drawn,
                n_recomputed=0 if account is None else account.n_recomputed,
                n_lost=0 if account is None else account.n_lost,
                n_waiting=n_waiting,
                n_changed=0 if account is None else account.n_changed,
                rate=None if account is None else account.rate.mean,
                lower=lower,
                upper=upper,
                n_alarms=self._n_alarms,
                n_quarantined=n_quarantined,
                needed=None if account is None else account.needed,
            )

    # -- in the shadow -------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Audit hits that waited for the model to be as it was when they were served."""
        if self._looks.has_parked and self._can_look:
            for look in self._looks.resume(self._origin(), self._is_over):
                self.worker.add(Job(Audit._look_on, look.since_s))

    @property
    def _can_look(self) -> bool:
        """Whether the model would be computed as it was when it served: it is not in training mode, say."""
        return self._weights.refusal is None and not self._weights.is_training

    def _is_over(self, origin: Origin) -> bool:
        """Whether nothing follows any more from what was served so: the calibration that allowed it has ended."""
        made = self._calibrated.calibration
        return made is None or (made.weights, made.head) != origin[:2]

    def _look_on(self) -> None:
        """Look into the hit that has waited longest and into others, whose own jobs then have less to do."""
        looks = self._looks.take()
        # Where adapters take turns, a verdict takes the one that served. Neither that nor training mode is for ever.
        if looks and (looks[0].origin != self._origin() or not self._can_look):
            self._looks.park([] if self._is_over(looks[0].origin) else looks)
            return
        left = list(looks)
        try:
            self._look(looks, left)
        except GaveWay:
            self._looks.put_back(left)
            raise

    def _look(self, looks: Sequence[Recompute], left: list[Recompute]) -> None:
        """Compute requests that were served, store them, and settle their samples; `left` loses those that are done."""
        try:
            cases = self._compute_again(looks) if looks else []
        except Exception as error:
            if len(looks) == 1:
                _take_out(looks[0], left)
                if self._can_look:
                    self._counters.look(error)
                    self._lose(looks[0].drawn)
                else:  # by now; it tells nothing of the hit
                    self._looks.park(looks)
                return
            for look in looks:  # one of them may be to blame
                self._look([look], left)
            return
        for look in looks:
            _take_out(look, left)
        if not cases:
            self._looks.park(looks)
        for look, case in zip(looks, cases, strict=False):
            if case.row.key == look.key:
                self._take_in(look, case)
            else:
                self._counters.look(CalibrationError("a request that was served is read as another one now"))
                self._lose(look.drawn)

    def _compute_again(self, looks: Sequence[Recompute]) -> list[Observation]:
        """What the model makes of them now; none where it is edited meanwhile: half of it may be another's."""
        origin = self._origin()
        mark = self._weights.mark_of(origin.weights)
        if self._looks.are_tried(looks):
            cases = self._run(looks[0], self._looks.inputs(looks))
        else:
            cases = [case for look in looks for case in self._run(look, self._looks.inputs([look]))]
            self._looks.tried(looks, self._come_out_alike(looks, cases))
        return cases if self._weights.stayed(mark, origin.weights) and self._origin() == origin else []

    def _run(self, look: Recompute, inputs: Mapping[str, Tensor]) -> list[Observation]:
        """Have the model compute inputs as those of a look."""
        device, dtype, is_on = look.autocast
        with torch.autocast(device, dtype=dtype, enabled=is_on):
            return collect(partial(self._compute, look.namespace), self._observer, [inputs])

    def _come_out_alike(self, looks: Sequence[Recompute], alone: Sequence[Observation]) -> bool:
        """Whether requests together, padded, are to the model what each is alone, but for rounding, and keyed alike."""
        try:
            together = self._run(looks[0], self._looks.inputs(looks, is_trial=True))
        except Exception:  # it takes no batches, maybe
            return False
        return all(
            one.row.key == other.row.key
            and np.abs(one.output - other.output).max() <= _ROUNDING * np.abs(other.output).max()
            for one, other in zip(together, alone, strict=True)
        )

    def _take_in(self, look: Recompute, case: Observation) -> None:
        with self._counters.guard("store what was audited"):
            self._keep(case)
        try:
            self._settle(look.drawn, case)
            self._counters.look()
        except Exception as error:
            self._counters.look(error)
            self._lose(look.drawn)

    def _keep(self, case: Observation) -> None:
        """Store a computed request for its own repeats; where sources grow, it becomes one."""
        vectors, fingerprint_epoch = None, self._banks.fingerprint_epoch
        if self._calibrated.is_growing:
            vectors = dict.fromkeys(self._banks.layers, self._fingerprint.project(case.features[None])[0])
        self._banks.put(case.scope, case.row, case.states, vectors=vectors, fingerprint_epoch=fingerprint_epoch)
        self._banks.sign(case.row.key, case.answer)

    def _settle(self, drawn: Audited, case: Observation) -> None:
        """Compare a drawn request's own answer with the one of its source, and draw the consequences."""
        if not self._is_made_now():  # other weights, of the trunk or the head: its answer is another model's
            return
        if drawn.sample is not None:
            assert drawn.answer is not None
            account, is_changed = drawn.sample.account, not self._answers.agree(case.answer, drawn.answer)
            with self._lock:
                made = self._made
                self._hear(account, account.settle(drawn.sample, is_changed))
            if is_changed and drawn.source and made is not None and made.metric in get_args(MetricName):
                self._banks.quarantine(drawn.source, case.scope.namespace)
        if drawn.stands_for_all:
            self._gather(case)

    def _lose(self, drawn: Audited) -> None:
        """A hit will never be audited."""
        if drawn.sample is not None:
            account = drawn.sample.account
            with self._lock:
                self._hear(account, account.lose(drawn.sample))

    def _hear(self, account: AuditAccount, rings: bool) -> None:
        """Have an alarm followed, unless it is that of an account that was closed."""
        if rings and account is self._account and self._made is not None:
            self._n_alarms += 1
            self._calibrated.alarm(self._made)

    def _gather(self, case: Observation) -> None:
        """Keep a request that stands for all; have the calibration renewed where that is due."""
        with self._lock:
            self._fresh.add(case)
            is_due = self._account is not None and self._fresh.is_due(self._account.rate.n) and not self._is_renewing
            self._is_renewing |= is_due
        if is_due:
            self.worker.add(Job(Audit._renew, is_short=False))  # seconds, which no call is to wait for

    def _renew(self) -> None:
        """Calibrate from the newest requests, unless the calibration that they were gathered for has ended."""
        with self._lock:
            made, cases = self._made, self._fresh.cases
        try:
            with self._counters.guard("renew the calibration"):
                if made is not None and self._is_made_now():
                    self._calibrated.renew(made, cases)
        finally:
            self._is_renewing = False

    def _is_made_now(self) -> bool:
        return self._calibrated.is_made_for(self._weights.digest())

    def _are_alike(self, call: Call) -> bool:
        """Hold a call's requests against those of the calibration; once they are unlike, it is told that it is void."""
        likeness, made, scope = self._likeness, self._made, call.read.scope
        if call.progress.is_foretold:  # of bypassed calls, those take part that are held: these are no sample
            return True
        if likeness is None or made is None or not self._calibrated.serves_in(scope.namespace):
            return True
        if not self._calibrated.allowed(scope):  # what is not looked up tells nothing
            return True
        for row in call.active_rows:
            if not likeness.wants(row.key) or (marks := self._marking.find(call, row)) is None:
                continue
            if likeness.see(row.key, marks):
                self._made, self._likeness = self._calibrated.drifted(made), None
                self._fresh.forget(None)  # the next calibration is made of requests like those of now
                return False
        return True

    def _follow(self, weights: str) -> bool:
        """Keep up with the calibration in force; whether there is one for these weights, which serves.

        Each has an account of its own, and a new one after an alarm.
        """
        made = self._calibrated.calibration
        if made is None or made.watch is None or made.chosen is None or made.weights != weights:
            return False
        if made is not self._made:
            self._made, self._n_accounts = made, self._n_accounts + 1
            self._account = self._likeness = None
            if self._floor:
                self._account = AuditAccount(made.watch.most_changed, self._floor, made.delta, seed=self._n_accounts)
            if made.is_certified and made.watch.profile is not None and made.watch.compares:
                self._likeness = DriftDetector(made.watch.profile)
            self._marking.forget()
            self._fresh.begin(made)
        return True


def _take_out(look: Recompute, left: list[Recompute]) -> None:
    left[:] = [other for other in left if other is not look]
