"""Chooses, for each request, the neighbour that would serve it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan

import numpy as np

from llmcache.arrays import Doubles, Floats, below
from llmcache.banks.cache_banks import CacheBanks
from llmcache.matching.answers import Answers
from llmcache.matching.content_gate import ContentGate
from llmcache.matching.decision import Decision, Evidence
from llmcache.matching.partition import Neighbour
from llmcache.request.observation import Observation
from llmcache.request.rows import Row, Scope


@dataclass(frozen=True, slots=True)
class Choice:
    """Who would serve a request, and how risky that is; infinite risk where the gate refuses, or it was quarantined."""

    neighbour: Neighbour
    risk: float  # that its answer is not the request's own
    at_first: float  # before anybody was quarantined: of like requests it stays alike


class NeighbourChooser:
    """Finds, for each request, the neighbour that would serve it best."""

    def __init__(
        self, banks: CacheBanks, decision: Decision, answers: Answers | None = None, gate: ContentGate | None = None
    ) -> None:
        """Look in `banks`; decisions that read answers need `answers`."""
        self._banks = banks
        self._decision = decision
        self._answers = answers
        self._gate = gate

    def choose(
        self, scope: Scope, rows: Sequence[Row], vectors: Floats, forecasts: Floats | None
    ) -> list[Choice | None]:
        """The best neighbour of each row, by fingerprints (B, F) and forecasts (B, C); None where nothing was found."""
        found = self._banks.search(scope, rows, vectors, self._decision.k)
        return [
            self._choose(row, near, None if forecasts is None else forecasts[i])
            for i, (row, near) in enumerate(zip(rows, found, strict=True))
        ]

    @property
    def max_risk(self) -> float:
        return self._decision.max_risk

    def learn(self, cases: Sequence[Observation]) -> None:
        """Take in what answers look like, and how rare tokens are."""
        if self._answers is not None:
            self._answers.learn(np.stack([case.answer for case in cases]))
        if self._gate is not None:
            self._gate.learn(case.row.ids for case in cases)

    def look(self, case: Observation, vector: Floats, forecast: Floats | None) -> tuple[Evidence, list[bool]]:
        """What the neighbours of a request are like, and which have its own answer (n,)."""
        (near,) = self._banks.search(case.scope, [case.row], vector[None], self._decision.k)
        seen = self._see(near, forecast)
        if self._answers is None or not near:
            return seen, [False] * len(near)
        return seen, self._answers.agree(_signatures(near), case.answer).tolist()

    def fit(self, looks: Sequence[tuple[Evidence, Sequence[bool]]]) -> Doubles:
        """Let the decision learn from requests whose answers are known, and return their risks (N,)."""
        seen = [one for one, _ in looks]
        self._decision.fit(seen, [is_right for _, is_right in looks])
        return np.array([self._decision.choose(one)[1] if one.similarity else inf for one in seen], np.float64)

    def state(self) -> dict[str, Floats]:
        """What decision, answers and gate learned."""
        parts = {"decision": self._decision, "answers": self._answers, "gate": self._gate}
        learned = {part: learner.state() for part, learner in parts.items() if learner is not None}
        return {f"{part}.{name}": array for part, state in learned.items() for name, array in state.items()}

    def restore(self, state: Mapping[str, Floats]) -> None:
        for part, learner in (("decision", self._decision), ("answers", self._answers), ("gate", self._gate)):
            if learner is not None:
                learner.restore(below(f"{part}.", state))

    def _choose(self, row: Row, near: Sequence[Neighbour], forecast: Floats | None) -> Choice | None:
        if not near:
            return None
        number, risk = self._decision.choose(self._see(near, forecast))
        chosen = near[number]
        if self._gate is not None and self._gate.refuses(row.ids, chosen.ids):
            risk = inf
        return Choice(chosen, inf if chosen.is_quarantined else risk, risk)

    def _see(self, near: Sequence[Neighbour], forecast: Floats | None) -> Evidence:
        """What the neighbours of one request are like."""
        similarity = [neighbour.similarity for neighbour in near]
        if not (near and self._decision.reads_answers and self._answers is not None):
            return Evidence(similarity)
        signatures = _signatures(near)
        agree = self._answers.agree(signatures[:, None], signatures).tolist()
        if forecast is None:
            return Evidence(similarity, agree, [0.0] * len(near))
        told = self._answers.favour(forecast, signatures).tolist()
        return Evidence(similarity, agree, [one if one == one else 0.0 for one in told])


def _signatures(near: Sequence[Neighbour]) -> Floats:
    """Of the answers of neighbours (n, S); NaN where one has none."""
    width = max((len(one.answer) for one in near if one.answer is not None), default=1)
    unknown = (nan,) * width
    return np.array([unknown if one.answer is None else one.answer for one in near], np.float32)
