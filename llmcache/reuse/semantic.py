"""The semantic rung: another request means the same, say the fingerprints of its neighbours. Approximate.

One search a call serves all layers, and the deepest stored layer of the neighbour is taken: what the layers above it
would compute from its state is what they computed for it before, so reusing a lower one gives the same answer for more
work. What is computed on top of another request's state is not stored: it is not this request's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from llmcache.answers import Answers
from llmcache.arrays import Bools, Floats, below
from llmcache.context import Call, Reuse, Row, Scope
from llmcache.decide import Decision, deepest_layer, share_of
from llmcache.gate import ContentGate
from llmcache.library import Library
from llmcache.observation import Observation
from llmcache.shelf import Neighbour


@dataclass(frozen=True, slots=True)
class Choice:
    """Who would serve a request, and how doubtful that is; infinite doubt where the gate refuses, or it was struck."""

    neighbour: Neighbour
    doubt: float


class Limits(Protocol):
    """How much doubt is allowed now."""

    def allowed(self, scope: Scope) -> Mapping[int, float]:
        """Largest doubt by layer, for requests of a scope; empty where nothing may be reused."""


class Chooser:
    """Finds, for each request, the neighbour that would serve it best."""

    def __init__(
        self, library: Library, decision: Decision, answers: Answers | None = None, gate: ContentGate | None = None
    ) -> None:
        """Look in `library`.

        Args:
            library: Where neighbours are.
            decision: Chooses among them.
            answers: Tells which answers are the same; needed by decisions that read them.
            gate: Compares the tokens, or None.
        """
        self.answers = answers
        self._library = library
        self._decision = decision
        self._gate = gate

    def choose(self, scope: Scope, rows: Sequence[Row], vectors: Floats) -> list[Choice | None]:
        """The best neighbour of each row, given fingerprints (B, F); None where nothing was found."""
        found = self._library.search(scope, rows, vectors, self._decision.k)
        return [self._choose(row, near) if near else None for row, near in zip(rows, found, strict=True)]

    @property
    def most(self) -> float:
        """The largest doubt that a calibration may allow."""
        return self._decision.most

    def learn(self, cases: Sequence[Observation]) -> None:
        """Take in what answers look like, and how rare tokens are."""
        if self.answers is not None:
            self.answers.learn(np.stack([case.answer for case in cases]))
        if self._gate is not None:
            self._gate.learn(case.row.ids for case in cases)

    def state(self) -> dict[str, Floats]:
        """What decision, answers and gate learned."""
        parts = {"decision": self._decision, "answers": self.answers, "gate": self._gate}
        learned = {part: learner.state() for part, learner in parts.items() if learner is not None}
        return {f"{part}.{name}": array for part, state in learned.items() for name, array in state.items()}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Take up what they learned."""
        for part, learner in (("decision", self._decision), ("answers", self.answers), ("gate", self._gate)):
            if learner is not None:
                learner.restore(below(f"{part}.", state))

    def teach(self, cases: Sequence[Observation], vectors: Floats) -> None:
        """Let the decision learn from requests whose answers are known, given their fingerprints (N, F)."""
        k = self._decision.k
        searches = (self._library.search(case.scope, [case.row], vectors[i : i + 1], k) for i, case in enumerate(cases))
        found = [near for (near,) in searches]
        full = [i for i, near in enumerate(found) if len(near) == k]
        if not full or self.answers is None:
            return
        own = np.stack([case.answer for case in cases])
        similarity = np.array([[n.similarity for n in found[i]] for i in full], np.float32)
        agree = np.concatenate([self._agreement(found[i]) for i in full])
        told = np.stack([np.stack([n.answer for n in found[i] if n.answer is not None]) for i in full])
        self._decision.fit(similarity, agree, self.answers.agree(told, own[full][:, None]))

    def _choose(self, row: Row, near: Sequence[Neighbour]) -> Choice:
        similarity = np.full((1, self._decision.k), -1, np.float32)
        similarity[0, : len(near)] = [neighbour.similarity for neighbour in near]
        number, doubt = self._decision.choose(similarity, self._agreement(near))
        chosen = near[int(number[0])]
        if chosen.is_struck or (self._gate is not None and self._gate.refuses(row.ids, chosen.ids)):
            return Choice(chosen, inf)
        return Choice(chosen, float(doubt[0]))

    def _agreement(self, near: Sequence[Neighbour]) -> Bools:
        """Which neighbours have the same answer, (1, k, k); one without an answer agrees with none."""
        k = self._decision.k
        agree = np.zeros((1, k, k), np.bool_)
        if self._decision.reads_answers and self.answers is not None:
            width = max((len(n.answer) for n in near if n.answer is not None), default=1)
            signatures = np.full((len(near), width), np.nan, np.float32)
            for signature, neighbour in zip(signatures, near, strict=True):
                if neighbour.answer is not None:
                    signature[:] = neighbour.answer
            agree[0, : len(near), : len(near)] = self.answers.agree(signatures[:, None], signatures[None])
        return agree


class Semantic:
    """Serves a request from the neighbour that was chosen, if the doubt is within its limit."""

    name = "semantic"
    is_lossless = False

    def __init__(self, library: Library, chooser: Chooser, limits: Limits) -> None:
        """Serve from `library` what the chooser finds, within limits."""
        self._library = library
        self._chooser = chooser
        self._limits = limits

    def asks_at(self, layer: int) -> bool:
        return layer == 0

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        vectors = call.fingerprints.get(self._library.layers[-1])  # all layers have the same
        if vectors is None or call.scope is None or not (limits := self._limits.allowed(call.scope)):
            return []
        chosen = self._chooser.choose(call.scope, rows, vectors[[row.number for row in rows]])
        pairs = zip(rows, chosen, strict=True)
        return [reuse for row, choice in pairs if choice and (reuse := self._reuse(call, row, choice, limits))]

    def _reuse(self, call: Call, row: Row, choice: Choice, limits: Mapping[int, float]) -> Reuse | None:
        near = choice.neighbour
        call.saw(row, near.similarity)
        layer = deepest_layer(choice.doubt, limits, self._library.held(near.key))
        if layer is None:
            return None
        state = self._library.read(near.key, layer, with_kv=call.kv_cache is not None)
        if state is None:
            return None
        reuse = Reuse(row.number, layer, self.name, state.hidden, state.kv, near.key, near.similarity)
        reuse.answer, reuse.share = near.answer, share_of(choice.doubt, limits[layer])
        return reuse


class Fixed:
    """Limits that the user chose: a `tau` by layer, for any scope."""

    def __init__(self, tau: Mapping[int, float]) -> None:
        """Turn least similarities into largest doubts."""
        self._limits = {layer: -least for layer, least in tau.items()}

    def allowed(self, scope: Scope) -> Mapping[int, float]:
        """The same at all times."""
        return self._limits
