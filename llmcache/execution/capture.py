"""What is kept of the rows that a call computes: their states at stored layers, put into the banks at the end.

Trouble here costs speed, never correctness: it is counted, logged once, and the request is not stored.

Sizes: B rows, T tokens, D hidden width.
"""

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from llmcache.arrays import Ids
from llmcache.banks import kv
from llmcache.banks.layer_banks import HIDDEN_PADDING
from llmcache.execution.components import Components
from llmcache.models.payloads import padding_of
from llmcache.request.call import Call, Reuse
from llmcache.request.rows import Row


class StateCapture:
    """Keeps states of one wrapped model. Thread-safe."""

    def __init__(self, parts: Components) -> None:
        """Keep what `parts` are to serve."""
        self._components = parts

    def capture(self, call: Call, number: int, hidden: Tensor) -> None:
        """Keep what rows computed at a layer (B, T, D), if it is stored, until the call has succeeded."""
        started = perf_counter()
        try:
            self._capture(call, number, hidden)
        except Exception as error:
            self._components.counters.error("keep a state", error)
            call.captured.clear()
        call.storing_s += perf_counter() - started

    def check_weights(self, call: Call) -> None:
        """Keep nothing of rows whose weights were edited while they were computed, be they restored since."""
        if not (call.captured or call.prefill is not None):
            return
        assert call.scope is not None
        try:
            has_stayed = self._components.weights.stayed(call.mark, call.scope.weights)
        except Exception as error:
            self._components.counters.error("look at the weights again", error)
            has_stayed = False
        if has_stayed:
            return
        call.mark = None
        call.captured.clear()
        for row in call.active_rows:
            if not any(row.number in taken for taken in (call.reused, call.served, call.revalidated)):
                row.bypass_reason = "weights_changed"

    def store(self, call: Call) -> None:
        """Store what was kept of a call that has succeeded."""
        assert call.scope is not None
        calibrated = self._components.calibrated
        is_found = calibrated is None or calibrated.is_growing  # sources that were calibrated are joined by no other
        differing = self._differing(call)
        for number, states in call.captured.items():
            row, features, vectors = call.rows[number], None, {}
            if number not in differing:
                features = None if call.features is None or calibrated is not None else call.features[number]
                vectors = {
                    layer: rows[number] for layer, rows in call.fingerprints.items() if layer in states and is_found
                }
            elif differing[number]:
                row = replace(row, key=row.again)  # others find the first
            else:
                continue
            try:
                if not self._components.banks.put(call.scope, row, states, features, vectors, call.fingerprint_epoch):
                    self._components.counters.too_large()
            except Exception as error:
                self._components.counters.error("store a request", error)

    def _differing(self, call: Call) -> dict[int, bool]:
        """Of rows that are the same request as an earlier one: whether they came out otherwise, and that is of use."""
        # What was computed on top of a row's own states joins these, whatever became of the first.
        on_own = {n: True for n in call.captured if n in call.reused and call.reused[n].key == call.rows[n].again}
        firsts: dict[str, int] = {}
        others = (n for n in call.captured if n not in on_own)
        pairs = {n: first for n in others if (first := firsts.setdefault(call.rows[n].key, n)) != n}
        if not pairs or not self._components.serves_repeats:
            return on_own | dict.fromkeys(pairs, False)
        try:
            differ = [_differ(call.captured[number], call.captured[first]) for number, first in pairs.items()]
            return on_own | dict(zip(pairs, torch.stack(differ).tolist(), strict=True))  # in one transfer
        except Exception as error:
            self._components.counters.error("compare rows that are the same request", error)
            return on_own | dict.fromkeys(pairs, False)

    def _capture(self, call: Call, number: int, hidden: Tensor) -> None:
        if number not in self._components.banks.layer_banks or not self._is_of_use:
            return
        for row in call.active_rows:
            reuse = call.reused.get(row.number)
            if reuse is not None and (reuse.layer >= number or not reuse.stores_above):
                continue
            with torch.inference_mode(False), torch.no_grad():  # normal tensors, which a store can keep as they are
                tensors = {"hidden": self._components.payload.take(hidden[row.number], row.valid)}
                padding = self._padding_of(row, hidden, reuse)
                if padding is not None:
                    tensors[HIDDEN_PADDING] = hidden[row.number][padding]
                if call.kv_cache is not None:
                    tensors |= kv.capture(call.kv_cache, row, number, self._components.banks.layers, padding)
            call.captured.setdefault(row.number, {})[number] = tensors

    def _padding_of(self, row: Row, hidden: Tensor, reuse: Reuse | None) -> Ids | None:
        """The places of a row that are not valid, where they are to be served as well; only repeats are."""
        if not (row.has_layout or row.layout) or not self._components.serves_repeats:
            return None
        if reuse is not None and reuse.padding is None:  # what lies below is not what the model made of them
            return None
        return padding_of(row.valid, hidden.shape[1])

    @property
    def _is_of_use(self) -> bool:
        """Whether an entry may serve anybody: where prefixes are all that serves, none does."""
        parts = self._components
        return bool(parts.rungs) or parts.fingerprint is not None or parts.is_collecting


def _differ(states: Mapping[int, Mapping[str, Tensor]], others: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
    """Whether what was kept of two rows of one call is not the same bit for bit: bool (), on their device."""
    pairs = [(one, others.get(layer, {}).get(name)) for layer in states for name, one in states[layer].items()]
    device = pairs[0][0].device
    found = [
        torch.ne(one, other).any().to(device)
        if other is not None and other.shape == one.shape
        else torch.ones((), dtype=torch.bool, device=device)  # in another layout
        for one, other in pairs
    ]
    return torch.stack(found).any()
