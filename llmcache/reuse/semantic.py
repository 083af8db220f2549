"""The semantic rung: another request means the same, says the fingerprint. Approximate.

One search a call serves all layers, and the deepest stored layer of the neighbour is taken: what the layers above it
would compute from its state is what they computed for it before, so reusing a lower one gives the same answer for more
work. What is computed on top of another request's state is not stored: it is not this request's.
"""

from collections.abc import Mapping, Sequence

from llmcache.context import Call, Reuse, Row
from llmcache.decide import deepest_layer
from llmcache.library import Library
from llmcache.shelf import Neighbour


class Semantic:
    """Serves a request from its nearest stored neighbour when that is near enough."""

    name = "semantic"
    is_lossless = False

    def __init__(self, library: Library, tau: Mapping[int, float]) -> None:
        """Look in `library`, with a threshold by layer."""
        self._library = library
        self._tau = tau

    def asks_at(self, layer: int) -> bool:
        return layer == 0

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        vectors = call.fingerprints.get(self._library.layers[-1])  # all layers have the same
        if vectors is None or call.scope is None:
            return []
        found = self._library.search(call.scope, rows, vectors[[row.number for row in rows]])
        return [reuse for row, near in zip(rows, found, strict=True) if (reuse := self._decide(call, row, near))]

    def _decide(self, call: Call, row: Row, neighbours: Sequence[Neighbour]) -> Reuse | None:
        for near in neighbours:
            call.saw(row, near.similarity)
            layer = deepest_layer(near.similarity, self._tau, self._library.held(near.key))
            if layer is None:
                continue
            state = self._library.read(near.key, layer, with_kv=call.kv_cache is not None)
            if state is not None:
                return Reuse(row.number, layer, self.name, state.hidden, state.kv, near.key, near.similarity)
        return None
