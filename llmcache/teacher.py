"""Teaches fingerprint and decision from requests that were computed, and lets these serve others.

A decision must learn from requests that the fingerprint has not seen: of those that it was fitted on it knows too much.
So requests take turns (cross-fitting): each fifth is looked up among the other four, by a fingerprint fitted on these
alone. The decision learns from all such looks; then the fingerprint is fitted once more, on all of them.
"""

from collections.abc import Collection, Sequence
from math import inf

import numpy as np

from llmcache.answers import Answers
from llmcache.arrays import Doubles, Floats
from llmcache.errors import CalibrationError
from llmcache.fingerprint import Fingerprint, foresee
from llmcache.fingerprint.tokens import TokenVectors
from llmcache.library import Library
from llmcache.observation import Observation
from llmcache.reuse.semantic import Chooser

N_TURNS = 5


class Teacher:
    """Of one wrapped model. The caller holds a lock."""

    def __init__(
        self,
        library: Library,
        fingerprint: Fingerprint,
        tokens: TokenVectors | None,
        chooser: Chooser,
        answers: Answers,
    ) -> None:
        """Remember whom to teach.

        Args:
            library: Where sources are held.
            fingerprint: Not fitted yet.
            tokens: Where it takes vectors of tokens from, or None.
            chooser: Not taught yet.
            answers: The kind of the model's answers.
        """
        self._library = library
        self._fingerprint = fingerprint
        self._tokens = tokens
        self._chooser = chooser
        self._answers = answers

    def teach(self, cases: Sequence[Observation]) -> Doubles:
        """Fit the fingerprint, teach the decision, and let the requests serve from then on; they stay.

        Args:
            cases: Requests that all differ.

        Returns:
            Doubts about them, each looked up among others (N,).

        Raises:
            CalibrationError: Not all of them are held.
        """
        self._hold(cases)
        self._chooser.learn(cases)
        if self._tokens is not None:
            self._tokens.frame(cases[0].row, cases[0].features)
        looks = []
        for turn in range(N_TURNS):
            self._fit([case for i, case in enumerate(cases) if i % N_TURNS != turn])
            looks += [self._chooser.look(case, *self._foresee(case)) for case in cases[turn::N_TURNS]]
        doubt = self._chooser.teach(looks)
        self._fit(cases)
        return doubt

    def resume(self) -> None:
        """Let requests be found by the fingerprint again, which was fitted before."""
        self._library.search_by(self._fingerprint)

    def doubts(self, cases: Sequence[Observation], repeated: Collection[str]) -> tuple[Doubles, list[str | None]]:
        """The doubt about each request (N,), and who would serve it.

        Args:
            cases: The requests.
            repeated: Keys of those that are stored themselves, about which there is no doubt.
        """
        doubt = np.full(len(cases), inf)
        found: list[str | None] = [None] * len(cases)
        for i, case in enumerate(cases):
            if case.row.key in repeated:
                doubt[i], found[i] = -inf, case.row.key
                continue
            vector, forecast = self._foresee(case)
            forecasts = None if forecast is None else forecast[None]
            (choice,) = self._chooser.choose(case.scope, [case.row], vector[None], forecasts)
            if choice is not None:
                doubt[i], found[i] = choice.doubt, choice.neighbour.key
        return doubt, found

    def _hold(self, cases: Sequence[Observation]) -> None:
        for case in cases:
            if case.states:
                self._library.put(case.scope, case.row, case.states)
            self._library.sign(case.row.key, case.answer)

    def _fit(self, cases: Sequence[Observation]) -> None:
        """Fit the fingerprint on requests, which then are the only ones that are found."""
        self._fingerprint.fit(
            [case.features for case in cases], _targets(cases, self._answers), _outputs(cases, self._answers)
        )
        self._library.search_by(self._fingerprint)
        for case in cases:
            if not self._library.stand(case.row, self._foresee(case)[0], is_kept=True):
                raise CalibrationError(
                    "not all requests that are to serve are held: raise max_entries or max_bytes, or give fewer"
                )

    def _foresee(self, case: Observation) -> tuple[Floats, Floats | None]:
        """Fingerprint (F,) of a request, and the forecast of its output (C,), or None."""
        vectors, forecasts = foresee(self._fingerprint, case.features[None])
        return vectors[0], None if forecasts is None else forecasts[0]


def _targets(cases: Sequence[Observation], answers: Answers) -> Floats:
    """What the model made of requests (N, T): final states, and beside them what it put out, of as much weight."""
    kinds = [np.stack([case.target for case in cases])]
    if not answers.reads_payload:
        kinds.append(_outputs(cases, answers))
    centred = [kind - kind.mean(axis=0) for kind in kinds]
    return np.concatenate([kind / max(float(np.sqrt((kind**2).sum(axis=1).mean())), 1e-6) for kind in centred], axis=1)


def _outputs(cases: Sequence[Observation], answers: Answers) -> Floats:
    """What answers are made of (N, C). Of logits of classes only the differences count."""
    if answers.reads_payload:
        return np.stack([case.target for case in cases])
    logits = np.stack([case.output for case in cases])
    return logits - logits.mean(axis=1, keepdims=True) if answers.name == "class" else logits
