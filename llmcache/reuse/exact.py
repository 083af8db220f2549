"""The exact rung: the same valid tokens, types and positions were seen before. Equal to the stored run.

What is stored of a request is an entry in the banks; of causal models that keep K/V blocks and a tail, which the prefix
rung found before the layers.
"""

from collections.abc import Sequence

from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.records import StoredState
from llmcache.execution.old_call import Call, Reuse
from llmcache.request.rows import Row
from llmcache.reuse.base import Rung


class Exact(Rung):
    """Serves a request from its own stored state, at the deepest layer that is still held."""

    name = "exact"
    is_lossless = True

    def __init__(self, banks: CacheBanks) -> None:
        self._banks = banks

    def applies_at(self, layer: int) -> bool:
        return layer == 0

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        if self._banks.has_tier:
            missing = [row for row in rows if not (self._banks.known(row) or _is_in_blocks(call, row))]
            self._banks.promote(call.read.scope, missing, call.progress.kv_cache is not None, call.read.generation)
        return [reuse for row in rows if (reuse := self._decide(call, row))]

    def _decide(self, call: Call, row: Row) -> Reuse | None:
        if call.plan.prefill is not None and row.number in call.plan.prefill.repeats:
            return call.plan.prefill.repeats[row.number]
        own = self._find(call, row, row.again) if row.again else None
        return own or self._find(call, row, row.key)

    def _find(self, call: Call, row: Row, key: str) -> Reuse | None:
        if not self._banks.known(row, key) or not self._banks.is_lossless(key):
            return None
        deepest = None
        for layer in reversed(self._banks.held(key)):
            state = self._banks.read(key, layer, with_kv=call.progress.kv_cache is not None)
            if state is None:
                continue
            if is_whole := _is_whole(state, row):
                return self._reuse(row, layer, key, state, is_whole)
            if row.has_layout:
                continue
            deepest = deepest or self._reuse(row, layer, key, state, is_whole)
            if not row.layout or state.layout != row.layout:
                break  # else its padding may be held below: what lies above came when others had been served
        return deepest

    def _reuse(self, row: Row, layer: int, key: str, state: StoredState, is_whole: bool) -> Reuse:
        return Reuse(
            row.number,
            layer,
            self.name,
            state.hidden,
            state.kv,
            key,
            stores_above=True,
            padding=state.padding if is_whole else None,
            padding_kv=state.padding_kv if is_whole else {},
        )


def _is_in_blocks(call: Call, row: Row) -> bool:
    """Whether a row is kept in blocks, and has no entry."""
    prefill = call.plan.prefill
    return prefill is not None and prefill.keeps_requests and prefill.fits(row)


def _is_whole(state: StoredState, row: Row) -> bool:
    """Whether it holds what the model made of this row's padding, K/V included."""
    has_all = state.padding is not None and state.kv.keys() == state.padding_kv.keys()
    return has_all and state.layout == row.layout
