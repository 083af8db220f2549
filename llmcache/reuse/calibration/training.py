"""Fits fingerprint and risk model to computed requests, and makes these the sources.

The risk model must learn from requests that the fingerprint was not fitted to. So requests take turns (cross-fitting):
each fifth is looked up among the other four, by a fingerprint fitted to these alone. The risk model is fitted to all
these lookups; then the fingerprint is fitted once more, to all requests.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

from llmcache.errors import CalibrationError
from llmcache.memory.bank import Bank
from llmcache.reuse.answers import Answers
from llmcache.reuse.calibration.calibration import (
    DRAFT,
    SEMANTIC,
    Costs,
    HoldoutOutcome,
    OperatingPoint,
    candidate_limits,
    choose_shares,
    combined,
    losses,
    try_limits,
)
from llmcache.reuse.calibration.drift import Features, Profile, features_of, features_of_source, profile
from llmcache.reuse.calibration.observer import outputs, targets
from llmcache.reuse.calibration.risk_target import Metric, MetricName, RiskTarget
from llmcache.reuse.calibration.token_vectors import TokenVectors
from llmcache.reuse.decide import MAX_RISK, NeighbourChooser
from llmcache.reuse.draft import Draft
from llmcache.reuse.fingerprint import LearnedFingerprint
from llmcache.reuse.observation import Observation
from llmcache.reuse.sources import Choice, Source, Sources
from llmcache.support.arrays import Doubles, Floats

N_TURNS = 5
_N_TIMED = 32  # look-ups
_N_BULK = 1 << 20  # numbers, 8 MB: more than the level-2 cache of a core


class Found(NamedTuple):
    """The source that would serve a request, and its risk."""

    risk: float  # -infinite for a repeat of a source, infinite if no source may serve
    key: str | None  # of the source; None if there is none
    rung: str  # that finds it; "" if none does


@dataclass(eq=False)
class CalibrationFitter:
    """Fits the parts of one wrapped model. One thread at a time."""

    bank: Bank
    sources: Sources
    fingerprint: LearnedFingerprint
    tokens: TokenVectors  # for the fingerprint
    chooser: NeighbourChooser
    answers: Answers
    draft: "Draft | None" = None
    keeps_logits: bool = False  # of sources, which then answer without the model's head
    #: Rungs in use and their shares, see `calibration.choose_shares`.
    shares: Mapping[str, float] = field(init=False, default_factory=lambda: {SEMANTIC: 1.0})
    model_s: float = field(init=False, default=0.0)  # of a request alone; 0: unknown
    _draft_s: float = field(init=False, default=0.0)
    _forecasts: dict[str, tuple[Floats, Floats]] = field(init=False, default_factory=dict)  # by key

    def fit(self, cases: Sequence[Observation], claim: RiskTarget | None = None) -> Doubles:
        """Fit fingerprint and risk models to distinct requests, and make these the pinned sources.

        With a draft and a claim, choose the rungs to use. Returns candidate limits (K,), strictest first: risks of
        these requests, each looked up among others.
        """
        self.chooser.learn(cases)
        self.tokens.frame(cases[0].row, cases[0].tokens)
        lookups, order = [], list[Observation]()
        for turn in range(N_TURNS):
            self.refit([case for i, case in enumerate(cases) if i % N_TURNS != turn])
            lookups += [self.chooser.look(case, *self._forecast(case)) for case in cases[turn::N_TURNS]]
            order += cases[turn::N_TURNS]
        found = HoldoutOutcome(*self.chooser.fit(lookups))
        self.shares = {SEMANTIC: 1.0}
        if self.draft is not None and claim is not None:
            found = self._choose_rungs(order, found, self._search_s(order), claim)
        self.refit(cases)
        limits = candidate_limits(found.dial)
        return limits[limits <= MAX_RISK]

    def _search_s(self, cases: Sequence[Observation]) -> float:
        """Return the median seconds of a look-up in service, where a forward has just filled the processor's caches."""
        times, bulk = [], np.ones(_N_BULK)
        for case in cases[-_N_TIMED:]:  # of the last turn, whose tokens the fingerprint knows
            self._forecasts.pop(case.row.key, None)
            bulk.sum()
            started = perf_counter()
            self._choose(case)
            times.append(perf_counter() - started)
        return median(times)

    def _choose_rungs(
        self, cases: Sequence[Observation], found: HoldoutOutcome, search_s: float, claim: RiskTarget
    ) -> HoldoutOutcome:
        """Fit the draft, and choose rungs and shares; return the outcome of those in use."""
        assert self.draft is not None
        self.draft.fit([case.draft for case in cases], [case.answer for case in cases])
        drafted = self._drafted(cases, "changed")
        if not np.isfinite(drafted.risk).any():
            return found
        self._draft_s = float(np.median([case.draft_s for case in cases if case.draft is not None]))
        model_s = self.model_s or float(np.median([case.seconds for case in cases]))
        costs = Costs(search_s, self._draft_s, model_s)
        self.shares = choose_shares(found, drafted, costs, claim.max_drop, claim.delta)
        return combined({SEMANTIC: found, DRAFT: drafted}, self.shares)

    def _drafted(self, cases: Sequence[Observation], metric: MetricName | Metric) -> HoldoutOutcome:
        """Return risk and loss of each request as if the draft served it at any risk."""
        assert self.draft is not None
        outputs = [case.draft for case in cases]
        served_by = [
            None if output is None else replace(case, output=output, answer=self.answers.sign(output[None])[0])
            for case, output in zip(cases, outputs, strict=True)
        ]
        return self._outcome(self.draft.risks(outputs), cases, served_by, metric)

    def refit(self, cases: Sequence[Observation], is_pinned: bool = True) -> None:
        """Fit the fingerprint to distinct requests, and make these the only sources.

        The risk model stays, so that a limit chosen among its risks keeps its meaning. Pinned sources stay until the
        next calibration.
        """
        self.fingerprint.fit(
            [case.tokens for case in cases], targets(cases, self.answers), outputs(cases, self.answers)
        )
        self.forget()  # forecasts and sources of the previous fingerprint
        self.clear()
        self.add_sources(cases, is_pinned)

    def clear(self) -> None:
        """Remove all sources; their entries may be evicted."""
        self.sources.clear()
        self.bank.release()

    def forget(self) -> None:
        """Drop cached forecasts."""
        self._forecasts.clear()

    def look_up(self, cases: Sequence[Observation], repeated: Collection[str]) -> list[Found]:
        """Return the source that would serve each request; keys in `repeated` are sources, served exactly."""
        found: dict[str, Found] = {}
        for case in cases:
            if (key := case.row.key) not in found:  # a repeated request finds the same
                found[key] = Found(-inf, key, "exact") if key in repeated else self._find(case)
        return [found[case.row.key] for case in cases]

    def profile(self, cases: Sequence[Observation], sources: Mapping[str, Observation], limit: float) -> Profile:
        """Return the profile of requests of C, with which later requests are compared."""
        learned = [features_of_source(self._forecast(case)[1]).forecast for case in sources.values()]
        return profile(self.features(cases, sources), learned, limit)

    def features(self, cases: Sequence[Observation], repeated: Collection[str]) -> dict[str, Features]:
        """Return the features of each request by key; keys in `repeated` are sources."""
        features = {}
        for case in cases:
            forecast = self._forecast(case)[1]
            if case.row.key in repeated:
                features[case.row.key] = features_of_source(forecast)
            elif SEMANTIC in self.shares:
                features[case.row.key] = features_of(self._choose(case), forecast)
            elif self.draft is not None and case.draft is not None:  # in service no source is searched for
                features[case.row.key] = features_of(self.draft.choice(case.draft), case.draft)
        return features

    def lookup_s(self, trial: HoldoutOutcome, chosen: OperatingPoint | None, search_s: float) -> float:
        """Return the mean seconds of looking a request of C up at an operating point, drafts included."""
        if DRAFT not in self.shares or chosen is None:
            return search_s
        if SEMANTIC not in self.shares:
            return self._draft_s
        return search_s + self._draft_s * float(1 - trial.serve(chosen.limit)[0][0].mean())

    def draft_alone(self, cases: Sequence[Observation], delta: float) -> OperatingPoint | None:
        """Return what changes if the draft serves all requests of C, whose risk is one; None without a draft."""
        drafted = [case for case in cases if case.draft is not None]
        if self.draft is None or not drafted:
            return None
        (point,) = try_limits(self._drafted(drafted, "changed"), self.draft.risks([drafted[0].draft]), 1.0, delta)
        return point

    def trial(
        self, cases: Sequence[Observation], sources: Mapping[str, Observation], metric: MetricName | Metric
    ) -> HoldoutOutcome:
        """Return risk and loss of each held-out request (of part C, say) as if a rung in use served it at any risk."""
        found = self.look_up(cases, set(sources))
        risk = np.array([source.risk for source in found], np.float64)
        semantic = self._outcome(
            risk, cases, [None if (key := one.key) is None else sources[key] for one in found], metric
        )
        if any(case.own is not None for case in cases):
            semantic = replace(semantic, computed=self._outcome(risk, cases, cases, metric).loss)
        if [*self.shares] == [SEMANTIC]:
            return semantic
        alone = {SEMANTIC: semantic, DRAFT: self._drafted(cases, metric)}
        if SEMANTIC in self.shares:
            return combined(alone, self.shares)
        repeats = replace(semantic, risk=np.where(np.isneginf(risk), risk, np.inf))  # served exactly all the same
        return combined({**alone, SEMANTIC: repeats}, {SEMANTIC: 1.0, **self.shares})

    def _outcome(
        self,
        risk: Doubles,
        cases: Sequence[Observation],
        served_by: Sequence[Observation | None],
        metric: MetricName | Metric,
    ) -> HoldoutOutcome:
        """Return the outcome of serving each request the output and answer of another one; None: it is computed."""
        if isinstance(metric, Metric):
            outputs = [None if source is None else source.output for source in served_by]
            about = (((case.own or case).output, case.label, case.number) for case in cases)
            own, labels, numbers = zip(*about, strict=True)
            span = metric.high - metric.low
            return HoldoutOutcome(risk, losses(metric, own, outputs, labels, numbers), -span, span, is_share=False)
        counts = self._is_changed if metric == "changed" else self._loses_accuracy
        loss = [source is not None and counts(case, source) for case, source in zip(cases, served_by, strict=True)]
        return HoldoutOutcome(risk, np.array(loss, np.float64))

    def set_sources(self, cases: Sequence[Observation]) -> None:
        """Make these requests the only sources; fingerprint and risk model stay."""
        self.clear()
        self.add_sources(cases)

    def add_sources(self, cases: Sequence[Observation], is_pinned: bool = False) -> None:
        """Add requests to the sources; pinned ones stay until the next calibration.

        Raises:
            CalibrationError: Pinned sources do not fit the budgets.
        """
        if is_pinned and not self.bank.pin([case.entry for case in cases]):
            raise CalibrationError("the sources do not fit: raise max_entries or max_bytes, or give fewer requests")
        if not is_pinned:
            for case in cases:
                if case.row.key not in self.bank:
                    self.bank.put([case.entry], case.generation)
        held = [case for case in cases if case.row.key in self.bank]
        if held:
            vectors = np.stack([self._forecast(case)[0] for case in held])
            self.sources.add(map(self.source_of, held), vectors)
            for case in held:
                key = case.row.key
                if not self.bank.purges.is_current(case.scope.namespace, key, case.generation):  # forgotten meanwhile
                    self.bank.forget([key])
                if key not in self.bank:  # evicted meanwhile
                    self.sources.remove(key)

    def source_of(self, case: Observation) -> Source:
        logits = case.output.copy() if self.keeps_logits else None
        return Source(case.entry, case.row.ids, case.answer, self.sources.length_of(case.row), logits)

    def _choose(self, case: Observation) -> Choice | None:
        vector, forecast = self._forecast(case)
        (choice,) = self.chooser.choose(case.scope, [case.row], vector[None], forecast[None])
        return choice

    def _find(self, case: Observation) -> Found:
        choice = self._choose(case)
        if choice is None or choice.source is None:
            return Found(inf, None, "")
        return Found(choice.risk, choice.source.key, SEMANTIC)

    def _is_changed(self, case: Observation, source: Observation) -> bool:
        return not self.answers.agree((case.own or case).answer, source.answer)

    def _loses_accuracy(self, case: Observation, source: Observation) -> bool:
        """Whether the source's answer is wrong where the model's own is right."""
        right = np.array([case.label], np.float32)
        own = (case.own or case).answer
        return bool(self.answers.agree(own, right) and not self.answers.agree(source.answer, right))

    def _forecast(self, case: Observation) -> tuple[Floats, Floats]:
        """Return the fingerprint (F,) of a request and the forecast (C,) of its output."""
        if case.row.key not in self._forecasts:
            (vector,), (forecast,) = self.fingerprint.project([case.tokens])
            self._forecasts[case.row.key] = vector, forecast
        return self._forecasts[case.row.key]
