"""Keeps the K/V of generated tokens in blocks, so that the next turn of a conversation is served up to its new text.

A decode step is not looked up. What it adds to the K/V cache of a stored prompt is put into the block pool: a block as
soon as it is full; the rest of an answer when the K/V cache is dropped, or before the next prompt is looked up. A K/V
cache that something else changes (beams reorder it, a rejected draft is cropped) is no longer followed.

Sizes: B rows, n tokens of a step, L layers, H K/V heads, D_h width of a head, D hidden width, b tokens per block.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from llmcache.calls.kv_fill import last_states
from llmcache.memory.blocks.block import Block, Link, Slab, links
from llmcache.models.adapters import CACHE
from llmcache.request.bypass import is_plain_cache
from llmcache.request.rows import Row
from llmcache.reuse.call import Call
from llmcache.support.arrays import Ids
from llmcache.support.threads import forkable

#: Puts blocks of a chain into the pool: the prompt's call, the chain, and the new blocks by key.
Put = Callable[[Call, Sequence[Link], Mapping[str, Block]], object]

#: Arguments of a decode step; with others, its states may not be those of a prompt.
_OF_STEP = {"input_ids", "attention_mask", "position_ids", CACHE, "use_cache", "cache_position", "return_dict"}


@dataclass(eq=False, slots=True)
class _Turn:
    """The prompts that a K/V cache holds, and the tokens that were generated since."""

    call: Call  # of the prompts, without its arguments
    rows: Sequence[Row]
    n_written: list[int]  # full blocks of each row that are in the pool
    layers: Sequence[Any]  # of the K/V cache, or copies of their last columns
    first: int  # column of the K/V cache that these begin with
    seen: Tensor | None  # keys of the last layer after the last step; None: they were written since
    states: list[Tensor]  # (B, n, D) of the last steps
    ids: list[Tensor]  # (B, n) of the steps that were not written
    mask: Tensor | None  # of the last step
    positions: list[Tensor]  # of the steps that were not written
    new: Ids  # ids of the steps that were written, (B, n)
    n_columns: int  # of the prompts
    is_changed: bool = False  # a step since the last `settle`

    @property
    def n_new(self) -> int:
        return int(self.new.shape[1]) + sum(one.shape[1] for one in self.ids)


class Turns:
    """Follows the K/V caches of stored prompts while tokens are generated. Thread-safe."""

    def __init__(
        self,
        size: int,
        origin: Callable[[Row], int],
        turn: Callable[[Slab, int], Slab],
        stayed: Callable[..., bool],
        put: Put,
    ) -> None:
        """Follow nothing yet.

        Args:
            size: Tokens per block.
            origin: Returns the position of a row's first token in blocks.
            turn: Returns a slab with its keys at other positions.
            stayed: Whether the weights are still those of a snapshot and digest.
            put: Stores blocks.
        """
        self._size, self._origin, self._turn, self._stayed, self._put = size, origin, turn, stayed, put
        self._turns: WeakKeyDictionary[Any, _Turn] = WeakKeyDictionary()
        self._ended: deque[_Turn] = deque()
        self._lock = forkable(threading.RLock())

    def begin(self, call: Call, kv_cache: Any, states: Tensor) -> None:
        """Follow a K/V cache that stored prompts have filled; `states` (B, T, D) are theirs."""
        n_columns = states.shape[1]
        rows = [row for row in call.rows if _may_grow(row, n_columns)]
        layers: Sequence[Any] = getattr(kv_cache, "layers", ())
        if not rows or not is_plain_cache(kv_cache) or {type(one).__name__ for one in layers} != {"DynamicLayer"}:
            return
        light = replace(call, args=(), kwargs={}, arguments={}, mask_4d=None, beginnings=None, output=None)
        light.path = None  # type: ignore[assignment]  # it holds the K/V cache
        n_written = [row.n_valid // self._size for row in rows]
        turn = _Turn(
            light,
            rows,
            n_written,
            list(layers),
            first=0,
            seen=layers[-1].keys,
            states=[states[:, -self._size :].clone()],
            ids=[],
            mask=call.arguments.get("attention_mask"),
            positions=[],
            new=call.requests.ids[:, :0],
            n_columns=n_columns,
        )
        with self._lock:
            self._turns[kv_cache] = turn
        finalize(kv_cache, self._end, turn).atexit = False

    def check(self, kv_cache: Any) -> None:
        """Stop following a K/V cache that was changed since its last step; called before a step."""
        turn = self._turns.get(kv_cache)
        if turn is not None and turn.layers[-1].keys is not turn.seen:
            self._drop(kv_cache)

    def grow(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Record a decode step, given its arguments by name, and write the blocks that it completes."""
        kv_cache = arguments.get(CACHE)
        turn = self._turns.get(kv_cache)
        if turn is None:
            return
        ids, states, keys = arguments["input_ids"], last_states(output), turn.layers[-1].keys
        n_columns = turn.n_columns + turn.n_new + ids.shape[1]
        is_usual = all(name in _OF_STEP or value is None or value is False for name, value in arguments.items())
        if states is None or not is_usual or keys.shape[-2] != n_columns or len(ids) != len(turn.call.rows):
            self._drop(kv_cache)
            return
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        with self._lock:
            turn.ids.append(ids.clone())
            turn.states.append(states)
            turn.seen, turn.mask, turn.is_changed = keys, mask, True
            if positions is not None:
                turn.positions.append(positions.expand(len(ids), -1))
            n_new = turn.n_new
            rows = zip(turn.rows, turn.n_written, strict=True)
            if any((row.n_valid + n_new) // self._size > n for row, n in rows) and not self._write(turn):
                self._drop(kv_cache)

    def settle(self) -> None:
        """Write what is not in full blocks yet, of answers that ended and of those under way."""
        with self._lock:
            under_way = [turn for turn in self._turns.values() if turn.is_changed]
        while self._ended:
            with suppress(IndexError):  # another thread took it
                under_way.append(self._ended.popleft())
        for turn in under_way:
            with self._lock:
                turn.is_changed = False
                self._write(turn, is_all=True)

    def _drop(self, kv_cache: Any) -> None:
        with self._lock:
            turn = self._turns.pop(kv_cache, None)
            if turn is not None:
                turn.is_changed = False

    def _end(self, turn: _Turn) -> None:
        """Copy what is not written of a K/V cache that is being dropped. Runs in any thread at any time: no lock."""
        if not turn.is_changed:
            return
        n_kept = min(2 * self._size, turn.n_columns + turn.n_new)
        with suppress(Exception), torch.inference_mode(False), torch.no_grad():
            turn.layers = [
                _Columns(*(getattr(one, n)[..., -n_kept:, :].clone() for n in ("keys", "values")))
                for one in turn.layers
            ]
            turn.first = turn.n_columns + turn.n_new - n_kept
            turn.seen = None
            self._ended.append(turn)

    def _write(self, turn: _Turn, is_all: bool = False) -> bool:
        """Put the blocks of new tokens into the pool, with `is_all` an incomplete one too; return if they may be."""
        if not turn.ids and not is_all:
            return True
        if not (self._stayed(turn.call.snapshot, turn.call.scope.weights) and self._is_as_expected(turn)):
            return False
        if turn.ids:
            turn.new = np.concatenate([turn.new, torch.cat(turn.ids, 1).cpu().numpy().astype(np.int64)], axis=1)
            turn.states = [torch.cat(turn.states, 1)[:, -2 * self._size :].clone()]
            turn.ids, turn.positions = [], []
        for place, row in enumerate(turn.rows):
            self._write_row(turn, place, row, is_all)
        return True

    def _is_as_expected(self, turn: _Turn) -> bool:
        """Whether the steps' masks and positions are those of tokens that follow the prompts."""
        n_new, n_pending = turn.n_new, sum(one.shape[1] for one in turn.ids)
        if turn.mask is not None:
            mask = turn.mask
            if mask.ndim != 2 or mask.shape[1] not in (turn.n_columns, turn.n_columns + n_new):
                return False
            wanted = mask.new_zeros(mask.shape[1])
            for row in turn.rows:
                wanted[:] = 1
                wanted[: _first(row)] = 0
                if not torch.equal(mask[row.number], wanted):
                    return False
        elif any(row.n_valid < turn.n_columns for row in turn.rows):
            return False
        if turn.positions:
            found = torch.cat(turn.positions, 1).cpu().numpy()
            new = np.arange(n_new - n_pending, n_new)
            return found.shape[1] == n_pending and all(
                np.array_equal(found[row.number], (row.start or 0) + row.n_valid + new) for row in turn.rows
            )
        return True

    def _write_row(self, turn: _Turn, place: int, row: Row, is_all: bool) -> None:
        size, width = self._size, len(row.ids) // row.n_valid
        ids = row.ids + turn.new[row.number].astype(np.uint16 if width == 2 else np.int32).tobytes()
        n_tokens, first = row.n_valid + turn.new.shape[1], turn.n_written[place]
        grown = replace(row, ids=ids, n_valid=n_tokens)
        chain = list(links(turn.call.scope, grown, size, self._origin(row)))
        made = {}
        for number in range(first, len(chain)):
            slab = self._copy(turn, row, number * size, (number + 1) * size)
            made[chain[number].key] = Block(chain[number].ids, turn.call.scope, slab, 0, size)
        turn.n_written[place] = len(chain)
        begin = len(chain) * size
        if is_all and chain and n_tokens > max(begin, row.n_valid):
            rest = replace(grown, ids=ids[begin * width :], n_valid=n_tokens - begin)
            scope = replace(turn.call.scope, attention=f"{turn.call.scope.attention} after {chain[-1].key}")
            (end,) = links(scope, rest, n_tokens - begin, 0)  # a key of its own
            made[end.key] = Block(end.ids, turn.call.scope, self._copy(turn, row, begin, n_tokens), 0, n_tokens - begin)
            chain.append(end)
        if made:
            self._put(turn.call, chain, made)

    def _copy(self, turn: _Turn, row: Row, begin: int, end: int) -> Slab:
        """Copy tokens of a row from `begin` to before `end`, as normal tensors, with keys as in blocks."""
        columns = slice(_first(row) + begin - turn.first, _first(row) + end - turn.first)
        n_held = row.n_valid + turn.new.shape[1]
        states = turn.states[-1]
        own = slice(states.shape[1] - (n_held - begin), states.shape[1] - (n_held - end))
        only = slice(row.number, row.number + 1)
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (
                torch.cat([getattr(layer, name)[only, :, columns] for layer in turn.layers])
                for name in ("keys", "values")
            )
            slab = Slab(keys, values, states[only, own].clone())
        return self._turn(slab, self._origin(row) - (row.start or 0))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The last columns of a layer's K/V (B, H, n, D_h)."""

    keys: Tensor
    values: Tensor


def _first(row: Row) -> int:
    """Return the column of the first valid token."""
    assert isinstance(row.valid, slice)
    return int(row.valid.start)


def _may_grow(row: Row, n_columns: int) -> bool:
    """Whether generated tokens follow a row's own without padding or a gap in between."""
    is_run = isinstance(row.valid, slice) and row.valid.stop == n_columns
    return bool(is_run and row.n_valid and row.start is not None and not row.bypass_reason)
