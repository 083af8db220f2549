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
from llmcache.execution.old_call import Call, Reuse
from llmcache.models.mark import Mark
from llmcache.models.payloads import padding_of
from llmcache.request.rows import Row


class StateCapture:
    """Keeps states of one wrapped model. Thread-safe."""

    def __init__(self, parts: Components) -> None:
        """Keep what `parts` are to serve."""
        self._components = parts

    def capture(self, call: Call, number: int, hidden: Tensor) -> None:
        """Keep what rows computed at a layer (B, T, D), if it is stored, until the call has succeeded."""
        started = perf_counter()
        with self._components.counters.guard("keep a state") as tried:
            self._capture(call, number, hidden)
        if tried.has_failed:
            call.progress.captured.clear()
        call.progress.storing_s += perf_counter() - started

    def may_wait(self, call: Call) -> bool:
        """Whether what was kept of a call may be stored later: nobody needs it before the next call looks up."""
        parts = self._components
        if not (call.progress.captured and parts.weights.is_steady and parts.prefix is None):
            return False
        if parts.is_collecting or parts.banks.expires:
            return False
        if not call.inputs.arguments["input_ids"].is_cpu:  # a device's streams are not waited for elsewhere
            return False
        if parts.observer is None:
            return True
        calibrated = parts.calibrated  # answers of what is stored are noted, or may be soon
        return calibrated is not None and not (calibrated.is_learning or calibrated.is_growing)

    def store_later(self, call: Call, ended: float | None, mark: Mark | None) -> bool:
        """Store what was kept of a call that may wait, if the weights have stayed as they were all through it.

        Args:
            call: It ended a while ago.
            ended: Clock at which it had computed.
            mark: Of the weights, found after it had ended; None: they are looked at now.

        Returns:
            Whether they have.
        """
        known, weights = call.read.mark, self._components.weights
        has_stayed = (mark is not None and mark is known) or weights.stayed(known, call.read.scope.weights)
        if has_stayed:
            self.store(call, ended)
        return has_stayed

    def check_weights(self, call: Call) -> None:
        """Keep nothing of rows whose weights were edited while they were computed, be they restored since."""
        if not call.progress.captured and (call.plan.prefill is None or call.plan.is_served):
            return
        call.progress.may_store = False
        with self._components.counters.guard("look at the weights again"):
            call.progress.may_store = self._components.weights.stayed(call.read.mark, call.read.scope.weights)
        if call.progress.may_store:
            return
        call.progress.captured.clear()
        for row in call.active_rows:
            if not any(row.number in taken for taken in (call.plan.reused, call.served, call.plan.revalidated)):
                row.bypass_reason = "weights_changed"

    def store(self, call: Call, ended: float | None = None) -> None:
        """Store what was kept of a call that has succeeded and, if it was just made, had computed at that clock."""
        banks, counters, read = self._components.banks, self._components.counters, call.read
        calibrated = self._components.calibrated
        is_found = calibrated is None or calibrated.is_growing  # sources that were calibrated are joined by no other
        differing, costs = self._differing(call), {}
        if ended is not None and banks.heeds_costs:
            costs = _costs(call, ended)
        for number, states in call.progress.captured.items():
            row, features, vectors = call.rows[number], None, {}
            if number not in differing:
                features = None if read.features is None or calibrated is not None else read.features[number]
                found = read.fingerprints.items() if is_found else ()
                vectors = {layer: of_rows[number] for layer, of_rows in found if layer in states}
            elif differing[number]:
                row = replace(row, key=row.again)  # others find the first
            else:
                continue
            with counters.guard("store a request"):
                if not banks.put(read.scope, row, states, features, vectors, read.fingerprint_epoch, read.generation):
                    counters.too_large()
                if number in costs:
                    banks.cost(row.key, costs[number])

    def _differing(self, call: Call) -> dict[int, bool]:
        """Of rows that are the same request as an earlier one: whether they came out otherwise, and that is of use."""
        # What was computed on top of a row's own states joins these, whatever became of the first.
        rows, captured, reused = call.rows, call.progress.captured, call.plan.reused
        on_own = {n: True for n in captured if n in reused and reused[n].key == rows[n].again}
        firsts: dict[str, int] = {}
        others = (n for n in captured if n not in on_own)
        pairs = {n: first for n in others if (first := firsts.setdefault(rows[n].key, n)) != n}
        if not pairs or not self._components.serves_repeats:
            return on_own | dict.fromkeys(pairs, False)
        found = dict.fromkeys(pairs, False)
        with self._components.counters.guard("compare rows that are the same request"):
            differ = [_differ(captured[number], captured[first]) for number, first in pairs.items()]
            found = dict(zip(pairs, torch.stack(differ).tolist(), strict=True))  # in one transfer
        return on_own | found

    def _capture(self, call: Call, number: int, hidden: Tensor) -> None:
        if number not in self._components.banks.layer_banks or not self._is_of_use:
            return
        call.read.project()  # before it is told who takes part: some may have no fingerprint
        prefill = call.plan.prefill
        for row in call.active_rows:
            if prefill is not None and prefill.keeps_requests and prefill.fits(row):
                continue
            reuse = call.plan.reused.get(row.number)
            if reuse is not None and (reuse.layer >= number or not reuse.stores_above):
                continue
            with torch.inference_mode(False), torch.no_grad():  # normal tensors, which a store can keep as they are
                tensors = {"hidden": self._components.payload.take(hidden[row.number], row.valid)}
                padding = self._padding_of(row, hidden, reuse)
                if padding is not None:
                    tensors[HIDDEN_PADDING] = hidden[row.number][padding]
                if call.progress.kv_cache is not None:
                    tensors |= kv.capture(call.progress.kv_cache, row, number, self._components.banks.layers, padding)
            call.progress.captured.setdefault(row.number, {})[number] = tensors

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


def _costs(call: Call, ended: float) -> dict[int, float]:
    """What computing each row that nothing served took, by number; see `Policy.on_cost`."""
    if call.served:
        return {}
    n_tokens = {row.number: row.n_valid for row in call.rows if row.number not in call.plan.reused and row.n_valid}
    if not call.inputs.arguments["input_ids"].is_cpu:  # the host's clock says nothing of what the device does
        return {number: float(n) for number, n in n_tokens.items()}
    progress = call.progress
    took_ms = 1e3 * (ended - call.inputs.opened - progress.lookup_s - progress.storing_s)
    return {number: took_ms * n / sum(n_tokens.values()) for number, n in n_tokens.items()} if took_ms > 0 else {}


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
