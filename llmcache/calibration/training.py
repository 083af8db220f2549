"""Fits fingerprint and risk model to computed requests, and makes these the sources.

The risk model must learn from requests that the fingerprint was not fitted on. So requests take turns (cross-fitting):
each fifth is looked up among the other four, by a fingerprint fitted to these alone. The risk model is fitted to all of
these looks; then the fingerprint is fitted once more, to all requests.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from llmcache.answers import Answers
from llmcache.arrays import Doubles, Floats
from llmcache.bank import Bank
from llmcache.calibration.calibration import HoldoutOutcome, candidate_limits, losses
from llmcache.calibration.drift import Marks, Profile, marks_of, marks_of_source, profile
from llmcache.calibration.observer import outputs, targets
from llmcache.calibration.risk_target import Metric, MetricName
from llmcache.calibration.token_vectors import TokenVectors
from llmcache.decide import MAX_RISK, Choice, NeighbourChooser
from llmcache.errors import CalibrationError
from llmcache.fingerprint import Learned
from llmcache.request.observation import Observation
from llmcache.sources import Source, Sources

N_TURNS = 5


class Found(NamedTuple):
    """The source that would serve a request, and its risk."""

    risk: float  # -infinite where it is stored itself, infinite where none may serve it
    key: str | None  # of who would; None where there is none
    rung: str  # by which; "" where there is none


@dataclass(eq=False)
class CalibrationFitter:
    """Fits the parts of one wrapped model. One thread at a time."""

    bank: Bank
    sources: Sources
    fingerprint: Learned
    tokens: TokenVectors  # where the fingerprint takes vectors of tokens from
    chooser: NeighbourChooser
    answers: Answers
    _forecasts: dict[str, tuple[Floats, Floats]] = field(init=False, default_factory=dict)  # as it is now

    def fit(self, cases: Sequence[Observation]) -> Doubles:
        """Fit fingerprint and risk model to distinct requests, and make these the sources, pinned.

        Returns candidate limits, strictest first (K,): the risks of these requests, each looked up among others.
        """
        self.chooser.learn(cases)
        self.tokens.frame(cases[0].row, cases[0].tokens)
        looks = []
        for turn in range(N_TURNS):
            self.refit([case for i, case in enumerate(cases) if i % N_TURNS != turn])
            looks += [self.chooser.look(case, *self._forecast(case)) for case in cases[turn::N_TURNS]]
        limits = candidate_limits(self.chooser.fit(looks))
        self.refit(cases)
        return limits[limits <= MAX_RISK]

    def refit(self, cases: Sequence[Observation], is_pinned: bool = True) -> None:
        """Fit the fingerprint to distinct requests, and make these the only sources.

        The risk model stays as it is, so that a limit that was chosen among its risks keeps its meaning. Pinned sources
        stay until the next calibration.
        """
        self.fingerprint.fit(
            [case.tokens for case in cases], targets(cases, self.answers), outputs(cases, self.answers)
        )
        self.resume()
        self.stand(cases, is_pinned)

    def resume(self) -> None:
        """Remove sources and forecasts of the fingerprint before; it was just fitted or restored."""
        self.forget()
        self.clear()

    def clear(self) -> None:
        """Remove all sources; their entries may be evicted."""
        self.sources.clear()
        self.bank.release()

    def forget(self) -> None:
        """Drop cached forecasts."""
        self._forecasts.clear()

    def look_up(self, cases: Sequence[Observation], repeated: Collection[str]) -> list[Found]:
        """Return who would serve each request; keys in `repeated` are sources themselves, served exactly."""
        found: dict[str, Found] = {}
        for case in cases:
            if (key := case.row.key) not in found:  # one that comes again finds the same
                found[key] = Found(-inf, key, "exact") if key in repeated else self._find(case)
        return [found[case.row.key] for case in cases]

    def risks(self, cases: Sequence[Observation], repeated: Collection[str]) -> tuple[Doubles, list[str | None]]:
        """Return the risk of each request (N,), and the key of the source that would serve it; see `look_up`."""
        found = self.look_up(cases, repeated)
        return np.array([one.risk for one in found], np.float64), [one.key for one in found]

    def profile(self, cases: Sequence[Observation], sources: Mapping[str, Observation], limit: float) -> Profile:
        """Return the distribution of marks on requests of C, with which later ones are compared."""
        learned = [marks_of_source(self._forecast(case)[1]).forecast for case in sources.values()]
        return profile(self.marks(cases, sources), learned, limit)

    def marks(self, cases: Sequence[Observation], repeated: Collection[str]) -> dict[str, Marks]:
        """Return the marks of each request, by key; see `risks`."""
        marks = {}
        for case in cases:
            forecast = self._forecast(case)[1]
            is_repeat = case.row.key in repeated
            marks[case.row.key] = marks_of_source(forecast) if is_repeat else marks_of(self._choose(case), forecast)
        return marks

    def trial(
        self, cases: Sequence[Observation], sources: Mapping[str, Observation], metric: MetricName | Metric
    ) -> HoldoutOutcome:
        """Return risk and loss of each held-out request, of part C say, if the sources served all of them."""
        risk, found = self.risks(cases, set(sources))
        served_by = [None if key is None else sources[key] for key in found]
        if isinstance(metric, Metric):
            outputs = [None if source is None else source.output for source in served_by]
            own, labels, numbers = zip(*((case.output, case.label, case.number) for case in cases), strict=True)
            span = metric.high - metric.low
            return HoldoutOutcome(risk, losses(metric, own, outputs, labels, numbers), -span, span, is_share=False)
        counts = self._is_changed if metric == "changed" else self._goes_wrong
        loss = [source is not None and counts(case, source) for case, source in zip(cases, served_by, strict=True)]
        return HoldoutOutcome(risk, np.array(loss, np.float64))

    def restart(self, cases: Sequence[Observation]) -> None:
        """Make these requests the only sources; fingerprint and risk model stay."""
        self.clear()
        self.stand(cases)

    def stand(self, cases: Sequence[Observation], is_pinned: bool = False) -> None:
        """Add requests to the sources; pinned ones stay until the next calibration.

        Raises:
            CalibrationError: They are to be pinned, and do not fit the budgets.
        """
        if is_pinned and not self.bank.pin([case.entry for case in cases]):
            raise CalibrationError(
                "not all requests that are to serve are held: raise max_entries or max_bytes, or give fewer"
            )
        if not is_pinned:
            for case in cases:
                if case.row.key not in self.bank:
                    self.bank.put([case.entry], case.generation)
        held = [case for case in cases if case.row.key in self.bank]
        if held:
            vectors = np.stack([self._forecast(case)[0] for case in held])
            self.sources.add(map(self.source_of, held), vectors)
            for case in held:
                if case.row.key not in self.bank:  # evicted meanwhile
                    self.sources.remove(case.row.key)

    def source_of(self, case: Observation) -> Source:
        """Make a source of a computed request."""
        return Source(case.entry, case.row.ids, case.answer, self.sources.length_of(case.row))

    def _choose(self, case: Observation) -> Choice | None:
        vector, forecast = self._forecast(case)
        (choice,) = self.chooser.choose(case.scope, [case.row], vector[None], forecast[None])
        return choice

    def _find(self, case: Observation) -> Found:
        choice = self._choose(case)
        return Found(inf, None, "") if choice is None else Found(choice.risk, choice.source.key, "semantic")

    def _is_changed(self, case: Observation, source: Observation) -> bool:
        return not self.answers.agree(case.answer, source.answer)

    def _goes_wrong(self, case: Observation, source: Observation) -> bool:
        """Whether the source's answer is wrong where the model's own is right."""
        right = np.array([case.label], np.float32)
        return bool(self.answers.agree(case.answer, right) and not self.answers.agree(source.answer, right))

    def _forecast(self, case: Observation) -> tuple[Floats, Floats]:
        """Return the fingerprint (F,) of a request, and the forecast of its output (C,)."""
        if case.row.key not in self._forecasts:
            (vector,), (forecast,) = self.fingerprint.project([case.tokens])
            self._forecasts[case.row.key] = vector, forecast
        return self._forecasts[case.row.key]
