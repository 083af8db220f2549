"""The paper rung: Algorithm 1 of LLMCache (Bansal 2025) as written, a search per layer. The reference.

Before layer l runs, that layer's bank is searched; a stored fingerprint at least tau alike replaces the layer's output,
otherwise the layer is computed from whatever came below and the result is stored as the request's own. The fingerprint
is that of the embedding output, or with `fingerprint_per_layer` that of h_(l-1), the states that enter the layer. Above
a reused state those are the source's, so its entries are found at similarity 1 as long as the banks hold them, and what
is computed is stored under the fingerprint of the states it was computed from. Departures: `>=` where the paper also
writes `>`, and an entry serves only rows with as many valid tokens.

It gives what the semantic rung gives wherever both find the same entry. They differ when banks differ: after uneven
eviction a higher bank may hold only another neighbour above tau, which this rung takes and the semantic one does not.
"""

from collections.abc import Mapping, Sequence

from llmcache.banks.cache_banks import CacheBanks
from llmcache.execution.old_call import Call, Reuse
from llmcache.matching.partition import Neighbour
from llmcache.request.rows import Row
from llmcache.reuse.base import Rung


class Paper(Rung):
    """Serves each layer from its own bank, or computes it."""

    name = "paper"
    is_lossless = False

    def __init__(self, banks: CacheBanks, tau: Mapping[int, float]) -> None:
        """Look in `banks`, with a threshold by layer."""
        self._banks = banks
        self._tau = tau

    def applies_at(self, layer: int) -> bool:
        return layer in self._tau

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        vectors = call.read.fingerprints.get(layer)
        if vectors is None:
            return []
        found = self._banks.search(call.read.scope, rows, vectors[[row.number for row in rows]], layer=layer)
        return [reuse for row, near in zip(rows, found, strict=True) if (reuse := self._decide(call, row, near, layer))]

    def _decide(self, call: Call, row: Row, neighbours: Sequence[Neighbour], layer: int) -> Reuse | None:
        for near in neighbours:
            call.plan.found(row, near.similarity)
            if near.similarity >= self._tau[layer]:
                with_kv = call.progress.kv_cache is not None
                state = self._banks.read(near.key, layer, with_kv, is_single=True)
                if state is not None:
                    return Reuse(
                        row.number,
                        layer,
                        self.name,
                        state.hidden,
                        state.kv,
                        near.key,
                        near.similarity,
                        stores_above=True,
                    )
        return None
