"""Runs one layer for the rows that need it and puts stored states in place of the rest.

Rows to compute are gathered, computed and scattered; rows that skip the layer pass through untouched until the layer
at which their stored state is put in. K/V of skipped rows is written to the caller's cache, so that its lengths are
equal in all layers after every call: a hole there would be silently wrong one token later.

Sizes: B rows, R rows computed, T tokens, D hidden width, H K/V heads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcache.execution.old_call import Call, Reuse
from llmcache.models.adapters import CACHE, Adapter, repack, unpack
from llmcache.models.arguments import select_rows
from llmcache.models.hooks import LayerSwap
from llmcache.models.payloads import Payload, padding_of, place_padding
from llmcache.reuse.prefix.kv_fill import put


class Runner:
    """Executes layers of one trunk according to the decisions of a call."""

    def __init__(self, payload: Payload, adapter: Adapter) -> None:
        """Remember how states are put back.

        Args:
            payload: What entries keep.
            adapter: Knows what a layer returns; if it does not, that is learned from the first layer that runs.
        """
        self._payload = payload
        self._skipped = adapter.skipped
        self.cannot_skip = False  # known once a layer was seen to return more than hidden states

    def run(self, call: Call, layer: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any], places: bool) -> Any:
        """Output of a layer, packed as the layer itself would.

        Args:
            call: The forward under way, decided.
            layer: The layer.
            args: What the trunk passed by position.
            kwargs: What the trunk passed by name.
            places: Whether stored states enter here; not when they enter after the final norm.
        """
        number = layer.number
        rows = [row for row in range(call.n_rows) if not _skips(call.plan.reused.get(row), number)]
        ran_ahead = number == 0 and call.progress.first_output is not None
        if ran_ahead or len(rows) == call.n_rows or self._skipped is None:
            output = call.progress.first_output if ran_ahead else layer.original(*args, **kwargs)
            if ran_ahead and call.progress.kv_cache is not None:
                _replace_kv(call, number)
            if self._skipped is None:
                self._skipped = _learn(output)
                self.cannot_skip = self._skipped is None
        else:
            output = self._run_some(call, rows, layer, args, kwargs)
        if not (places and call.plan.reused) or self.cannot_skip:  # of the latter all was computed, for all rows
            return output
        return repack(output, self.place(call, number, unpack(output)))

    def skip(self, call: Call, layer: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of a layer that no row needs: its input. K/V comes from the store."""
        if self._skipped is None:
            return self.run(call, layer, args, kwargs, places=False)
        hidden = layer.arguments.get(args, kwargs, layer.arguments.names[0])
        call.progress.n_skipped += call.n_rows
        if call.progress.kv_cache is not None:
            fill_cache(call, layer.number, hidden.shape[1])
        return self._skipped(hidden, layer.module, layer.arguments.bind(args, kwargs))

    def _run_some(
        self, call: Call, rows: list[int], layer: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The layer's output where some rows skip it and others do not."""
        if not rows:
            return self.skip(call, layer, args, kwargs)
        hidden = layer.arguments.get(args, kwargs, layer.arguments.names[0])
        call.progress.n_skipped += call.n_rows - len(rows)
        output, kv = self._compute(call, rows, layer, args, kwargs)
        if call.progress.kv_cache is not None:
            fill_cache(call, layer.number, hidden.shape[1], rows, kv)
        return output

    def place(self, call: Call, number: int, hidden: Tensor) -> Tensor:
        """Hidden states (B, T, D) with the rows that are reused at this layer put in; the input is not written."""
        placed = [reuse for reuse in call.plan.reused.values() if reuse.layer == number and not reuse.is_output]
        if not placed:
            return hidden
        if len(placed) == call.n_rows:
            hidden = hidden.new_empty(hidden.shape, dtype=placed[0].entry.dtype)
        else:
            hidden = hidden.clone()
        for reuse in placed:
            row = call.rows[reuse.row]
            self._payload.place(reuse.entry.to(hidden.device), hidden[reuse.row], row.valid)
            place_padding(reuse.padding, hidden[reuse.row], row.valid)
        return hidden

    def _compute(
        self, call: Call, rows: list[int], layer: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, Tensor] | None]:
        """Run the layer on some rows; the others keep their input. Also the K/V (R, H, T, D_h) it made."""
        hidden = layer.arguments.get(args, kwargs, layer.arguments.names[0])
        index = torch.tensor(rows, device=hidden.device)
        args, kwargs = select_rows(layer.arguments, args, kwargs, index, call.n_rows)
        scratch = None
        if call.progress.kv_cache is not None:
            # The caller's cache takes all rows at once, so these rows get one of their own, T long.
            scratch = _new_cache()
            args, kwargs = layer.arguments.replace(args, kwargs, CACHE, scratch)
            mask = layer.arguments.get(args, kwargs, "attention_mask")
            if mask is not None:
                args, kwargs = layer.arguments.replace(args, kwargs, "attention_mask", mask[..., : hidden.shape[1]])
        part = layer.original(*args, **kwargs)
        computed = unpack(part)
        whole = hidden.to(computed.dtype, copy=True).index_copy_(0, index, computed)
        kv = None if scratch is None else (scratch.layers[layer.number].keys, scratch.layers[layer.number].values)
        return repack(part, whole), kv


def _learn(output: Any) -> Callable[[Tensor, Any, Mapping[str, Any]], Any] | None:
    """How a skipped layer of an unknown family packs its output; None when layers hand on more than hidden states."""
    if isinstance(output, Tensor):
        return lambda hidden, layer, passed: hidden
    kind = type(output)
    if kind not in (tuple, list) or any(part is not None for part in output[1:]):
        return None
    nothing = (None,) * (len(output) - 1)
    return lambda hidden, layer, passed: kind((hidden, *nothing))


def _skips(reuse: Reuse | None, number: int) -> bool:
    """Whether a decision makes its row skip this layer."""
    return reuse is not None and reuse.layer >= number


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _replace_kv(call: Call, number: int) -> None:
    """Write stored K/V over those that a layer run for all rows gave to rows that take its output from the store."""
    layer = call.progress.kv_cache.layers[number]
    for reuse in (reuse for reuse in call.plan.reused.values() if _skips(reuse, number)):
        for written, stored in zip((layer.keys, layer.values), reuse.kv[number], strict=True):
            written[reuse.row][:, call.rows[reuse.row].valid] = stored.to(written.device)


def fill_cache(
    call: Call, number: int, length: int, rows: Sequence[int] = (), kv: tuple[Tensor, Tensor] | None = None
) -> None:
    """Write K/V of a layer to the caller's cache: computed rows as computed, the others as stored.

    Padding of which nothing is stored gets zeros.

    Args:
        call: Some of its rows skip the layer.
        number: Of the layer.
        length: T.
        rows: Those that were computed.
        kv: Of these (R, H, T, D_h).
    """
    skipping = [reuse for row, reuse in call.plan.reused.items() if row not in rows]
    sample = skipping[0].kv[number]
    full = []
    for which in (0, 1):  # keys, values
        if call.n_rows == 1 and skipping[0].is_output and sample[which].shape[1] == length:  # need not be copied
            full.append(sample[which][None].to(call.inputs.arguments["input_ids"].device))
            continue
        heads, _, width = sample[which].shape
        device = call.inputs.arguments["input_ids"].device if kv is None else kv[which].device
        dtype = sample[which].dtype if kv is None else kv[which].dtype
        states = torch.zeros((call.n_rows, heads, length, width), dtype=dtype, device=device)
        if kv is not None:
            states[rows] = kv[which]
        for reuse in skipping:
            valid = call.rows[reuse.row].valid
            states[reuse.row][:, valid] = reuse.kv[number][which].to(device)
            if number in reuse.padding_kv:
                states[reuse.row][:, padding_of(valid, length)] = reuse.padding_kv[number][which].to(device)
        full.append(states)
    put(call.progress.kv_cache, number, *full)
