"""The calibration in force and its life: learned, chosen, alarmed, drifted, ended, saved.

    learning     the first requests are computed and observed
    calibrate    the fingerprint and the risk model are fitted, the limit is chosen: see `calibration.py`
    serving      within the limit, for the weights that it was chosen for

Until a calibration succeeds, and after one fails, nothing is reused approximately.
"""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from threadpoolctl import threadpool_limits
from torch import Tensor

from llmcache.config import CacheConfig
from llmcache.errors import CalibrationError
from llmcache.memory.bank import Entry
from llmcache.request.counters import Counters
from llmcache.request.rows import Scope
from llmcache.reuse.calibration import calibration as cal
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.reuse.calibration.inputs import check_labels
from llmcache.reuse.calibration.observer import flaw
from llmcache.reuse.calibration.risk_target import Metric, RiskTarget
from llmcache.reuse.calibration.training import CalibrationFitter
from llmcache.reuse.decide import Semantic
from llmcache.reuse.observation import Observation
from llmcache.reuse.sources import Source
from llmcache.stats import Status
from llmcache.support.arrays import Doubles, Floats, below
from llmcache.support.stacks import pack, unpack
from llmcache.support.threads import SHORT_TURNS, at_fork, compute_alone, forkable, stand_back

logger = logging.getLogger("llmcache")
_CALIBRATION = TypeAdapter(Calibration)

_ALARM = (
    "llmcache: more answers changed, or could not be audited, than max_drop=%g allows; from now on %s is reused "
    "approximately. Calibrate again, on current requests"
)
_DRIFT = (
    "llmcache: requests are no longer like those of the calibration. Its bound is void, and nothing is reused "
    "approximately any more. Calibrate again, on current requests"
)


class CalibratedReuse:
    """Calibrated reuse of one wrapped model. Thread-safe."""

    def __init__(self, fitter: CalibrationFitter, semantic: Semantic, counters: Counters, config: CacheConfig) -> None:
        """Learn from the first requests, or wait for `calibrate`; `semantic` serves by the calibration in force."""
        self.fitter = fitter
        self.semantic = semantic
        #: The latest calibration, with its alarms and drift; kept after it has ended.
        self.latest: Calibration | None = None
        self._answers, self._draft = fitter.answers, fitter.draft
        self._bank = fitter.bank
        self._fitted = {"fingerprint": fitter.fingerprint, **fitter.chooser.fitted}  # by name in saves
        if fitter.draft is not None:
            self._fitted["draft"] = fitter.draft.odds
        self.head = semantic.head
        self._counters = counters
        self._learn = config.learn  # requests after which it calibrates by itself; None: never
        self._renews = config.recalibrate is not None
        self._risk_target = RiskTarget(config.max_drop, config.delta, "changed", config.sources, 0)
        self._is_watched = bool(config.audit)  # else no status says `certified`
        #: Of the sources; forgetting one of them ends the calibration.
        self.namespaces: set[str] = set()
        self._observed: list[Observation] = []
        self._is_calibrating = False
        self._thread: threading.Thread | None = None  # calibrates from requests in service
        at_fork(self._reset_after_fork)
        self._lock = forkable(threading.RLock(), is_waited_for=False)

    @property
    def calibration(self) -> Calibration | None:
        """The calibration in force."""
        return self.semantic.calibration

    @property
    def is_learning(self) -> bool:
        """Whether computed requests are collected for a calibration."""
        return self._learn is not None and self.calibration is None and not self._is_calibrating

    @property
    def may_learn(self) -> bool:
        """Whether requests in service may be calibrated on, at first or for a renewal."""
        return self.is_learning or self._renews

    @property
    def is_growing(self) -> bool:
        """Whether misses become sources."""
        calibration = self.calibration
        return calibration is not None and calibration.limit is not None and calibration.sources == "growing"

    def is_made_for(self, weights: str) -> bool:
        """Whether the calibration was made for these weights of the trunk and the present weights of the head."""
        calibration = self.calibration
        return calibration is not None and calibration.weights == weights and calibration.head == self.head.digest()

    @property
    def draft_name(self) -> str:
        """Name of the draft that calibrations are made with now; "" without one."""
        return "" if self._draft is None else self._draft.drafter_name

    def end(self) -> None:
        """End the calibration: nothing is reused approximately, and its sources may be evicted."""
        with self._lock:
            self.semantic.calibration, self.namespaces = None, set()
            self.fitter.clear()

    def forget(self, namespace: str | None = None) -> None:
        """Drop the collected requests of a namespace (None: all), and end a calibration with sources in it."""
        with self._lock:
            self._observed = [case for case in self._observed if namespace not in (None, case.scope.namespace)]
            if self.calibration is not None and namespace in (None, *self.namespaces):
                self.end()

    def remaining(self, observed: Sequence[Observation]) -> list[Observation]:
        """Return the requests that were neither purged nor forgotten since they were computed."""
        is_current = self._bank.purges.is_current
        return [case for case in observed if is_current(case.scope.namespace, case.row.key, case.generation)]

    def keep(self, observed: Sequence[Observation]) -> None:
        """Keep requests valid to learn from that were observed before the cache was cleared."""
        for case in observed:
            case.generation = self._bank.purges.generation

    def observe(self, observations: Sequence[Observation]) -> None:
        """Collect computed requests; once there are `learn` of them, calibrate in a thread."""
        if not self.is_learning:
            return
        with self._lock:
            if not self.is_learning:
                return
            for case in self.remaining(observations):
                if wrong := flaw(case):
                    self._counters.error("learn from a request", CalibrationError(wrong))
                else:
                    self._observed.append(case)
            if len(self._observed) < (self._learn or 0):
                return
            observed, self._observed, self._is_calibrating = self._observed, [], True
            self._thread = threading.Thread(target=self._learn_from, args=(observed,), name="llmcache-learn")
            self._thread.start()

    def _learn_from(self, observed: Sequence[Observation]) -> None:
        compute_alone()
        stand_back()
        try:
            with self._lock:  # so that no purge comes between
                left = self.remaining(observed)
                if len(left) < len(observed):  # some were purged: go on learning with the others
                    self._observed, self._is_calibrating = [*left, *self._observed], False
                    return
                with SHORT_TURNS:
                    self.calibrate(left, self._risk_target)
        except CalibrationError as error:
            self._learn = None
            self._counters.error("calibrate", error, is_of_call=False)

    def settle(self) -> None:
        """Wait for a calibration that `observe` started."""
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def _reset_after_fork(self) -> None:
        """Reset in a forked child, in which no thread calibrates."""
        self._thread, self._is_calibrating = None, False

    def check(self, first: Observation, labels: Sequence[Any], risk_target: RiskTarget) -> None:
        """Refuse labels that the metric cannot use, and a metric that cannot score the first request as computed."""
        if risk_target.metric == "changed":
            return
        if (unlabelled := sum(label is None for label in labels)) > 0:
            raise CalibrationError(
                f"metric {risk_target.name!r} needs a label for every request ({unlabelled} of {len(labels)} have "
                "none): give labels=[...]"
            )
        if isinstance(risk_target.metric, Metric):
            cal.losses(risk_target.metric, [first.output], [first.output], labels[:1], [first.number])
        else:
            check_labels(labels, len(first.output), self._answers)

    def calibrate(self, observed: Sequence[Observation], risk_target: RiskTarget) -> Calibration:
        """Learn from requests, choose the limit and serve within it. The previous calibration ends.

        The requests were computed, and have labels if the metric needs them. If they cannot support the claim, or the
        metric fails, nothing is reused approximately.

        Raises:
            CalibrationError: The requests or labels do not suffice, or learning failed.
        """
        with self._lock:
            self.end()
            self._is_calibrating = True  # calls meanwhile must not wait for the lock
            try:
                # NumPy's BLAS has threads of its own, which spin: beside calls in service both would take far longer.
                with threadpool_limits(limits=1, user_api="blas"):
                    return self._calibrate(observed, risk_target)
            except Exception as error:
                self.end()
                if isinstance(error, CalibrationError):
                    raise
                raise CalibrationError(f"could not learn from these requests: {error!r}") from error
            finally:
                self._is_calibrating = False
                self.fitter.forget()

    def renew(self, calibration: Calibration, observed: Sequence[Observation]) -> None:
        """Calibrate again with the claim of a calibration, unless it has ended; if requests are too few, it stays."""
        with self._lock:
            if self.calibration is calibration:
                observed = self.remaining(observed)
                risk_target = RiskTarget(calibration.max_drop, calibration.delta, "changed", calibration.sources, 0)
                self._divide(observed, risk_target)
                with SHORT_TURNS:
                    self.calibrate(observed, risk_target)

    def alarm(self, calibration: Calibration) -> None:
        """React to an alarm: the first lowers the limit to half of the hits, the second ends the calibration."""
        with self._lock:
            if self.calibration is not calibration:
                return
            updated = replace(calibration, n_alarms=calibration.n_alarms + 1)
            if calibration.n_alarms:
                self.end()
            else:
                self.semantic.calibration = updated
            self.latest = updated
        logger.warning(_ALARM, calibration.max_drop, "nothing" if calibration.n_alarms else "half as much")

    def drifted(self, calibration: Calibration) -> Calibration:
        """Declare a calibration as void because requests are unlike those it was made with; return it.

        The rate of changed answers is then unknown, and with `audit=0` not measured. So approximate reuse stops until
        the next calibration: by `calibrate`, a renewal, or `learn`.
        """
        with self._lock:
            updated = replace(calibration, has_drifted=True)
            if self.calibration is calibration:
                self.semantic.calibration = updated
                if self._learn is not None:
                    self.end()
                self.latest = updated
        logger.warning(_DRIFT)
        return updated

    def status(self, weights: str) -> Status:
        """Return the status of approximate reuse for weights with this digest."""
        calibration = self.calibration
        if calibration is None or calibration.chosen is None:
            return "learning" if self.is_learning or self._is_calibrating else "off"
        if not self.is_made_for(weights):
            return "other weights"
        if calibration.has_drifted:
            return "drifted"
        if self._counters.is_failing:
            return "failing"
        if calibration.n_alarms:
            return "tightened"
        if calibration.sources == "growing":
            return "growing"
        return "certified" if self._is_watched else "unwatched"

    def learn(self, cases: Sequence[Observation]) -> Doubles:
        """Fit to requests, which become sources, without choosing a limit; for replays.

        Returns candidate limits (K,), strictest first.
        """
        with self._lock:
            self.end()
            return self.fitter.fit(list({case.row.key: case for case in cases}.values()))

    def _calibrate(self, observed: Sequence[Observation], risk_target: RiskTarget) -> Calibration:
        started = perf_counter()
        if {case.drafted_by for case in observed} != {self.draft_name}:
            logger.warning("llmcache: no draft serves, as it failed or was edited meanwhile: call calibrate() again")
            observed = [replace(case, draft=None) for case in observed]
        learned, tested = self._divide(observed, risk_target)
        sources = {case.row.key: case for case in learned}
        limits = self.fitter.fit(list(sources.values()), risk_target)
        looked_from = perf_counter()
        trial = self.fitter.trial(tested, sources, risk_target.metric)
        lookup_s = perf_counter() - looked_from
        curve = cal.try_limits(trial, limits, risk_target.max_drop, risk_target.delta)
        chosen = cal.choose_limit(curve, risk_target.max_drop)
        watch = None
        if chosen is not None and risk_target.metric == "changed":
            watch = cal.watch(trial, chosen, risk_target.max_drop, risk_target.delta)
        elif chosen is not None:
            watch = cal.watch(self.fitter.trial(tested, sources, "changed"), chosen, None, risk_target.delta)
        if watch is not None and chosen is not None and risk_target.sources == "frozen":
            limit = chosen.limit * next(iter(self.fitter.shares.values()))
            watch = replace(watch, profile=self.fitter.profile(tested, sources, limit))
        if risk_target.sources == "growing":
            sources |= {case.row.key: case for case in tested}
            self.fitter.refit(list(sources.values()), is_pinned=False)
        calibration = Calibration(
            chosen=chosen,
            curve=curve,
            metric=risk_target.name,
            max_drop=risk_target.max_drop,
            delta=risk_target.delta,
            n_sources=len(sources),
            n_tested=len(tested),
            sources=risk_target.sources,
            weights=learned[0].scope.weights,
            head=learned[0].head,
            seconds=perf_counter() - started,
            model_ms=float(np.median([case.seconds for case in tested])) * 1e3,
            lookup_ms=self.fitter.lookup_s(trial, chosen, lookup_s / len(tested)) * 1e3,
            watch=watch,
            shares=self.fitter.shares,
            draft=self.draft_name if any(case.draft is not None for case in learned) else "",
            drafted=self.fitter.draft_alone(tested, risk_target.delta) if self._answers.reads_payload else None,
            engine=learned[0].scope.engine,
        )
        self.namespaces = {case.scope.namespace for case in sources.values()}
        self.semantic.calibration = self.latest = calibration
        return calibration

    def state(self, weights: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the calibration for these weights, to be saved: result, fitted arrays and all sources."""
        with self._lock:
            calibration, sources = self.calibration, list(self.fitter.sources)
            if calibration is None or calibration.weights != weights or not sources:
                return None, {}
            meta, tensors = pack([(s.tensors, (*s.entry.about, s.ids.hex(), s.length)) for s in sources])
            learned = {
                f"{of}.{name}": array for of, part in self._fitted.items() for name, array in part.state().items()
            }
            learned |= {
                "vectors": self.fitter.sources.vectors(sources),
                "answers": np.stack([s.answer for s in sources]),
            }
            about = {
                "calibration": _CALIBRATION.dump_python(calibration, mode="json"),
                "namespaces": sorted(self.namespaces),
                "quarantined": dict(self.fitter.sources.quarantined),
                "sources": meta,
            }
            return about, tensors | {name: torch.from_numpy(array.copy()) for name, array in learned.items()}

    def grow(
        self, calibration: Calibration | None, cases: Mapping[int, Observation], vectors: Mapping[int, Floats]
    ) -> None:
        """Make computed requests sources, if the calibration in force has growing sources.

        Args:
            made: The calibration in force when the vectors were made.
            cases: Computed requests by row number.
            vectors: Fingerprints (F,) by row number; requests without one are left out.
        """
        sources = self.fitter.sources
        fresh = {n: case for n, case in cases.items() if n in vectors and case.entry.key == case.row.key}
        pairs = [(self.fitter.source_of(case), vectors[n]) for n, case in fresh.items()]  # each request once
        with sources.lock:  # `end` resets `calibration` before it clears the sources
            if calibration is not self.calibration or not self.is_growing:
                return
            if pairs:
                sources.add([source for source, _ in pairs], np.stack([vector for _, vector in pairs]))
            for source, _ in pairs:
                if source.key not in self._bank:  # too large, or evicted meanwhile
                    sources.remove(source.key)

    def held(self) -> AbstractContextManager[object]:
        """Return a context in which no calibration begins or ends."""
        return self._lock

    def restore(self, meta: Any, tensors: Mapping[str, Tensor], gone: Collection[str] = ()) -> None:
        """Restore what `state` returned, and serve within its limit. Sources whose key is in `gone` are buried.

        Raises:
            ValueError: The sources do not fit the budgets.
        """
        if meta is None:
            return
        calibration = _CALIBRATION.validate_python(meta["calibration"])
        if calibration.draft not in ("", self.draft_name):
            logger.warning("llmcache: a calibration with the draft %r is left out: call calibrate()", calibration.draft)
            return
        arrays = {name: tensor.numpy() for name, tensor in tensors.items() if "/" not in name}
        sources = []
        records = unpack(meta["sources"], {name: tensor for name, tensor in tensors.items() if "/" in name})
        for (own, (key, scope, layout, ids, length)), answer in zip(records, arrays["answers"], strict=True):
            held = {} if key in gone else own
            logits = held.pop("logits", None)
            entry = Entry.of(key, Scope(*scope), held, layout)
            output = None if logits is None else logits.numpy()
            sources.append(Source(entry, bytes.fromhex(ids), answer, length, output))
        with self._lock:
            self.end()
            for of, part in self._fitted.items():
                part.restore(below(f"{of}.", arrays))
            self.fitter.shares = calibration.shares
            self.fitter.forget()
            entries = [source.entry for source in sources if source.entry.fields]
            if calibration.sources == "growing":
                for entry in entries:
                    self._bank.put([entry], self._bank.purges.generation)
            elif not self._bank.pin(entries):
                raise ValueError("max_bytes or max_entries are too small for the sources of the calibration")
            self.fitter.sources.add(sources, arrays["vectors"])
            for key, namespace in meta["quarantined"].items():
                self.fitter.sources.quarantine(key, namespace)
            for source in sources:
                if source.key in gone:
                    self.fitter.sources.bury(source.key, source.entry.scope.namespace)
            self.namespaces = set(meta["namespaces"])
            self.semantic.calibration = self.latest = calibration

    def _divide(self, observed: Sequence[Observation], risk_target: RiskTarget) -> list[list[Observation]]:
        """Divide requests into those to learn from and those to test on; refuse too few, or unfit labels."""
        cal.check_size(len(observed), risk_target.max_drop, risk_target.delta, risk_target.metric)
        if len(weights := {(case.scope.weights, case.head) for case in observed}) > 1:
            raise CalibrationError(
                f"the requests were computed with {len(weights)} different weights: do not edit the model meanwhile"
            )
        parts = [[observed[i] for i in part] for part in cal.split(len(observed), risk_target)]
        if (n := len({case.row.key for case in parts[0]})) < cal.LEAST_SOURCES:
            raise CalibrationError(
                f"only {n} different requests among the {len(parts[0])} to learn from; at least "
                f"{cal.LEAST_SOURCES} are needed: give more requests that differ"
            )
        self.check(observed[0], [case.label for case in observed], risk_target)
        return parts
