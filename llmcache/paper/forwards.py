"""(4) Layer execution manager: replacements for the forwards of the trunk and of each layer.

Only this module swaps layers, since native hooks cannot skip a layer. Rows to compute are gathered, computed and
scattered; rows that skip a layer pass through until the layer at which their stored state is inserted. The stored K/V
of skipping rows are written to the caller's cache, so that all layers have equal lengths after every call. A gap would
silently give a wrong next token.

Sizes: B rows, R rows computed, T tokens, D hidden width, H K/V heads, n valid tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.errors import WrapError
from llmcache.models.adapters import Adapter, Trunk, cache_name, repack, unpack
from llmcache.models.arguments import select_rows
from llmcache.models.hooks import ALREADY_WRAPPED, SWAPPING, Installed, Listener, Swap, is_wrapped
from llmcache.models.packing import Payload
from llmcache.paper.call import OUT_OF_ORDER, WITHIN, Call, Reuse
from llmcache.request.rows import Row


class TrunkForward(Swap):
    """Replaces the trunk's forward."""

    is_of_trunk = True
    listener: Any  # whose `call(swap, args, kwargs)` returns the trunk's output

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.listener.call(self, args, kwargs)


class LayerForward(Swap):
    """Replaces one layer's forward."""

    listener: Any  # whose `layer(swap, number, args, kwargs)` returns the output of a layer of its `call_under_way()`

    def __init__(self, module: nn.Module, listener: Listener) -> None:
        super().__init__(module, listener)
        self.numbers: list[int] = []  # positions at which the trunk runs it; several if layers are shared

    def run(self, *args: Any, **kwargs: Any) -> Any:
        call: Call | None = self.listener.call_under_way()
        if call is None or call.reason is not None or call.turn == WITHIN:
            return self.original(*args, **kwargs)
        number = call.turn
        if number not in self.numbers:  # a layer was replaced, added or deleted, or called directly
            call.turn = OUT_OF_ORDER
            return self.original(*args, **kwargs)
        call.turn = WITHIN
        output = self.listener.layer(self, number, args, kwargs)
        call.turn = number + 1
        return output


def install(trunk: Trunk, listener: Listener) -> Installed:
    """Swap the forwards of the trunk and of every layer; return the object that restores them.

    After an error, swaps already made are undone.

    Raises:
        WrapError: The trunk is already wrapped.
    """
    installed, swaps = Installed(), dict[nn.Module, LayerForward]()
    with SWAPPING:
        if is_wrapped(trunk):  # meanwhile, by another thread
            raise WrapError(ALREADY_WRAPPED)
        try:
            for number, module in enumerate(trunk.layers):
                if module not in swaps:
                    swaps[module] = LayerForward(module, listener)
                    installed.add(swaps[module].remove)
                swaps[module].numbers.append(number)
            installed.add(TrunkForward(trunk.module, listener).remove)
        except BaseException:
            installed.remove()
            raise
    return installed


class Runner:
    """Runs layers for the rows that need it, and inserts stored states into the others."""

    def __init__(self, payload: Payload, adapter: Adapter) -> None:
        self._payload = payload
        self._skipped = adapter.skipped  # makes a skipped layer's output; None: learned from the first layer that runs
        self.cannot_skip = False  # set once a layer returned more than hidden states

    def run(self, call: Call, swap: LayerForward, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a layer in the layer's own format, before stored states are inserted."""
        rows = [row.number for row in call.rows if not call.skips(row.number, number)]
        has_run = number == 0 and call.first_output is not None
        if has_run or len(rows) == len(call.rows) or self._skipped is None or (rows and call.takes_all_rows):
            output = call.first_output if has_run else swap.original(*args, **kwargs)
            if call.kv_cache is not None:
                _replace_kv(call, number)
            if self._skipped is None:
                self._skipped = _learn_format(output)
                self.cannot_skip = self._skipped is None
            return output
        hidden = swap.arguments.get(args, kwargs, swap.arguments.names[0])
        call.n_skipped += len(call.rows) - len(rows)
        if not rows:
            if call.kv_cache is not None:
                _fill_kv(call, number, hidden.shape[1], hidden.device)
            return self._skipped(hidden, swap.module, swap.arguments.bind(args, kwargs))
        index = torch.tensor(rows, device=hidden.device)
        args, kwargs = select_rows(swap.arguments, args, kwargs, index, len(call.rows))
        scratch = None
        if call.kv_cache is not None:
            from transformers import DynamicCache

            scratch = DynamicCache()  # the caller's cache can only be updated with all rows
            args, kwargs = swap.arguments.replace(args, kwargs, {cache_name(swap.arguments.names): scratch})
            mask = swap.arguments.get(args, kwargs, "attention_mask")
            if mask is not None:  # with a cache of fixed length, it has columns for the full length
                mask = mask[..., : hidden.shape[1]]
                args, kwargs = swap.arguments.replace(args, kwargs, {"attention_mask": mask})
        part = swap.original(*args, **kwargs)
        computed = unpack(part)
        if scratch is not None:
            _fill_kv(call, number, hidden.shape[1], hidden.device, rows, scratch.layers[number])
        return repack(part, hidden.to(computed.dtype, copy=True).index_copy_(0, index, computed))

    def place(self, call: Call, number: int, hidden: Tensor) -> Tensor:
        """Return hidden states (B, T, D) with the states reused at a layer inserted; the input is not modified."""
        placed = {row: reuse for row, reuse in call.reused.items() if reuse.layer == number}
        if not placed or self.cannot_skip:  # if layers cannot be skipped, all rows were computed
            return hidden
        if len(placed) == len(call.rows):
            hidden = hidden.new_empty(hidden.shape, dtype=next(iter(placed.values())).hidden.dtype)
        else:
            hidden = hidden.clone()
        for row, reuse in placed.items():
            valid, n_tokens = call.rows[row].valid, hidden.shape[1]
            hidden[row] = self._payload.place([reuse.hidden.to(hidden.device)], [valid], n_tokens)[0]
        return hidden


def copy_kv(kv_cache: Any, row: Row, first: int, last: int) -> dict[str, Tensor]:
    """Copy a row's `keys` and `values` (S, H, n, D_h) of the layers `first` to `last`, both included."""
    layers = kv_cache.layers[first : last + 1]
    return {
        name: torch.stack([getattr(layer, name)[row.number][:, row.valid] for layer in layers])
        for name in ("keys", "values")
    }


def _learn_format(output: Any) -> Callable[[Tensor, Any, Mapping[str, Any]], Any] | None:
    """Return a function that makes a skipped layer's output; None if layers return more than hidden states."""
    if isinstance(output, Tensor):
        return lambda hidden, layer, passed: hidden
    kind = type(output)
    if kind not in (tuple, list) or any(part is not None for part in output[1:]):
        return None
    nothing = (None,) * (len(output) - 1)
    return lambda hidden, layer, passed: kind((hidden, *nothing))


def _stored_kv(reuse: Reuse, number: int) -> tuple[Tensor, Tensor]:
    """Return stored K and V (H, n, D_h) of a layer that a row skips."""
    assert reuse.keys is not None and reuse.values is not None
    place = number - reuse.layer - 1  # negative, from the end: the last is that of the reused layer
    return reuse.keys[place], reuse.values[place]


def _replace_kv(call: Call, number: int) -> None:
    """Overwrite the K/V of skipping rows with stored K/V, after a layer was run for all rows."""
    layer = call.kv_cache.layers[number]
    for row, reuse in call.reused.items():
        if call.skips(row, number):
            for written, stored in zip((layer.keys, layer.values), _stored_kv(reuse, number), strict=True):
                written[row][:, call.rows[row].valid] = stored.to(written.device)


def _fill_kv(
    call: Call, number: int, n_tokens: int, device: torch.device, rows: Sequence[int] = (), computed: Any = None
) -> None:
    """Write the K/V of a layer to the caller's cache: `rows` from the cache layer `computed`, the others as stored.

    Padding gets zeros.
    """
    skipping = {row: reuse for row, reuse in call.reused.items() if row not in rows}
    full = []
    for which, name in enumerate(("keys", "values")):
        sample = _stored_kv(next(iter(skipping.values())), number)[which]
        dtype = sample.dtype if computed is None else getattr(computed, name).dtype
        states = torch.zeros((len(call.rows), len(sample), n_tokens, sample.shape[-1]), dtype=dtype, device=device)
        if computed is not None:
            states[list(rows)] = getattr(computed, name)
        for row, reuse in skipping.items():
            states[row][:, call.rows[row].valid] = _stored_kv(reuse, number)[which].to(states)
        full.append(states)
    call.kv_cache.update(*full, number)
