"""The student: the fingerprint's forecast alone, as a classifier that abstains. The baseline that neighbours must beat.

The answer favoured by the forecast is given by an example: the first learned request with that answer. From the lead
of this answer over the others, a logistic regression estimates the probability that it is wrong. It is cross-fitted,
and its limit is tested like those of llmcache's calibrations.

Sizes: N requests, M answers that were given, S width of a signature, F features.
"""

from collections.abc import Collection, Sequence
from math import inf
from time import perf_counter

import numpy as np
from sklearn.linear_model import LogisticRegression

from llmcache import Calibration
from llmcache.lab import (
    N_TURNS,
    CalibratedReuse,
    Doubles,
    Found,
    HoldoutOutcome,
    Observation,
    RiskTarget,
    candidate_limits,
    choose_limit,
    outputs,
    split,
    targets,
    try_limits,
)

_MAX_RISK = 0.5
_SHARPNESS = np.array([[1.0], [2.0], [4.0]], np.float32)  # factors in the exponent when an answer's rivals are summed
_LEAST = 1e-9  # added to such a sum before its logarithm
_FAR = 700.0  # lead of an answer over itself, so that it is not one of its own rivals


class Student:
    """Replaces the `CalibratedReuse` of a wrapped model in replays of observed requests."""

    def __init__(self, calibrated: CalibratedReuse) -> None:
        """Use the same fingerprint and kind of answers; stored requests stay unchanged."""
        self.fitter = self  # replays call `fitter.look_up`
        self._fingerprint = calibrated.fitter.fingerprint
        self._tokens = calibrated.fitter.tokens
        self._answers = calibrated.fitter.answers
        self._examples: list[Observation] = []  # one for each distinct answer (M)

    def learn(self, cases: Sequence[Observation]) -> Doubles:
        """Learn from requests and use them as examples; return limits worth trying, strictest first."""
        cases = list({case.row.key: case for case in cases}.values())
        self._answers.learn(np.stack([case.answer for case in cases]))
        self._tokens.frame(cases[0].row, cases[0].tokens)
        leads, is_changed = [], []
        for turn in range(N_TURNS):
            self._fit([case for i, case in enumerate(cases) if i % N_TURNS != turn])
            for case in cases[turn::N_TURNS]:
                example, lead = self._look(case)
                leads.append(lead)
                is_changed.append(not self._answers.agree(case.answer, example.answer))
        self._teach(np.array(leads), is_changed)
        limits = candidate_limits(np.array([self._chance(lead) for lead in leads]))
        self._fit(cases)
        return limits[limits <= _MAX_RISK]

    def look_up(self, cases: Sequence[Observation], repeated: Collection[str]) -> list[Found]:
        """Return each request's example, and the risk of serving it. `repeated` keys are exact hits without risk."""
        found: dict[str, Found] = {}
        for case in cases:
            key = case.row.key
            if key in repeated:
                found[key] = Found(-inf, key, "exact")
            elif key not in found:
                example, lead = self._look(case)
                found[key] = Found(self._chance(lead), example.row.key, "student")
        return [found[case.row.key] for case in cases]

    def calibrate(self, observed: Sequence[Observation], claim: RiskTarget) -> Calibration:
        """Learn from parts A and B of the requests, and choose the limit on C."""
        started = perf_counter()
        learned, tested = ([observed[i] for i in part] for part in split(len(observed), claim))
        sources = {case.row.key: case for case in learned}
        limits = self.learn(learned)
        looked_from = perf_counter()
        found = self.look_up(tested, sources.keys())
        lookup_s = perf_counter() - looked_from
        served_by = [sources[one.key] for one in found if one.key is not None]
        pairs = zip(tested, served_by, strict=True)
        loss = [not self._answers.agree(case.answer, source.answer) for case, source in pairs]
        trial = HoldoutOutcome(np.array([one.risk for one in found]), np.array(loss, np.float64))
        curve = try_limits(trial, limits, claim.max_drop, claim.delta)
        return Calibration(
            chosen=choose_limit(curve, claim.max_drop),
            curve=curve,
            metric=claim.name,
            max_drop=claim.max_drop,
            delta=claim.delta,
            n_sources=len(sources),
            n_tested=len(tested),
            sources="frozen",
            weights=learned[0].scope.weights,
            head=learned[0].head,
            seconds=perf_counter() - started,
            lookup_ms=1e3 * lookup_s / len(tested),
        )

    def _fit(self, cases: Sequence[Observation]) -> None:
        """Fit the fingerprint on distinct requests, and make them the examples."""
        tokens = [case.tokens for case in cases]
        self._fingerprint.fit(tokens, targets(cases, self._answers), outputs(cases, self._answers))
        self._examples = list({case.answer.tobytes(): case for case in reversed(cases)}.values())[::-1]
        self._signatures = np.stack([case.answer for case in self._examples])  # (M, S)

    def _look(self, case: Observation) -> tuple[Observation, list[float]]:
        """Return the example of the answer favoured by a request's forecast, and features of its lead (F,)."""
        (forecast,) = self._fingerprint.project([case.tokens])[1]
        closeness = np.array(self._answers.closeness(forecast, self._signatures))
        first = int(closeness.argmax())
        rivals = closeness - closeness[first]
        rivals[first] = -_FAR
        sums = np.log(np.exp(_SHARPNESS * rivals).sum(axis=1) + _LEAST)
        told = [closeness[first], rivals.max(), *sums, *np.log1p(np.exp(sums)), forecast.std(), case.row.n_valid**0.5]
        return self._examples[first], [float(one) for one in told]

    def _teach(self, leads: Doubles, is_changed: Sequence[bool]) -> None:
        """Fit the regression on features (N, F) of requests with known answers."""
        self._centre, self._scale = leads.mean(axis=0), leads.std(axis=0) + 1e-6
        # Two artificial requests, one per class, make the fit possible if all answers stayed, or all changed.
        shown = np.vstack([(leads - self._centre) / self._scale, np.zeros((2, leads.shape[1]))])
        self._regression = LogisticRegression(max_iter=1000).fit(shown, [*is_changed, True, False])

    def _chance(self, lead: Sequence[float]) -> float:
        shown = (np.array(lead) - self._centre) / self._scale
        return float(self._regression.predict_proba(shown[None])[0, 1])
