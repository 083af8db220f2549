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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from llmcache.calls.kv_fill import last_states
from llmcache.memory.blocks.block import Block, Link, Slab, links
from llmcache.models.adapters import CACHE
from llmcache.request.bypass import is_plain_cache
from llmcache.request.call_signatures import TrunkState
from llmcache.request.rows import Row
from llmcache.reuse.call import Call
from llmcache.support.threads import forkable

#: Puts blocks of a chain into the pool: the prompt's call, the chain, and the new blocks by key.
Put = Callable[[Call, Sequence[Link], Mapping[str, Block]], object]

_OF_STEP = {"input_ids", "attention_mask", "position_ids", CACHE, "use_cache", "cache_position", "return_dict"}


class _Step(NamedTuple):
    """One row of a decode step."""

    ids: Tensor  # (n,)
    positions: Tensor  # (n,)
    mask: Tensor | None  # (S,)


@dataclass(eq=False, slots=True)
class _Turn:
    """A prompt in a K/V cache, and the tokens that were generated after it."""

    call: Call  # of the prompt, without its arguments
    row: Row
    n_written: int  # full blocks that are in the pool
    layers: Sequence[Any]  # of the K/V cache, or copies of its last columns
    seen: Tensor  # keys of the last layer after the last step; others: something else changed the K/V cache
    place: int  # its row there
    column: int  # of its first token there
    states: list[Tensor]  # (n, D) of the last steps
    first: int = 0  # column that `layers` begin with
    steps: list[_Step] = field(default_factory=list)  # whose ids are not in `new` yet
    new: bytes = b""  # ids of the other steps, packed as the row's
    n_new: int = 0  # tokens of all steps
    is_changed: bool = False  # a step since the last `settle`

    @property
    def n_tokens(self) -> int:
        return self.row.n_valid + self.n_new


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
        self._turns: WeakKeyDictionary[Any, dict[int, _Turn]] = WeakKeyDictionary()  # by K/V cache and row
        self._ended: deque[_Turn] = deque()
        self._lock = forkable(threading.RLock())

    def begin(self, call: Call, kv_cache: Any, states: Tensor) -> None:
        """Follow a K/V cache that stored prompts have filled; `states` (B, T, D) are theirs."""
        layers: Sequence[Any] = getattr(kv_cache, "layers", ())
        if not is_plain_cache(kv_cache) or {type(one).__name__ for one in layers} != {"DynamicLayer"}:
            return
        light = call.without_arguments()
        turns, seen = dict[int, _Turn](), layers[-1].keys
        for row in call.rows:
            if _may_grow(row, states.shape[1]):
                own, n_written = states[row.number, -self._size :].clone(), row.n_valid // self._size
                turns[row.number] = _Turn(light, row, n_written, layers, seen, row.number, row.first, [own])
        self._follow(kv_cache, turns)

    def join(self, kv_cache: Any, rows: Sequence[tuple[Any, int]]) -> None:
        """Follow a K/V cache into which rows of others were copied, each from its first token on, in this order."""
        turns = dict[int, _Turn]()
        with self._lock:
            for place, (source, row) in enumerate(rows):
                turn = self._turns.get(source, {}).pop(row, None)
                if turn is not None and _is_as_expected(turn):
                    turn.layers, turn.seen, turn.place, turn.column = (
                        kv_cache.layers,
                        kv_cache.layers[-1].keys,
                        place,
                        0,
                    )
                    turn.steps = [step._replace(mask=None) for step in turn.steps]
                    turns[place] = turn
        self._follow(kv_cache, turns)

    def check(self, kv_cache: Any, computes_alike: Callable[[TrunkState, str, str], bool]) -> None:
        """Before a step, stop following a K/V cache that was changed, or if the trunk does not compute as it did.

        `computes_alike`: see `CallSignatures`.
        """
        with self._lock:
            turns = self._turns.get(kv_cache, {})
            for turn in turns.values():
                keys, of = kv_cache.layers[-1].keys, turn.call
                if keys is not turn.seen or not computes_alike(of.state, of.scope.dtype, keys.device.type):
                    turns.clear()
                    break

    def grow(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Record a decode step, given its arguments by name, and write the blocks that it completes."""
        kv_cache: Any = arguments.get(CACHE)
        turns = self._turns.get(kv_cache)
        if not turns:
            return
        ids, states, keys = arguments["input_ids"].clone(), last_states(output), kv_cache.layers[-1].keys
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if states is None or not _is_usual(arguments, keys, next(iter(turns.values()))):
            turns.clear()
            return
        if positions is None:  # trunks then count columns
            positions = torch.arange(keys.shape[-2] - ids.shape[1], keys.shape[-2], device=ids.device)[None]
        positions = positions.clone().expand(len(ids), -1)  # callers advance theirs in place
        with self._lock:
            for number, turn in turns.items():
                turn.steps.append(_Step(ids[number], positions[number], None if mask is None else mask[number]))
                turn.states.append(states[number])
                turn.seen, turn.is_changed = keys, True
                turn.n_new += ids.shape[1]
            due = [number for number, turn in turns.items() if turn.n_tokens // self._size > turn.n_written]
            for number in due:
                if not self._write(turns[number]):
                    del turns[number]

    def settle(self) -> None:
        """Write what is not in full blocks yet, of answers that ended and of those under way."""
        with self._lock:
            under_way = [turn for turns in self._turns.values() for turn in turns.values() if turn.is_changed]
        while self._ended:
            with suppress(IndexError):  # another thread took it
                under_way.append(self._ended.popleft())
        for turn in under_way:
            with self._lock:
                turn.is_changed = False
                self._write(turn, is_all=True)

    def discard(self) -> None:
        """Discard what is not written of answers that ended."""
        self._ended.clear()

    def close(self) -> None:
        """Follow nothing any more, and discard what is not written."""
        with self._lock:
            for turns in self._turns.values():
                turns.clear()
        self.discard()

    def _follow(self, kv_cache: Any, turns: Mapping[int, _Turn]) -> None:
        with self._lock:
            followed = self._turns.get(kv_cache)
            if followed is None:
                followed = self._turns[kv_cache] = {}
                finalize(kv_cache, _end, followed, self._ended, self._size, self._lock).atexit = False
            followed.clear()
            followed.update(turns)

    def _write(self, turn: _Turn, is_all: bool = False) -> bool:
        """Put the blocks of new tokens into the pool, with `is_all` an incomplete one too; return if they may be."""
        if not (self._stayed(turn.call.snapshot, turn.call.scope.weights) and _is_as_expected(turn)):
            return False
        row, size = turn.row, self._size
        if turn.steps:
            ids = torch.cat([step.ids for step in turn.steps]).cpu().numpy()
            turn.new += row.pack(ids)
            turn.states = [torch.cat(turn.states)[-2 * size :].clone()]
            turn.steps = []
        grown = replace(row, ids=row.ids + turn.new, n_valid=turn.n_tokens)
        chain, made = list(links(turn.call.scope, grown, size, self._origin(row))), dict[str, Block]()
        for number in range(turn.n_written, len(chain)):
            slab = self._copy(turn, number * size, (number + 1) * size)
            made[chain[number].key] = Block(chain[number].ids, turn.call.scope, slab, 0, size)
        turn.n_written, begin = len(chain), len(chain) * size
        if is_all and chain and turn.n_tokens > max(begin, row.n_valid):
            rest = replace(grown, ids=grown.ids[begin * row.id_width :], n_valid=turn.n_tokens - begin)
            scope = replace(turn.call.scope, attention=f"{turn.call.scope.attention} after {chain[-1].key}")
            (end,) = links(scope, rest, rest.n_valid, 0)  # a key of its own
            slab = self._copy(turn, begin, turn.n_tokens)
            made[end.key] = Block(end.ids, turn.call.scope, slab, 0, rest.n_valid)
            chain.append(end)
        if made:
            self._put(turn.call, chain, made)
        return True

    def _copy(self, turn: _Turn, begin: int, end: int) -> Slab:
        """Copy a row's tokens from `begin` to before `end`, as normal tensors, with keys as in blocks."""
        only, at = slice(turn.place, turn.place + 1), turn.column - turn.first
        columns = slice(at + begin, at + end)
        (states,) = turn.states
        own = slice(len(states) - (turn.n_tokens - begin), len(states) - (turn.n_tokens - end))
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (
                torch.cat([getattr(layer, name)[only, :, columns] for layer in turn.layers])
                for name in ("keys", "values")
            )
            slab = Slab(keys, values, states[None, own].clone())
        return self._turn(slab, self._origin(turn.row) - (turn.row.start or 0))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The last columns of a layer's K/V (1, H, n, D_h)."""

    keys: Tensor
    values: Tensor


def _may_grow(row: Row, n_columns: int) -> bool:
    """Whether generated tokens follow a row's own without padding or a gap in between."""
    is_run = isinstance(row.valid, slice) and row.valid.stop == n_columns
    return bool(is_run and row.n_valid and row.start is not None and not row.bypass_reason)


def is_plain_step(arguments: Mapping[str, Any]) -> bool:
    """Whether a decode step has no arguments by which its states may not be those of a prompt."""
    mask = arguments.get("attention_mask")
    is_plain = all(name in _OF_STEP or value is None or value is False for name, value in arguments.items())
    return is_plain and (mask is None or mask.ndim == 2)


def _is_usual(arguments: Mapping[str, Any], keys: Tensor, turn: _Turn) -> bool:
    """Whether a decode step added its tokens to a K/V cache like a prompt; `keys` are the last layer's after it."""
    ids = arguments["input_ids"]
    has_grown = keys.shape[-2] == turn.seen.shape[-2] + ids.shape[1] and len(keys) == len(ids)
    return is_plain_step(arguments) and has_grown


def _is_as_expected(turn: _Turn) -> bool:
    """Whether the K/V is that of the last step, and the steps' masks and positions are those of tokens in a row."""
    if turn.layers[-1].keys is not turn.seen:
        return False
    if not turn.steps:
        return True
    masks = [step.mask for step in turn.steps if step.mask is not None]
    if turn.column and len(masks) < len(turn.steps):
        return False
    end, at = turn.n_tokens - sum(len(step.ids) for step in turn.steps), 0
    last, found = (turn.row.start or 0) + turn.n_tokens, torch.cat([step.positions for step in turn.steps])
    if not np.array_equal(found.cpu().numpy(), np.arange(last - len(found), last)):
        return False
    if not masks:
        return True
    seen = torch.cat(masks)
    wanted = torch.zeros_like(seen)
    for step in turn.steps:
        end += len(step.ids)
        if step.mask is not None:
            wanted[at + turn.column : at + turn.column + end] = 1
            at += len(step.mask)
    return torch.equal(seen, wanted)


def _end(turns: Mapping[int, _Turn], ended: deque[_Turn], size: int, lock: Any) -> None:
    """Copy what is not written of a K/V cache that is being dropped.

    Runs in any thread at any time, so it does not wait: while another thread holds the lock, nothing is kept.
    """
    if not lock.acquire(blocking=False):
        return
    try:
        for turn in turns.values():
            if turn.is_changed and turn.layers[-1].keys is turn.seen:
                with suppress(Exception), torch.inference_mode(False), torch.no_grad():
                    _keep_last(turn, size)
                    ended.append(turn)
    finally:
        lock.release()


def _keep_last(turn: _Turn, size: int) -> None:
    """Copy the columns of a row that are in no full block, in place of its K/V cache."""
    end = turn.column + turn.n_tokens
    turn.first = end - min(2 * size, turn.n_tokens)
    kept = slice(turn.place, turn.place + 1), slice(None), slice(turn.first, end)
    turn.layers = [_Columns(one.keys[kept].clone(), one.values[kept].clone()) for one in turn.layers]
    turn.seen, turn.place = turn.layers[-1].keys, 0
