"""Who may serve whom, and how that is learned: the state of approximate reuse that is calibrated.

    learning     the first requests are computed and observed
    calibrate    fingerprint fitted, decision taught, limit chosen: `calibration.py` says how
    serving      within the limit, for the weights that it was chosen for

Until a calibration has succeeded, and after one that failed, nothing is reused approximately.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from math import inf
from time import perf_counter

import numpy as np

from llmcache import calibration as cal
from llmcache.answers import Answers
from llmcache.arrays import Doubles, Floats
from llmcache.calibration import Calibration, Trial
from llmcache.claim import Claim, Metric, MetricName
from llmcache.context import Scope
from llmcache.errors import CalibrationError
from llmcache.fingerprint import Fingerprint
from llmcache.fingerprint.tokens import TokenVectors
from llmcache.library import Library
from llmcache.observation import Observation
from llmcache.reuse.semantic import Chooser
from llmcache.stats import Counters, Status
from llmcache.weights import Weights


class Trust:
    """Calibrated reuse of one wrapped model. Thread-safe."""

    def __init__(
        self,
        library: Library,
        fingerprint: Fingerprint,
        tokens: TokenVectors | None,
        chooser: Chooser,
        answers: Answers,
        head: Weights,
        counters: Counters,
        learn: int | None,
        claim: Claim,
    ) -> None:
        """Begin to learn, or wait to be calibrated.

        Args:
            library: Where sources are held.
            fingerprint: Not fitted yet.
            tokens: Where it takes vectors of tokens from, or None.
            chooser: Not taught yet.
            answers: The kind of the model's answers.
            head: What of the model makes the answers.
            counters: Told of failures.
            learn: Requests after which it calibrates by itself; None: when told.
            claim: What it then shows.
        """
        self.chooser = chooser
        self.calibration: Calibration | None = None
        self.tightened: ContextVar[float] = ContextVar("llmcache_tightened", default=inf)
        self._answers = answers
        self._library = library
        self._fingerprint = fingerprint
        self._tokens = tokens
        self._head = head
        self._counters = counters
        self._learn = learn
        self._claim = claim
        self._namespaces: set[str] = set()  # of those who serve
        self._observed: list[Observation] = []
        self._limits: dict[int, float] = {}
        self._is_calibrating = False
        self._lock = threading.RLock()

    @property
    def is_learning(self) -> bool:
        """Whether computed requests are wanted."""
        return self._learn is not None and self.calibration is None and not self._is_calibrating

    @property
    def is_growing(self) -> bool:
        """Whether misses become sources."""
        return bool(self._limits) and self.calibration is not None and self.calibration.sources == "growing"

    def allowed(self, scope: Scope) -> Mapping[int, float]:
        """Largest doubt by layer: nothing for other weights than those of the calibration, the head's included."""
        if not self._limits or not self.is_made_for(scope.weights):
            return {}
        least = self.tightened.get()
        return self._limits if least == inf else {layer: min(limit, least) for layer, limit in self._limits.items()}

    def is_made_for(self, weights: str) -> bool:
        """Whether there is a calibration, and it is one of this trunk and of the head as it is now."""
        made = self.calibration
        return made is not None and made.weights == weights and made.head == self._head.digest()

    def end(self) -> None:
        """Reuse nothing approximately any more; what served may leave."""
        with self._lock:
            self._limits, self.calibration = {}, None
            self._library.search_by(None)

    def forget(self, namespace: str | None = None) -> None:
        """Learn nothing from requests seen so far, of one namespace or all; a calibration that rests on them ends."""
        with self._lock:
            self._observed = [case for case in self._observed if namespace not in (None, case.scope.namespace)]
            if self.calibration is not None and namespace in (None, *self._namespaces):
                self.end()

    def observe(self, observations: Sequence[Observation]) -> None:
        """Take in requests that were computed; with the last one that is needed, calibrate."""
        with self._lock:
            if not self.is_learning:
                return
            self._observed += [case for case in observations if np.isfinite(case.target).all()]
            if len(self._observed) < (self._learn or 0):
                return
            observed, self._observed = self._observed, []
            try:
                self.calibrate(observed, self._claim)
            except CalibrationError as error:
                self._learn = None
                self._counters.error("calibrate", error)

    def calibrate(self, observed: Sequence[Observation], claim: Claim) -> Calibration:
        """Learn from requests, choose the limit and serve within it. What was calibrated before ends.

        Args:
            observed: Requests that were computed, with labels where the metric asks for them.
            claim: What is to be shown.

        Raises:
            CalibrationError: They cannot carry the claim, or the metric failed; nothing is reused approximately then.
        """
        with self._lock:
            self.end()
            self._is_calibrating = True  # calls that go on meanwhile are not to wait for the lock
            try:
                return self._calibrate(observed, claim)
            except Exception as error:
                self.end()
                if isinstance(error, CalibrationError):
                    raise
                raise CalibrationError(f"could not learn from these requests: {error!r}") from error
            finally:
                self._is_calibrating = False

    def renew(self, made: Calibration, observed: Sequence[Observation]) -> None:
        """Calibrate anew, as before, unless that calibration has ended meanwhile.

        Raises:
            CalibrationError: They cannot carry the claim, and the calibration stays; or what `calibrate` raises.
        """
        with self._lock:
            if self.calibration is made:
                claim = Claim(made.max_drop, made.delta, "changed", made.sources, 0)
                self._divide(observed, claim)
                self.calibrate(observed, claim)

    def alarm(self, made: Calibration) -> None:
        """More is lost than a calibration allows: at the first alarm serve half as much, at the second nothing."""
        with self._lock:
            if self.calibration is made and made.n_alarms:
                self.end()
            elif self.calibration is made:
                self._serve(replace(made, n_alarms=1))

    def status(self, weights: str) -> Status:
        """How approximate reuse stands for the weights that the trunk has now."""
        made = self.calibration
        if made is None or made.limit is None:
            return "learning" if self.is_learning else "off"
        if not self.is_made_for(weights):
            return "other weights"
        return "tightened" if made.n_alarms else "growing" if made.sources == "growing" else "certified"

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _calibrate(self, observed: Sequence[Observation], claim: Claim) -> Calibration:
        started = perf_counter()
        a, b, c = self._divide(observed, claim)
        self._fit(a)
        known = {case.row.key: case for case in a}
        limits = cal.settings(self._teach([case for case in b if case.row.key not in known]))
        self._stand(b, is_kept=True)
        sources = known | {case.row.key: case for case in b}
        trial = self._try(c, sources, claim.metric)
        tested = cal.try_settings(trial, limits[limits <= self.chooser.most], claim.max_drop, claim.delta)
        if claim.sources == "growing":
            self._stand(c, is_kept=False)
        chosen, counts_changes = cal.chosen(tested, claim.max_drop), claim.metric == "changed"
        changes = trial if counts_changes else self._try(c, sources, "changed")
        calibration = Calibration(
            chosen=chosen,
            curve=tested,
            metric=claim.name,
            max_drop=claim.max_drop,
            delta=claim.delta,
            n_sources=len(sources),
            n_fitted=len(a),
            n_tested=len(c),
            sources=claim.sources,
            weights=a[0].scope.weights,
            head=self._head.digest(),
            seconds=perf_counter() - started,
            watch=cal.watch(changes, chosen, claim.max_drop if counts_changes else None, claim.delta),
        )
        self._namespaces = {case.scope.namespace for case in (*a, *b)}
        self._serve(calibration)
        return calibration

    def state(self) -> dict[str, Floats]:
        """What was learned, but for the fingerprint, which the library has."""
        return self.chooser.state()

    def restore(self, calibration: Calibration, state: Mapping[str, Floats]) -> None:
        """Take up a calibration, and what was learned for it. The library is filled afterwards."""
        self.chooser.restore(state)
        self._library.search_by(self._fingerprint)
        self._serve(calibration)

    def _serve(self, calibration: Calibration) -> None:
        self.calibration = calibration
        if calibration.limit is not None:
            self._limits = dict.fromkeys(self._library.layers, calibration.limit)

    def _divide(self, observed: Sequence[Observation], claim: Claim) -> list[list[Observation]]:
        """Parts A, B and C of requests that can carry the claim."""
        cal.check_size(len(observed), claim.max_drop, claim.delta, claim.metric)
        if len(weights := {case.scope.weights for case in observed}) > 1:
            raise CalibrationError(
                f"the requests were computed with {len(weights)} different weights: do not edit the model meanwhile"
            )
        parts = [[observed[i] for i in part] for part in cal.split(len(observed), claim.seed)]
        if (n := len({case.row.key for case in parts[0]})) < cal.LEAST_SOURCES:
            raise CalibrationError(
                f"only {n} different requests among the {len(parts[0])} that the fingerprint is fitted on; at least "
                f"{cal.LEAST_SOURCES} are needed: give more requests that differ"
            )
        if claim.metric != "changed" and any(case.label is None for case in observed):
            raise CalibrationError(f"metric {claim.metric!r} needs a label for every request: give labels=[...]")
        if claim.metric == "accuracy":
            _check_labels(observed, self._answers)
        return parts

    def _fit(self, a: Sequence[Observation]) -> None:
        """Fit the fingerprint on A, and let A be found."""
        if self._tokens is not None:
            self._tokens.frame(a[0].row, a[0].features)
        self._fingerprint.fit([case.features for case in a], _targets(a, self._answers))
        self.chooser.learn(a)
        self._library.search_by(self._fingerprint)
        self._stand(a, is_kept=True)

    def _teach(self, b: Sequence[Observation]) -> Doubles:
        """Teach the decision by B, and return its doubts about B."""
        self.chooser.teach(b, self._vectors(b))
        return self._doubts(b, set())[0]

    def _try(self, c: Sequence[Observation], sources: Mapping[str, Observation], metric: MetricName | Metric) -> Trial:
        """What would become of C, served by A and B."""
        doubt, found = self._doubts(c, set(sources))
        served_by = [None if key is None else sources[key] for key in found]
        if isinstance(metric, Metric):
            outputs = [None if source is None else source.output for source in served_by]
            loss = cal.losses(metric, [case.output for case in c], outputs, [case.label for case in c])
            span = metric.high - metric.low
            return Trial(doubt, loss, -span, span, is_share=False)
        pairs = list(zip(c, served_by, strict=True))
        counts = self._is_changed if metric == "changed" else self._goes_wrong
        return Trial(
            doubt, np.array([source is not None and counts(case, source) for case, source in pairs], np.float64)
        )

    def _doubts(self, cases: Sequence[Observation], repeated: Collection[str]) -> tuple[Doubles, list[str | None]]:
        """The doubt about each request (N,), and who would serve it; those that are stored themselves have no doubt."""
        doubt = np.full(len(cases), inf)
        found: list[str | None] = [None] * len(cases)
        vectors = self._vectors(cases)
        for i, case in enumerate(cases):
            if case.row.key in repeated:
                doubt[i], found[i] = -inf, case.row.key
            elif (choice := self.chooser.choose(case.scope, [case.row], vectors[i : i + 1])[0]) is not None:
                doubt[i], found[i] = choice.doubt, choice.neighbour.key
        return doubt, found

    def _stand(self, cases: Sequence[Observation], is_kept: bool) -> None:
        """Let requests serve others."""
        for case, vector in zip(cases, self._vectors(cases), strict=True):
            if case.states:
                self._library.put(case.scope, case.row, case.states)
            self._library.sign(case.row.key, case.answer)
            if not self._library.stand(case.row, vector, is_kept) and is_kept:
                raise CalibrationError(
                    "not all requests that are to serve are held: raise max_entries or max_bytes, or give fewer"
                )

    def _vectors(self, cases: Sequence[Observation]) -> Floats:
        return np.concatenate([self._fingerprint.project(case.features[None]) for case in cases])

    def _is_changed(self, case: Observation, source: Observation) -> bool:
        return not self._answers.agree(case.answer, source.answer)

    def _goes_wrong(self, case: Observation, source: Observation) -> bool:
        """Whether the answer was right and no longer is."""
        right = np.array([case.label], np.float32)
        return bool(self._answers.agree(case.answer, right) and not self._answers.agree(source.answer, right))


def _targets(cases: Sequence[Observation], answers: Answers) -> Floats:
    """What the model made of requests (N, T): final states, and beside them logits, of as much weight."""
    kinds = [np.stack([case.target for case in cases])]
    if not answers.reads_payload:
        logits = np.stack([case.output for case in cases])
        kinds.append(logits - logits.mean(axis=1, keepdims=True))
    centred = [kind - kind.mean(axis=0) for kind in kinds]
    return np.concatenate([kind / max(float(np.sqrt((kind**2).sum(axis=1).mean())), 1e-6) for kind in centred], axis=1)


def _check_labels(cases: Sequence[Observation], answers: Answers) -> None:
    """Refuse labels that the head does not know, and answers that no label is compared with."""
    if answers.name != "class":
        raise CalibrationError(
            f"metric 'accuracy' is one of classes, and this model answers with kind {answers.name!r}: give a Metric"
        )
    known = range(len(cases[0].output))
    if strange := sorted({repr(case.label) for case in cases if case.label not in known}):
        raise CalibrationError(
            f"labels that the head does not know: {', '.join(strange[:5])}; it answers with classes 0 to {known[-1]}: "
            "give their numbers, or their names in the model's config"
        )
