"""The approximate rung: chooses a source for each request, estimates its risk, and serves within the limit.

The nearest sources vote; sources with the same answer vote together. The risk of an answer is the probability that the
model's own answer differs: a logistic regression on votes and forecast. The answer with the least risk is chosen, with
the nearest source that has it, and served if its risk is within the limit that a calibration chose.

Risks are computed in plain Python numbers, one request at a time: for 8 neighbours arrays take four times as long.

Sizes: B rows, n neighbours found, at most k, F features, C outputs, S width of a signature.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from math import exp, inf, isfinite, isnan, log
from operator import attrgetter, mul
from typing import NamedTuple

import numpy as np

from llmcache.memory.bank import Bank
from llmcache.models.weights import Weights
from llmcache.request.counters import Counters
from llmcache.request.rows import Row, Scope
from llmcache.reuse.answers import Answers
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.reuse.call import Call, Hit
from llmcache.reuse.content_gate import ContentGate
from llmcache.reuse.fingerprint import LearnedFingerprint
from llmcache.reuse.observation import Observation
from llmcache.reuse.sources import Choice, Near, Sources
from llmcache.support.arrays import Bools, Doubles, Floats

K = 8  # neighbours that vote
_WIDTH = 0.05  # difference in similarity at which a vote counts 1 / e
MAX_RISK = 0.5  # never serve an answer that more likely changes than not, even if it is so rare that a bound allows it
_HIGHEST = 700.0  # log-odds beyond which `exp` overflows
_ANSWER, _IS_MISREAD = attrgetter("answer"), attrgetter("is_misread")


class Evidence(NamedTuple):
    """Similarities and answers of one request's neighbours."""

    similarity: Sequence[float]  # of each neighbour, best first (n,)
    agree: Sequence[Sequence[bool]] = ()  # whether two neighbours have the same answer (n, n)
    closeness: Sequence[float] = ()  # how well each neighbour's answer fits the request's forecast (n,)


class Odds:
    """A logistic regression on how likely an answer changes: infinitely, until a calibration fits it."""

    def __init__(self) -> None:
        self._weights: Sequence[float] = ()  # of the features (F,), then the intercept

    def chance(self, features: Sequence[float]) -> float:
        """Return the probability of a change, 0 to 1, given features (F,)."""
        weights = self._weights
        if not weights:
            return inf
        log_odds = sum(map(mul, weights, features), weights[-1])
        return 1 / (1 + exp(min(-log_odds, _HIGHEST)))

    def fit(self, features: Sequence[Sequence[float]], changes: Sequence[bool]) -> None:
        """Fit to features (N, F) and whether the answers changed (N,)."""
        from sklearn.linear_model import LogisticRegression

        known = np.array(features)
        centre, scale = known.mean(axis=0), known.std(axis=0) + 1e-6
        # Two artificial requests, one changed and one not, since the fit needs both classes.
        shown = np.vstack([(known - centre) / scale, np.zeros((2, known.shape[1]))])
        fitted = LogisticRegression(max_iter=1000).fit(shown, [*changes, True, False])
        weights = fitted.coef_[0] / scale
        self.restore({"weights": np.array([*weights, float(fitted.intercept_[0] - weights @ centre)], np.float32)})

    def state(self) -> dict[str, Floats]:
        return {"weights": np.array(self._weights, np.float32)}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take weights as they are saved, in float32, so that a loaded cache decides as the saved one did."""
        self._weights = tuple(state["weights"].tolist())


class Risk:
    """The risk model. Until it is fitted, every risk is infinite."""

    def __init__(self) -> None:
        self.odds = Odds()

    def choose(self, seen: Evidence) -> tuple[int, float]:
        """Return the index of the neighbour with the least risk, and that risk; infinite if none may serve."""
        number, least = 0, inf
        for candidate, features in _describe(seen):
            if (risk := self.odds.chance(features)) < least:
                number, least = candidate, risk
        return number, least

    def fit(self, seen: Sequence[Evidence], is_right: Sequence[Sequence[bool]]) -> None:
        """Fit to the evidence of N requests; `is_right`: which neighbours of each (n,) have the model's own answer."""
        examples = [
            (features, not right[number])
            for evidence, right in zip(seen, is_right, strict=True)
            for number, features in _describe(evidence)
        ]
        if examples:
            self.odds.fit([features for features, _ in examples], [changed for _, changed in examples])


class NeighbourChooser:
    """Finds the source with the least risk for each request."""

    def __init__(self, sources: Sources, answers: Answers, gate: ContentGate | None = None) -> None:
        """Choose among `sources`; a gate also compares tokens."""
        self._sources, self._answers, self._gate = sources, answers, gate
        self._risk = Risk()
        #: What a calibration fits, by name in saves.
        self.fitted: dict[str, Odds | Answers | ContentGate] = {
            "chooser.decision": self._risk.odds,
            "chooser.answers": answers,
        }
        if gate is not None:
            self.fitted["chooser.gate"] = gate

    def choose(self, scope: Scope, rows: Sequence[Row], vectors: Floats, forecasts: Floats) -> list[Choice | None]:
        """Return the choice for each row, from fingerprints (B, F) and forecasts (B, C); None: no neighbours."""
        chosen: list[Choice | None] = []
        for row, near, forecast in zip(rows, self._sources.search(scope, rows, vectors, K), forecasts, strict=True):
            if not near.sources:
                chosen.append(None)
                continue
            number, risk = self._risk.choose(self._see(near, forecast))
            source, risk_unquarantined = near.sources[number], risk
            if self._gate is not None and self._gate.refuses(row.ids, source.ids):
                risk = risk_unquarantined = inf
            if source.entry.key in self._sources.quarantined:
                risk = inf
            chosen.append(Choice(source, near.similarity[number], risk, risk_unquarantined))
        return chosen

    def learn(self, cases: Sequence[Observation]) -> None:
        """Learn the range of answers and the rarity of tokens."""
        self._answers.learn(np.stack([case.answer for case in cases]))
        if self._gate is not None:
            self._gate.learn(case.row.ids for case in cases)

    def look(self, case: Observation, vector: Floats, forecast: Floats) -> tuple[Evidence, list[bool]]:
        """Return the evidence on a request's neighbours, and which neighbours have the model's own answer (n,)."""
        (near,) = self._sources.search(case.scope, [case.row], vector[None], K)
        if not near.sources:
            return Evidence(()), []
        signatures = np.stack([source.answer for source in near.sources])
        return self._see(near, forecast), self._answers.agree(signatures, case.answer).tolist()

    def fit(self, looks: Sequence[tuple[Evidence, Sequence[bool]]]) -> tuple[Doubles, Doubles]:
        """Fit the risk model to what `look` returned for N requests.

        Returns the risk of each (N,), and whether its chosen source has another answer (N,), 0 or 1.
        """
        seen = [evidence for evidence, _ in looks]
        self._risk.fit(seen, [is_right for _, is_right in looks])
        chosen = [self._risk.choose(evidence) if evidence.similarity else (0, inf) for evidence in seen]
        is_changed = [not (is_right and is_right[n]) for (n, _), (_, is_right) in zip(chosen, looks, strict=True)]
        return np.array([risk for _, risk in chosen], np.float64), np.array(is_changed, np.float64)

    def _see(self, near: Near, forecast: Floats) -> Evidence:
        signatures = np.concatenate(list(map(_ANSWER, near.sources))).reshape(len(near.sources), -1)
        agree = self._answers.agree(signatures[:, None], signatures).tolist()
        closeness = self._answers.closeness(forecast, signatures)
        if isnan(sum(closeness)):
            closeness = [0.0 if isnan(value) else value for value in closeness]
        return Evidence(near.similarity, agree, closeness)


class Semantic:
    """The rung `semantic`: serves a request from its chosen source if the risk is within the limit. Approximate."""

    name = "semantic"
    is_lossless = False

    def __init__(
        self,
        bank: Bank,
        sources: Sources,
        fingerprint: LearnedFingerprint,
        chooser: NeighbourChooser,
        head: Weights,
        counters: Counters,
    ) -> None:
        """Serve from `sources` once there is a calibration; `head`: the weights outside the trunk."""
        #: In force; None: nothing is reused approximately.
        self.calibration: Calibration | None = None
        self.bank, self.sources, self.fingerprint, self.chooser = bank, sources, fingerprint, chooser
        self.head, self._counters = head, counters

    def serving(self, weights: str) -> Calibration | None:
        """Return the calibration that serves trunk weights of this digest; None if nothing is reused approximately.

        Also None while the cache itself fails: the audit cannot be relied on then.
        """
        calibration = self.calibration
        if (
            calibration is None
            or calibration.weights != weights
            or calibration.limit is None
            or self._counters.is_failing
        ):
            return None
        return calibration if calibration.head == self.head.digest() else None

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        """Search for these rows; record fingerprints, forecasts and choices in the call, and hits within the limit."""
        calibration = self.serving(call.scope.weights)
        if any(map(_IS_MISREAD, rows)):
            rows = [row for row in rows if not row.is_misread]
        if calibration is None or (limit := calibration.limits.get(self.name)) is None or not rows:
            call.n_searched = 0
            return
        if call.requests.may_be_refused() or not call.requests.are_usual():  # a fingerprint reads tokens only
            return
        vectors, forecasts = self.fingerprint.project(call.requests.tokens(rows))
        if not isfinite(np.add.reduce(vectors, axis=None)):  # rows whose token vectors are not finite are computed
            finite: Bools = np.isfinite(np.add.reduce(vectors, axis=1))
            rows, vectors, forecasts = list(compress(rows, finite)), vectors[finite], forecasts[finite]
        if not rows:
            return
        chosen = self.chooser.choose(call.scope, rows, vectors, forecasts)
        if self.calibration is not calibration:  # the sources searched may belong to another calibration
            return
        call.calibration, used = calibration, []
        for row, choice, vector, forecast in zip(rows, chosen, vectors, forecasts, strict=True):
            call.vectors[row.number], call.forecasts[row.number] = vector, forecast
            if choice is None:
                continue
            call.choices[row.number] = choice
            if choice.risk <= limit and choice.source is not None:
                source, entry = choice.source, choice.source.entry
                call.hits[row.number] = Hit(
                    self.name,
                    entry.key,
                    entry.fields,
                    similarity=choice.similarity,
                    answer=source.answer,
                    share=min(1.0, choice.risk / limit) if limit > 0 else 1.0,
                    risk=choice.risk,
                    logits=source.logits,
                )
                used.append(entry.key)
        self.bank.used(used)

    def is_current(self, weights: str, calibration: Calibration, hits: Iterable[Hit]) -> bool:
        """Whether the calibration of a look-up is still in force, and the sources of its hits may still serve."""
        sources = (hit.source for hit in hits if hit.answer is not None and hit.source)
        return self.serving(weights) is calibration and all(map(self.sources.may_serve, sources))


def _describe(seen: Evidence) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Yield (index, features (F,)) of each candidate: the nearest neighbour with a given answer."""
    similarity, n = seen.similarity, len(seen.similarity)
    if n < K:
        return
    nearest, last = similarity[0], similarity[-1]
    votes = []
    for similar in similarity:  # a loop: in Python 3.11 a comprehension is a function call
        votes.append(exp((similar - nearest) / _WIDTH))
    n_votes, mean = sum(votes), sum(similarity) / n
    for number, agrees in enumerate(seen.agree):
        if not agrees[number] or any(agrees[:number]):
            continue
        share = sum(compress(votes, agrees)) / n_votes
        other = last - _WIDTH / 2 if all(agrees) else similarity[agrees.index(False)]
        own = similarity[number]
        yield (
            number,
            (
                own,
                own - other,
                sum(agrees) / n,
                share,
                log(share + 1e-3),
                similarity[2],
                mean,
                all(agrees[:3]),
                own == nearest,
                seen.closeness[number],
            ),
        )
