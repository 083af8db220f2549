"""Chooses, for each request, who would serve it: a neighbour, or an example of the answer that is forecast.

Where the decision reads the forecast, the answer that it favours may be given instead: by an example, a stored request
that was answered so. Its state goes through the model's own head, so what is served is an output that the model made.
Such hits are of the rung `student`: nobody says that the example is like the request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan

import numpy as np

from llmcache.arrays import Doubles, Floats, below
from llmcache.banks.cache_banks import CacheBanks
from llmcache.matching.answers import Answers
from llmcache.matching.content_gate import ContentGate
from llmcache.matching.decision import Decision, Evidence
from llmcache.matching.partition import Neighbour
from llmcache.matching.risk import lead_of
from llmcache.request.observation import Observation
from llmcache.request.rows import Row, Scope


@dataclass(frozen=True, slots=True)
class Choice:
    """Who would serve a request, and how risky that is; infinite risk where the gate refuses, or it was quarantined."""

    neighbour: Neighbour  # its similarity is NaN where it was not searched for
    risk: float  # that its answer is not the request's own
    at_first: float  # before anybody was quarantined: of like requests it stays alike
    rung: str = "semantic"  # `student` for an example of the answer that the forecast favours


@dataclass(frozen=True, slots=True)
class Examples:
    """Stored requests of one scope, the first for each answer that was given (M), and these answers (M, S)."""

    neighbours: Sequence[Neighbour]
    signatures: Floats


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
        self._examples: dict[Scope, Examples] = {}  # replaced as a whole: others may be reading it

    def choose(
        self, scope: Scope, rows: Sequence[Row], vectors: Floats, forecasts: Floats | None
    ) -> list[Choice | None]:
        """The best neighbour of each row, by fingerprints (B, F) and forecasts (B, C); None where nothing was found."""
        found = self._search(scope, rows, vectors)
        return [
            self._choose(scope, row, near, None if forecasts is None else forecasts[i])
            for i, (row, near) in enumerate(zip(rows, found, strict=True))
        ]

    @property
    def searches(self) -> bool:
        return self._decision.k > 0

    def present(self, cases: Iterable[tuple[Scope, str, Floats | None]]) -> list[str]:
        """Have each answer given by the first of these requests (scope, key, signature) that has it; returns keys."""
        is_discrete = self._answers is not None and self._answers.is_discrete
        if not (self._decision.reads_lead and is_discrete and self._banks.fits_any_length):
            return []
        first: dict[Scope, dict[bytes, Neighbour]] = {}
        for scope, key, answer in cases:
            if answer is not None:
                first.setdefault(scope, {}).setdefault(answer.tobytes(), Neighbour(key, nan, answer))
        kept = {scope: list(by_answer.values()) for scope, by_answer in first.items()}
        self._examples = {scope: Examples(near, _signatures(near)) for scope, near in kept.items()}
        return self.examples

    def forget(self) -> None:
        """Have no answer given by an example until some are presented."""
        self._examples = {}

    @property
    def examples(self) -> list[str]:
        """Keys of the requests that answers are given by, in the order in which they were presented."""
        return [near.key for examples in self._examples.values() for near in examples.neighbours]

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
        (near,) = self._search(case.scope, [case.row], vector[None])
        seen, example = self._see(case.scope, case.row, near, forecast)
        shown = near if example is None else [*near, example]
        if self._answers is None or not shown:
            return seen, [False] * len(shown)
        return seen, self._answers.agree(_signatures(shown), case.answer).tolist()

    def fit(self, looks: Sequence[tuple[Evidence, Sequence[bool]]]) -> Doubles:
        """Let the decision learn from requests whose answers are known, and return their risks (N,)."""
        seen = [one for one, _ in looks]
        self._decision.fit(seen, [is_right for _, is_right in looks])
        risks = [self._decision.choose(one)[1] if one.similarity or one.lead else inf for one in seen]
        return np.array(risks, np.float64)

    def state(self) -> dict[str, Floats]:
        """What decision, answers and gate learned."""
        parts = {"decision": self._decision, "answers": self._answers, "gate": self._gate}
        learned = {part: learner.state() for part, learner in parts.items() if learner is not None}
        return {f"{part}.{name}": array for part, state in learned.items() for name, array in state.items()}

    def restore(self, state: Mapping[str, Floats]) -> None:
        for part, learner in (("decision", self._decision), ("answers", self._answers), ("gate", self._gate)):
            if learner is not None:
                learner.restore(below(f"{part}.", state))

    def _search(self, scope: Scope, rows: Sequence[Row], vectors: Floats) -> list[list[Neighbour]]:
        return self._banks.search(scope, rows, vectors, self._decision.k) if self.searches else [[] for _ in rows]

    def _choose(self, scope: Scope, row: Row, near: Sequence[Neighbour], forecast: Floats | None) -> Choice | None:
        seen, example = self._see(scope, row, near, forecast)
        if not near and example is None:
            return None
        number, risk = self._decision.choose(seen)
        if number == len(near):
            # That a neighbour's words tell otherwise is what a gate is for: what it would refuse is not given either.
            is_refused = self._gate is not None and any(self._gate.refuses(row.ids, one.ids) for one in near[:1])
            risk = inf if is_refused else risk
            return None if example is None else Choice(example, risk, risk, "student")
        chosen = near[number]
        if self._gate is not None and self._gate.refuses(row.ids, chosen.ids):
            risk = inf
        return Choice(chosen, inf if chosen.is_quarantined else risk, risk)

    def _see(
        self, scope: Scope, row: Row, near: Sequence[Neighbour], forecast: Floats | None
    ) -> tuple[Evidence, Neighbour | None]:
        """What the neighbours of one request are like, and who gives the answer that the forecast favours."""
        similarity = [neighbour.similarity for neighbour in near]
        if not self._decision.reads_answers or self._answers is None:
            return Evidence(similarity), None
        signatures = _signatures(near)
        agree = self._answers.agree(signatures[:, None], signatures).tolist() if near else ()
        if forecast is None:
            return Evidence(similarity, agree, [0.0] * len(near)), None
        told = self._answers.favour(forecast, signatures).tolist() if near else ()
        favour = [one if one == one else 0.0 for one in told]
        examples = self._examples.get(scope) if self._decision.reads_lead else None
        if examples is None:
            return Evidence(similarity, agree, favour), None
        could_be = self._answers.favour(forecast, examples.signatures)
        first, lead = lead_of(could_be, float(forecast.std()), row.n_valid)
        return Evidence(similarity, agree, favour, lead), examples.neighbours[first]


def _signatures(near: Sequence[Neighbour]) -> Floats:
    """Of the answers of neighbours (n, S); NaN where one has none."""
    width = max((len(one.answer) for one in near if one.answer is not None), default=1)
    unknown = (nan,) * width
    return np.array([unknown if one.answer is None else one.answer for one in near], np.float32)
