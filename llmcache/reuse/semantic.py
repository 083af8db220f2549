"""The semantic rung: another request means the same, say the fingerprints of its neighbours. Approximate.

One search a call serves all layers, and the deepest stored layer of the neighbour is taken: what the layers above it
would compute from its state is what they computed for it before, so reusing a lower one gives the same answer for more
work. What is computed on top of another request's state is not stored: it is not this request's.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from llmcache.banks.cache_banks import CacheBanks
from llmcache.execution.old_call import Call, Reuse
from llmcache.matching.decision import deepest_layer, share_of
from llmcache.request.rows import Row, Scope
from llmcache.reuse.base import Rung
from llmcache.reuse.chooser import Choice, NeighbourChooser


class Limits(Protocol):
    """How much risk is allowed now."""

    def allowed(self, scope: Scope) -> Mapping[int, float]:
        """Largest risk by layer, for requests of a scope; empty where nothing may be reused."""


class Semantic(Rung):
    """Serves a request from the neighbour that was chosen, if the risk is within its limit."""

    name = "semantic"
    is_lossless = False

    def __init__(self, banks: CacheBanks, chooser: NeighbourChooser, limits: Limits) -> None:
        self._banks = banks
        self._chooser = chooser
        self._limits = limits

    def applies_at(self, layer: int) -> bool:
        return layer == 0

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        vectors = call.read.fingerprints.get(self._banks.layers[-1])  # all layers have the same
        if call.read.fingerprint_epoch != self._banks.fingerprint_epoch:
            return []  # fingerprints are others now
        if vectors is None or not (limits := self._limits.allowed(call.read.scope)):
            return []
        call.plan.limits, numbers = limits, [row.number for row in rows]
        forecasts = None if call.read.forecasts is None else call.read.forecasts[numbers]
        chosen = self._chooser.choose(call.read.scope, rows, vectors[numbers], forecasts)
        call.plan.choices = dict(zip(numbers, chosen, strict=True))
        self._fetch(call, rows, chosen, limits)
        pairs = zip(rows, chosen, strict=True)
        return [reuse for row, choice in pairs if choice and (reuse := self._reuse(call, row, choice, limits))]

    def _fetch(
        self, call: Call, rows: Sequence[Row], chosen: Sequence[Choice | None], limits: Mapping[int, float]
    ) -> None:
        """Have the states in memory that are to serve; what cannot be had in time is computed."""
        serving = {
            choice.neighbour.key: row.n_valid
            for row, choice in zip(rows, chosen, strict=True)
            if choice is not None and deepest_layer(choice.risk, limits, self._banks.layers) is not None
        }
        if serving and self._banks.has_tier:
            self._banks.fetch(call.read.scope, serving, call.progress.kv_cache is not None, call.read.generation)

    def _reuse(self, call: Call, row: Row, choice: Choice, limits: Mapping[int, float]) -> Reuse | None:
        near = choice.neighbour
        call.plan.found(row, near.similarity)
        layer = deepest_layer(choice.risk, limits, self._banks.held(near.key))
        if layer is None:
            return None
        state = self._banks.read(near.key, layer, with_kv=call.progress.kv_cache is not None)
        if state is None:
            return None
        reuse = Reuse(row.number, layer, self.name, state.hidden, state.kv, near.key, near.similarity)
        reuse.answer, reuse.share = near.answer, share_of(choice.risk, limits[layer])
        return reuse


class Fixed:
    """Limits that the user chose: a `tau` by layer, for any scope."""

    def __init__(self, tau: Mapping[int, float]) -> None:
        self._limits = {layer: -least for layer, least in tau.items()}

    def allowed(self, scope: Scope) -> Mapping[int, float]:
        return self._limits
