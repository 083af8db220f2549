"""Follows K/V caches that keep states while tokens are generated, so that the next turn of a conversation is served.

A decode step is not looked up. What a K/V cache keeps is copied before the next prompt is looked up, if the K/V cache
was dropped or the prompt continues its own. One that something else changes is no longer followed.

Sizes: n tokens of a step, D hidden width.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from llmcache.calls.kv_fill import last_states
from llmcache.calls.turns import is_plain_step
from llmcache.models.adapters import CACHE
from llmcache.request.call_signatures import TrunkState
from llmcache.request.rows import Row
from llmcache.reuse.call import Call
from llmcache.support.threads import forkable

#: Keeps a copy: the prompt's call, ids of all tokens, their states (n, D), layers, and whether no step began meanwhile.
Keep = Callable[[Call, bytes, Tensor, Sequence[Any], Callable[[], bool]], None]


@dataclass(eq=False, slots=True)
class _Turn:
    """A prompt in a K/V cache, and the tokens that were generated after it."""

    call: Call  # of the prompt, without its arguments
    row: Row
    layers: Sequence[Any]  # of the K/V cache
    seen: Tensor  # `_last_keys(layers)` after the last step
    states: list[Tensor]  # (n, D) of the prompt and of each step
    ids: list[Tensor] = field(default_factory=list)  # (n,) of each step
    positions: list[Tensor] = field(default_factory=list)  # (n,) of each step; empty if none were passed
    is_full: Tensor | None = None  # whether the masks of all steps left nothing out (); None: none was passed
    n_begun: int = 0  # steps, one under way included
    is_changed: bool = False  # a step since it was last kept

    @property
    def n_tokens(self) -> int:
        return self.row.n_valid + sum(map(len, self.ids))

    def is_as_seen(self) -> bool:
        """Whether nothing changed its layers since the last step: what crops, reorders or resets them replaces keys."""
        return _last_keys(self.layers) is self.seen


class Followed:
    """The K/V caches of stored prompts, each of one row. Thread-safe."""

    def __init__(self, stayed: Callable[..., bool], keep: Keep) -> None:
        """Follow nothing yet. `stayed`: whether the weights are still those of a snapshot and digest."""
        self._stayed, self._keep = stayed, keep
        self._turns: WeakKeyDictionary[Any, _Turn] = WeakKeyDictionary()  # by K/V cache
        self._ended: deque[_Turn] = deque()
        self._lock = forkable(threading.RLock())

    def begin(self, call: Call, kv_cache: Any, states: Tensor) -> None:
        """Follow a K/V cache that a prompt of one row has filled; `states` (1, n, D) are its own."""
        layers = kv_cache.layers
        if (seen := _last_keys(layers)) is None:
            return
        turn = _Turn(call.without_arguments(), call.rows[0], layers, seen, [states[0].clone()])
        with self._lock:
            self._turns[kv_cache] = turn
        finalize(kv_cache, _end, turn, self._ended).atexit = False

    def check(self, kv_cache: Any, computes_alike: Callable[[TrunkState, str, str], bool]) -> None:
        """Before a step, stop following a K/V cache that was changed, or if the trunk does not compute as it did.

        `computes_alike`: see `CallSignatures`.
        """
        if (turn := self._turns.get(kv_cache)) is None:
            return
        of, device = turn.call, turn.seen.device.type
        if turn.is_as_seen() and computes_alike(of.state, of.scope.dtype, device):
            turn.n_begun += 1
        else:
            self.drop(kv_cache)

    def grow(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Record a decode step, given its arguments by name."""
        kv_cache: Any = arguments.get(CACHE)
        if (turn := self._turns.get(kv_cache)) is None:
            return
        ids, states, mask = arguments["input_ids"], last_states(output), arguments.get("attention_mask")
        has_grown = len(ids) == 1 and kv_cache.get_seq_length() == turn.n_tokens + ids.shape[1]
        seen = _last_keys(turn.layers)
        if seen is None or states is None or not (is_plain_step(arguments) and has_grown):
            self.drop(kv_cache)
            return
        turn.ids.append(ids[0].clone())
        turn.states.append(states[0])
        if (positions := arguments.get("position_ids")) is not None:
            turn.positions.append(positions[0].clone())  # callers advance theirs in place
        if mask is not None:
            turn.is_full = mask.all() if turn.is_full is None else turn.is_full & mask.all()
        turn.seen, turn.is_changed = seen, True

    def settle(self, row: Row | None = None) -> None:
        """Keep answers that ended, and of those under way the ones that a row continues; None: all."""
        with self._lock:
            under_way = list(self._turns.values())
        wanted = [one for one in under_way if row is None or row.ids.startswith(one.row.ids)]
        while self._ended:
            with suppress(IndexError):  # another thread took it
                wanted.append(self._ended.popleft())
        for turn in wanted:
            if turn.is_changed:
                self._write(turn)

    def drop(self, kv_cache: Any) -> None:
        """Stop following a K/V cache."""
        with self._lock, suppress(TypeError):  # None, or another object that is not followed
            if (turn := self._turns.pop(kv_cache, None)) is not None:
                turn.is_changed = False

    def discard(self) -> None:
        """Discard what is not kept of answers that ended."""
        self._ended.clear()

    def close(self) -> None:
        """Follow nothing any more, and discard what is not kept."""
        with self._lock:
            for kv_cache in [*self._turns]:
                self.drop(kv_cache)
        self.discard()

    def _write(self, turn: _Turn) -> None:
        """Keep the answer, unless a step of another thread is under way: it writes to the states in place."""
        turn.is_changed, call, n_steps = False, turn.call, len(turn.ids)
        is_same = self._stayed(call.snapshot, call.scope.weights) and turn.is_as_seen()
        if not is_same or not (turn.is_full is None or bool(turn.is_full)):
            return
        ids, first = torch.cat(turn.ids).cpu().numpy(), turn.row.n_valid
        if turn.positions:
            positions = torch.cat(turn.positions).cpu().numpy()
            if not np.array_equal(positions, np.arange(first, first + len(ids))):
                return
        packed = turn.row.ids + turn.row.pack(ids)
        self._keep(call, packed, torch.cat(turn.states), turn.layers, lambda: turn.n_begun == n_steps)


def _last_keys(layers: Sequence[Any]) -> Tensor | None:
    """Return the keys of the last layer of attention, a new tensor after each step; None if there is none."""
    return next((layer.keys for layer in reversed(layers) if getattr(layer, "keys", None) is not None), None)


def _end(turn: _Turn, ended: deque[_Turn]) -> None:
    """Queue the answer in a K/V cache that is being dropped. Runs in any thread at any time: no lock."""
    if turn.is_changed:
        ended.append(turn)
