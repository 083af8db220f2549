"""Who may serve whom, and how that is learned: the state of approximate reuse that is calibrated.

    learning     the first requests are computed and observed
    calibrate    fingerprint fitted, decision taught, limit chosen: `calibration.py` says how
    serving      within the limit, for the weights that it was chosen for

Until a calibration has succeeded, and after one that failed, nothing is reused approximately.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from math import inf
from time import perf_counter

import numpy as np

from llmcache import calibration as cal
from llmcache.answers import Answers
from llmcache.arrays import Doubles, Floats
from llmcache.calibration import Calibration, Trial
from llmcache.claim import Claim, Metric
from llmcache.context import Scope
from llmcache.errors import CalibrationError
from llmcache.fingerprint import Fingerprint
from llmcache.fingerprint.tokens import TokenVectors
from llmcache.library import Library
from llmcache.observation import Observation, check_labels, targets
from llmcache.reuse.semantic import Chooser
from llmcache.stats import Counters
from llmcache.weights import Weights

#: Shares of A and B where nothing is left for C.
_OF_LEARNING = tuple(share / (1 - cal.SHARES[2]) for share in cal.SHARES[:2])


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
        self._lock = threading.RLock()

    @property
    def is_learning(self) -> bool:
        """Whether computed requests are wanted."""
        return self._learn is not None and self.calibration is None

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
            try:
                return self._calibrate(observed, claim)
            except Exception as error:
                self.end()
                if isinstance(error, CalibrationError):
                    raise
                raise CalibrationError(f"could not learn from these requests: {error!r}") from error

    # -- steps of a calibration, for replays of observed requests ------------------------------------------------------

    def learn(self, cases: Sequence[Observation], seed: int = 0) -> Doubles:
        """Fit fingerprint and decision on requests, which all serve from then on. Nothing is allowed yet.

        Args:
            cases: What a calibration would take for A and B together.
            seed: Of their division.

        Returns:
            Limits worth trying, strictest first (K,).
        """
        with self._lock:
            self.end()
            a, b = cal.split(len(cases), seed, _OF_LEARNING)
            return self._learn_from([cases[i] for i in a], [cases[i] for i in b])

    def restart(self, cases: Sequence[Observation], is_kept: bool = False) -> None:
        """Let these requests serve, and no others; what was learned stays. With `is_kept`, nothing makes them leave."""
        self._library.search_by(self._fingerprint)
        self.stand(cases, is_kept)

    def stand(self, cases: Sequence[Observation], is_kept: bool = False) -> None:
        """Let requests serve, too.

        Raises:
            CalibrationError: They are to be kept, and not all are held.
        """
        for case, vector in zip(cases, self._vectors(cases), strict=True):
            if case.states:
                self._library.put(case.scope, case.row, case.states)
            self._library.sign(case.row.key, case.answer)
            if not self._library.stand(case.row, vector, is_kept) and is_kept:
                raise CalibrationError(
                    "not all requests that are to serve are held: raise max_entries or max_bytes, or give fewer"
                )

    def doubts(self, cases: Sequence[Observation], repeated: Collection[str]) -> tuple[Doubles, list[str | None]]:
        """The doubt about each request (N,), and the key of who would serve it.

        Args:
            cases: Requests.
            repeated: Keys of requests that are stored themselves: about those there is no doubt.

        Returns:
            Doubts, -infinite of repeats and infinite where none may serve; and keys, None where none was found.
        """
        doubt = np.full(len(cases), inf)
        found: list[str | None] = [None] * len(cases)
        vectors = self._vectors(cases)
        for i, case in enumerate(cases):
            if case.row.key in repeated:
                doubt[i], found[i] = -inf, case.row.key
            elif (choice := self.chooser.choose(case.scope, [case.row], vectors[i : i + 1])[0]) is not None:
                doubt[i], found[i] = choice.doubt, choice.neighbour.key
        return doubt, found

    def trial(self, cases: Sequence[Observation], sources: Mapping[str, Observation], claim: Claim) -> Trial:
        """What would become of requests, C for instance, served by those that stand.

        Args:
            cases: Requests.
            sources: Those that stand, by key.
            claim: Says what is lost.
        """
        doubt, found = self.doubts(cases, set(sources))
        served_by = [None if key is None else sources[key] for key in found]
        if isinstance(claim.metric, Metric):
            outputs = [None if source is None else source.output for source in served_by]
            loss = cal.losses(claim.metric, [case.output for case in cases], outputs, [case.label for case in cases])
            span = claim.metric.high - claim.metric.low
            return Trial(doubt, loss, -span, span, is_share=False)
        pairs = list(zip(cases, served_by, strict=True))
        counts = self._is_changed if claim.metric == "changed" else self._goes_wrong
        return Trial(
            doubt, np.array([source is not None and counts(case, source) for case, source in pairs], np.float64)
        )

    # -- how they are done ---------------------------------------------------------------------------------------------

    def _calibrate(self, observed: Sequence[Observation], claim: Claim) -> Calibration:
        started = perf_counter()
        a, b, c = self._divide(observed, claim)
        limits = self._learn_from(a, b)
        sources = {case.row.key: case for case in (*a, *b)}
        tested = cal.try_settings(self.trial(c, sources, claim), limits, claim.max_drop, claim.delta)
        if claim.sources == "growing":
            self.stand(c)
        calibration = Calibration(
            chosen=cal.chosen(tested, claim.max_drop),
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
        if calibration.chosen is not None:
            self._limits = dict.fromkeys(self._library.layers, calibration.chosen.limit)

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
            check_labels(observed, self._answers)
        return parts

    def _learn_from(self, a: Sequence[Observation], b: Sequence[Observation]) -> Doubles:
        """Fit on A, teach by B, and let both serve; returns limits worth trying."""
        self._fit(a)
        known = {case.row.key for case in a}
        limits = cal.settings(self._teach([case for case in b if case.row.key not in known]))
        self.stand(b, is_kept=True)
        allowed: Doubles = limits[limits <= self.chooser.most]
        return allowed

    def _fit(self, a: Sequence[Observation]) -> None:
        """Fit the fingerprint on A, and let A be found."""
        if self._tokens is not None:
            self._tokens.frame(a[0].row, a[0].features)
        self._fingerprint.fit([case.features for case in a], targets(a, self._answers))
        self.chooser.learn(a)
        self.restart(a, is_kept=True)

    def _teach(self, b: Sequence[Observation]) -> Doubles:
        """Teach the decision by B, and return its doubts about B."""
        self.chooser.teach(b, self._vectors(b))
        return self.doubts(b, set())[0]

    def _vectors(self, cases: Sequence[Observation]) -> Floats:
        return np.concatenate([self._fingerprint.project(case.features[None]) for case in cases])

    def _is_changed(self, case: Observation, source: Observation) -> bool:
        return not self._answers.agree(case.answer, source.answer)

    def _goes_wrong(self, case: Observation, source: Observation) -> bool:
        """Whether the answer was right and no longer is."""
        right = np.array([case.label], np.float32)
        return bool(self._answers.agree(case.answer, right) and not self._answers.agree(source.answer, right))
