"""Puts stored prefixes into calls: fills the caller's K/V cache, cuts the arguments, completes the output.

The trunk then runs on the columns that are left, as it would in the second half of a prefill in two chunks; masks and
positions it makes itself. Rows of a batch are cut at one column, so the one with the shortest known prefix decides; of
a block that reaches beyond it, the first tokens are used. Columns in which a row has padding are cut only if the head
tells that it does not read them: `generate()` does, which asks for the last logits alone.

Sizes: B rows, T tokens a row (padding included), C columns cut, L layers, H K/V heads, D_h width of a head, D hidden
width, b tokens a block.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.banks.stores.memory import adopt, copy_owned
from llmcache.counters import Counters
from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import Arguments
from llmcache.models.hooks import are_hooked
from llmcache.models.masks import cut
from llmcache.request.bypass import is_plain_cache
from llmcache.request.call import Call, Reuse
from llmcache.request.prefill import Link, Prefill
from llmcache.request.rows import Row
from llmcache.reuse.base import Passed, Rung
from llmcache.reuse.prefix.block_hash import links
from llmcache.reuse.prefix.block_pool import Block, BlockPool, first_tokens
from llmcache.reuse.prefix.kv_fill import empty, fill, join, lay

_BY_COLUMN = ("input_ids", "position_ids", "cache_position")  # arguments of the trunk whose last dimension is T
_OUTPUT = {"last_hidden_state", CACHE}  # what a trunk may put out: more might be made of all positions


class Prefix(Rung):
    """Serves the beginnings of one wrapped model's calls from stored prefixes. Thread-safe."""

    name = "prefix"
    is_lossless = True
    serves_calls = True

    def __init__(
        self,
        trunk: Trunk,
        blocks: BlockPool,
        counters: Counters,
        arguments: Arguments,
        read: Callable[[Call, torch.dtype], bool],
        is_repeat: Callable[[Row], bool],
        is_alone: Callable[[], bool],
    ) -> None:
        """Prepare for calls.

        Args:
            trunk: What is served.
            blocks: What is stored.
            counters: Told of failures, and of hooks that forbid to serve.
            arguments: Of the trunk.
            read: Reads a call's rows before its layers, with the dtype that enters these; whether that succeeded.
            is_repeat: Whether the exact rung serves a row, so that no prefix is needed.
            is_alone: Whether nothing is reused approximately, which needs all rows as they came.
        """
        self._trunk = trunk
        self._blocks = blocks
        self._counters = counters
        self._arguments = arguments
        self._read = read
        self._is_repeat = is_repeat
        self._is_alone = is_alone

    def applies_at(self, layer: int) -> bool:
        return False

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        return []

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed:
        """Serve the beginning of a call's rows, if it is known and the exact rung does not know all of them.

        Args:
            call: It may use the cache; nothing has been read of it.
            args: The trunk's arguments, passed by position.
            kwargs: Those passed by name.

        Returns:
            What to run the trunk with: of its columns those that are left. The call's K/V cache is then filled with the
            others. After a failure, which is counted, the arguments as they were and an empty cache.
        """
        try:
            call.plan.prefill = self._prepare(call)
            if call.plan.prefill is None:
                return args, kwargs
            args, kwargs = self._arguments.replace(args, kwargs, CACHE, call.plan.prefill.kv_cache)
            started = perf_counter()
            if not all(map(self._is_repeat, call.rows)):
                args, kwargs = self._cut(call, args, kwargs)
            call.progress.lookup_s += perf_counter() - started
        except BaseException as error:  # an interruption must not leave half a past either
            self.abandon(call)
            call.plan.prefill = None
            if not isinstance(error, Exception):
                raise
            self._counters.error("serve a prefix", error)
        return args, kwargs

    def complete(self, call: Call, output: Any) -> Any:
        """The trunk's output at all positions, of a call whose trunk ran on some."""
        if call.plan.prefill is None or call.plan.prefill.states is None:
            return output
        whole = join([call.plan.prefill.states.to(output[0].dtype), output[0]])
        if isinstance(output, tuple):
            output = (whole, *output[1:])
        else:
            output["last_hidden_state"] = whole
        call.progress.has_begun = call.progress.is_complete = True  # not before: a call that fails here was not served
        return output

    def abandon(self, call: Call) -> None:
        """Leave the caller an empty K/V cache: what was put there of a call that failed would be taken for a past."""
        if call.plan.prefill is not None and call.plan.prefill.served:
            empty(call.plan.prefill.kv_cache)

    def store(self, call: Call, output: Any) -> None:
        """Keep blocks of rows that were computed, at least in part.

        Args:
            call: It has succeeded.
            output: What the trunk put out, at all positions.
        """
        blocks, prefill = self._blocks, call.plan.prefill
        if prefill is None or not call.progress.may_store or not _is_understood(output):
            return
        with self._counters.guard("store a prefix"):
            for row in call.active_rows:
                # What was reused is stored already, or not this request's own.
                chain = () if row.number in call.plan.reused else prefill.chains[row.number]
                n_held = len(blocks.match(chain))
                if n_held < len(chain):
                    blocks.put(chain, self._make(call, row, chain[n_held:], n_held * blocks.size, output[0]))

    def _prepare(self, call: Call) -> Prefill | None:
        """What a call has to do with prefixes; None when it must not, or approximate reuse is asked as well."""
        passed = call.inputs.arguments
        if not self._is_alone() or passed.get("token_type_ids") is not None:
            return None
        kv_cache = self._kv_cache(passed)
        if kv_cache is None or not is_plain_cache(kv_cache) or not _has_room(kv_cache, passed["input_ids"].shape[1]):
            return None
        if not self._can_be_cut(len(passed["input_ids"])):  # last of these: it looks at every module
            return None
        if not self._read(call, next(self._trunk.module.parameters()).dtype):
            return None
        if any(row.bypass_reason or row.start is None for row in call.rows):
            return None
        return Prefill(kv_cache, [links(call.read.scope, row, self._blocks.size) for row in call.rows])

    def _can_be_cut(self, n_rows: int) -> bool:
        """Whether each token sees earlier ones only, and nobody hung hooks within the trunk, who expect all tokens."""
        trunk = self._trunk
        within = [part for part in trunk.module.modules() if part is not trunk.module]
        sees_all = getattr(trunk.config, "is_causal", True) is False
        if sees_all or any(part.__dict__.get("is_causal") is False for part in within):
            return False
        is_watched = are_hooked(within)
        if is_watched:
            self._counters.hooked(n_rows)
        return not is_watched

    def _kv_cache(self, passed: Mapping[str, Any]) -> Any:
        """The cache that the trunk is to fill: the caller's, else one as the trunk would make it, or None."""
        from transformers import DynamicCache

        config, use_cache = self._trunk.config, passed.get("use_cache")
        if passed.get(CACHE) is not None:
            return passed[CACHE]
        return DynamicCache(config=config) if (config.use_cache if use_cache is None else use_cache) else None

    def _cut(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed:
        """Fill the K/V cache with what is known, and take those columns off the arguments."""
        blocks, prefill, ids = self._blocks, call.plan.prefill, call.inputs.arguments["input_ids"]
        assert prefill is not None
        rows = zip(call.rows, prefill.chains, strict=True)
        reached = [blocks.reach(chain, row.ids, len(row.ids) // row.n_valid) for row, chain in rows]
        matched, n_known = zip(*reached, strict=True)
        n_cut = cut_column(call.rows, n_known, ids.shape[1])
        if call.inputs.n_read is None or n_cut > ids.shape[1] - call.inputs.n_read or are_hooked([self._trunk.module]):
            n_cut = min(n_cut, _first_padding(call.rows))  # what the model makes of padding is not known
        used = [max(0, min(n, n_cut - _first(row))) for row, n in zip(call.rows, n_known, strict=True)]
        if sum(used) < blocks.size:
            return args, kwargs
        prefill.served = {number: n for number, n in enumerate(used) if n}
        prefill.states = self._fill(call.rows, matched, prefill, n_cut, ids.device)
        for name in _BY_COLUMN:
            if (value := self._arguments.get(args, kwargs, name)) is not None:
                args, kwargs = self._arguments.replace(args, kwargs, name, value[..., n_cut:])
        mask = self._arguments.get(args, kwargs, "attention_mask")
        if call.inputs.mask_4d is not None:  # a row a token that is run; a 2-D mask is wanted of all tokens
            args, kwargs = self._arguments.replace(args, kwargs, "attention_mask", cut(mask, n_cut))
        elif isinstance(mask, dict):  # one that was left out; beginning later, the trunk has to make it
            args, kwargs = self._arguments.replace(args, kwargs, "attention_mask", None)
        return args, kwargs

    def _fill(
        self, rows: Sequence[Row], matched: Sequence[list[Block]], prefill: Prefill, n_cut: int, device: torch.device
    ) -> Tensor:
        """Fill the K/V cache with C columns; returns their states (B, C, D)."""
        held = {row: first_tokens(matched[row], n) for row, n in prefill.served.items()}
        columns = {row: slice(first := _first(rows[row]), first + n) for row, n in prefill.served.items()}
        keys, values, states = (
            lay(
                {row: [getattr(block, name) for block in held[row]] for row in held},
                columns,
                (len(rows), n_cut),
                device,
            )
            for name in ("keys", "values", "states")
        )
        for layer, (of_keys, of_values) in enumerate(zip(keys, values, strict=True)):
            fill(prefill.kv_cache, layer, of_keys, of_values)
        return join(next(states))

    def _make(self, call: Call, row: Row, chain: Sequence[Link], n_before: int, states: Tensor) -> dict[str, Block]:
        """Blocks of a row, from its K/V and states.

        Args:
            call: The row's.
            row: The request.
            chain: Those of its blocks that are wanted, one after the other.
            n_before: Its tokens before these.
            states: What the trunk put out (B, T, D).
        """
        assert call.plan.prefill is not None
        blocks = self._blocks
        layers, begin = call.plan.prefill.kv_cache.layers, _first(row) + n_before
        n_new = len(chain) * blocks.size
        columns = slice(begin, begin + n_new)
        captured = call.progress.captured.get(row.number, {}).get(len(layers) - 1, {})
        made = {"states": _cut_up(states[row.number : row.number + 1, columns], blocks)}
        for name in ("keys", "values"):
            if name in captured and len(captured[name]) == len(layers):  # the exact rung put them together already
                made[name] = _cut_up(captured[name][:, :, n_before : n_before + n_new], blocks)
            else:
                made[name] = _stack_up([getattr(layer, name)[row.number, :, columns] for layer in layers], blocks)
        return {
            link.key: Block(link.ids, call.inputs.namespace, **{name: tensors[i] for name, tensors in made.items()})
            for i, link in enumerate(chain)
        }


def cut_column(rows: Sequence[Row], n_known: Sequence[int], n_columns: int) -> int:
    """How many columns of a batch need not be run.

    Args:
        rows: The requests; their valid tokens are contiguous.
        n_known: First tokens of each row that are known.
        n_columns: T, of which one is run in any case: the trunk has to put out something.
    """
    ends = (n_columns if n == row.n_valid else _first(row) + n for row, n in zip(rows, n_known, strict=True))
    return min(n_columns - 1, *ends)


def _first_padding(rows: Sequence[Row]) -> int:
    """The first column of a batch in which a row may have padding."""
    return min(row.valid.stop if _first(row) == 0 else 0 for row in rows if isinstance(row.valid, slice))


def _cut_up(whole: Tensor, blocks: BlockPool) -> list[Tensor]:
    """Tensors of blocks, fit to be kept, from one of all their tokens (..., n, D)."""
    return [copy_owned(piece, blocks.device) for piece in torch.split(whole, blocks.size, dim=-2)]


def _stack_up(layers: Sequence[Tensor], blocks: BlockPool) -> list[Tensor]:
    """The same from one a layer (H, n, D_h), not put together as a whole first: that would take fresh memory."""
    pieces = zip(*(torch.split(layer, blocks.size, dim=-2) for layer in layers), strict=True)
    with torch.inference_mode(False), torch.no_grad():
        return [adopt(torch.stack(piece), blocks.device) for piece in pieces]


def _first(row: Row) -> int:
    """Column of the first valid token."""
    assert isinstance(row.valid, slice)
    return int(row.valid.start)


def _has_room(kv_cache: Any, n_columns: int) -> bool:
    """Whether a cache of fixed length can hold a call; what does not fit is left to the model to refuse."""
    limits = [int(layer.get_max_length()) for layer in kv_cache.layers]  # negative where there is none
    return all(limit < 0 or n_columns <= limit for limit in limits)


def _is_understood(output: Any) -> bool:
    """Whether a trunk put out its last states, its K/V and nothing else."""
    if isinstance(output, Mapping):
        return "last_hidden_state" in output and set(output) <= _OUTPUT
    return isinstance(output, tuple) and 1 <= len(output) <= 2
