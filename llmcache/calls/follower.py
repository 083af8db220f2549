"""Follows the K/V caches of stored prompts while tokens are generated: the next prompt of a conversation repeats these.

A decode step is not looked up. It is recorded, and a `Writer` stores what it added: blocks as they become full
(`block_writer.py`), or a copy of the whole K/V cache (`snapshots.py`). What fills no block is stored before a prompt is
looked up, if the K/V cache was dropped by then, or if the prompt continues the answer. A K/V cache that something else
changes (beams reorder it, a rejected draft is cropped) is no longer followed.

Sizes: B rows, n tokens of a step, S columns of the K/V cache, D hidden width.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from llmcache.calls.kv_fill import last_states
from llmcache.models.adapters import CACHE
from llmcache.models.kv_state import own_of
from llmcache.request.call_signatures import TrunkState
from llmcache.request.rows import Row, Scope
from llmcache.reuse.call import Call
from llmcache.support.threads import forkable

_STEP_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", CACHE, "use_cache", "cache_position", "return_dict"),
    "logits_to_keep",
}


class _Step(NamedTuple):
    """One row of a decode step."""

    ids: Tensor  # (n,)
    positions: Tensor  # (n,)
    mask: Tensor | None  # (S,)
    states: Tensor  # (n, D)


@dataclass(eq=False, slots=True)
class Followed:
    """A prompt in one row of a K/V cache, and the tokens that were generated after it."""

    call: Call  # of the prompt, without its arguments
    row: Row  # the prompt
    writer: "Writer"
    layers: Sequence[Any]  # of the K/V cache, or copies of its last columns
    seen: "_Kept"  # of the layers after the last step; nothing while a step runs, which would hold K/V twice
    n_columns: int  # of the K/V cache after the last step, those included that windows have left; `layers` end there
    place: int  # its row there
    column: int  # of its first token there
    ids: bytes  # of the prompt and of steps that were checked, packed as the prompt's
    states: list[Tensor]  # of the last of these tokens, some in each (n, D)
    n_tokens: int  # of the prompt and of all steps
    n_kept: int  # of these that are stored, or will never be
    own: Mapping[str, Any] = field(default_factory=dict)  # `own_of` the K/V cache after the last step
    steps: list[_Step] = field(default_factory=list)  # that were not checked yet
    is_under_way: bool = False  # a step began and did not end

    @property
    def n_checked(self) -> int:
        return len(self.ids) // self.row.id_width

    def is_as_seen(self) -> bool:
        """Whether nothing has changed the K/V since the last step.

        What crops, reorders or resets it replaces tensors. An edit in place of a tensor that was made in inference mode
        goes unseen.
        """
        return self.are_seen(_kept(self.layers))

    def are_seen(self, kept: "_Kept") -> bool:
        """Whether its layers keep what they kept after the last step, given what they keep now."""
        return not self.is_under_way and kept.is_same_as(self.seen)

    def look(self) -> None:
        """Take the layers as they are for those after the last step."""
        self.seen = _kept(self.layers)

    def check_steps(self) -> bool:
        """Take over ids and states of the steps if masks and positions are those of consecutive tokens; else False."""
        if not self.steps:
            return True
        first, start = self.n_checked, self.row.start or 0
        positions = torch.cat([step.positions for step in self.steps]).cpu().numpy()
        if not np.array_equal(positions, np.arange(start + first, start + self.n_tokens)) or not self._shows_all():
            return False
        self.ids += self.row.pack(torch.cat([step.ids for step in self.steps]).cpu().numpy())
        self.states += [step.states for step in self.steps]
        self.steps = []
        return True

    def _shows_all(self) -> bool:
        """Whether the steps' masks show the row's own tokens, all of them, and nothing else."""
        masks = [step.mask for step in self.steps if step.mask is not None]
        if self.column and len(masks) < len(self.steps):
            return False
        if not masks:
            return True
        shown = torch.cat(masks)
        wanted, begin, end = torch.zeros_like(shown), self.column, self.column + self.n_checked
        for step in self.steps:
            end += len(step.ids)
            if step.mask is not None:
                wanted[begin:end] = 1
                begin, end = begin + len(step.mask), end + len(step.mask)
        return torch.equal(shown, wanted)


class _Kept(NamedTuple):
    """Keys and values of all layers that have some, and how often each was edited in place."""

    tensors: Sequence[Tensor]
    versions: Sequence[int]

    def is_same_as(self, other: "_Kept") -> bool:
        is_same = len(self.tensors) == len(other.tensors) and all(map(is_, self.tensors, other.tensors))
        return is_same and self.versions == other.versions


_NOTHING = _Kept((), ())


class Writer(Protocol):
    """Stores generated tokens. Called by one thread at a time."""

    size: int  # steps are checked, and `write` is called, about every `size` tokens
    joins: bool  # whether it may write rows that were copied into another K/V cache

    def write(self, followed: Followed, is_all: bool) -> int:
        """Store tokens after the first `n_kept`, without `is_all` those of full blocks; return the new `n_kept`."""

    def detach(self, followed: Followed) -> None:
        """Copy what `write` will need of a K/V cache that is being dropped. Any thread, at any time: must not wait."""


class Follower:
    """The K/V caches of stored prompts. Thread-safe."""

    def __init__(self, stayed: Callable[..., bool]) -> None:
        """Follow nothing yet. `stayed`: whether the weights are still those of a snapshot and digest."""
        self._stayed = stayed
        self._rows: WeakKeyDictionary[Any, dict[int, Followed]] = WeakKeyDictionary()  # by K/V cache and row
        self._ended: deque[Followed] = deque()
        self._lock = forkable(threading.RLock())

    def begin(self, call: Call, kv_cache: Any, states: Tensor, writer: Writer) -> None:
        """Follow a K/V cache that stored prompts have filled; `states` (B, m, D) are those of its last columns."""
        layers, n_columns = kv_cache.layers, kv_cache.get_seq_length()
        if not (seen := _kept(layers)).tensors:
            return
        light, rows = call.without_arguments(), dict[int, Followed]()
        for row in call.rows:
            if _may_grow(row, n_columns):
                own, of_cache = [states[row.number].clone()], (layers, seen, n_columns, row.number, row.first)
                one = Followed(light, row, writer, *of_cache, row.ids, own, row.n_valid, row.n_valid)
                rows[row.number], one.own = one, own_of(kv_cache)
        self._follow(kv_cache, rows)

    def join(self, kv_cache: Any, sources: Sequence[tuple[Any, int]]) -> None:
        """Follow a K/V cache into which rows of others were copied, each from its first token on, in this order."""
        rows, seen, n_columns = dict[int, Followed](), _kept(kv_cache.layers), kv_cache.get_seq_length()
        with self._lock:
            for place, (source, number) in enumerate(sources):
                one = self._of(source).pop(number, None)
                if one is not None and one.writer.joins and one.is_as_seen() and one.check_steps():
                    one.layers, one.place, one.column = kv_cache.layers, place, 0
                    one.seen, one.n_columns = seen, n_columns
                    rows[place] = one
        self._follow(kv_cache, rows)

    def check(self, kv_cache: Any, computes_alike: Callable[[TrunkState, Scope, str], bool]) -> None:
        """Before a step, stop following a K/V cache that was changed, or if the trunk does not compute as it did.

        `computes_alike`: see `CallSignatures`.
        """
        with self._lock:
            rows = self._of(kv_cache)
            kept = _kept(kv_cache.layers) if rows else _NOTHING
            for one in rows.values():
                of, device = one.call, one.states[0].device.type
                if not (one.are_seen(kept) and computes_alike(of.state, of.scope, device)):
                    _let_go(rows)
                    break
                one.is_under_way, one.seen = True, _NOTHING

    def grow(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Record a decode step, given its arguments by name, and write the blocks that it completes."""
        kv_cache: Any = arguments.get(CACHE)
        if not (rows := self._of(kv_cache)):
            return
        ids, states, mask = arguments["input_ids"].clone(), last_states(output), arguments.get("attention_mask")
        seen, n_columns, n_new = _kept(kv_cache.layers), kv_cache.get_seq_length(), ids.shape[1]
        has_grown = n_columns == next(iter(rows.values())).n_columns + n_new
        if states is None or not (has_grown and len(states) == len(ids) and _is_plain(arguments)):
            self.drop(kv_cache)
            return
        if (positions := arguments.get("position_ids")) is None:  # trunks then count columns
            positions = torch.arange(n_columns - n_new, n_columns, device=ids.device)[None]
        # Copies: callers edit their tensors in place.
        positions, states = positions.clone().expand(len(ids), -1), states.clone()
        mask = [None] * len(ids) if mask is None else mask.clone()
        with self._lock:
            for number, one in [*rows.items()]:
                one.steps.append(_Step(ids[number], positions[number], mask[number], states[number]))
                one.seen, one.own, one.n_columns, one.is_under_way = seen, own_of(kv_cache), n_columns, False
                one.n_tokens += n_new
                if one.n_tokens // one.writer.size > one.n_checked // one.writer.size and not self._write(one):
                    del rows[number]

    def settle(self, prompts: Sequence[Row] | None = None) -> None:
        """Store what is left of answers that ended, and of those under way that prompts continue; None: of all."""
        with self._lock:
            under_way = [one for rows in self._rows.values() for one in rows.values()]
        due = [one for one in under_way if prompts is None or any(_continues(row, one) for row in prompts)]
        while self._ended:
            with suppress(IndexError):  # another thread took it
                due.append(self._ended.popleft())
        for one in due:
            with self._lock:
                if one.n_kept < one.n_tokens and not one.is_under_way:
                    try:
                        self._write(one, is_all=True)
                    finally:  # what failed is not tried again
                        one.n_kept = one.n_tokens

    def drop(self, kv_cache: Any) -> None:
        """Stop following a K/V cache."""
        with self._lock:
            _let_go(self._of(kv_cache))

    def discard(self, namespace: str | None = None) -> None:
        """Discard what is left of the answers of a namespace that ended; None: of all."""
        for _ in range(len(self._ended)):
            with suppress(IndexError):  # another thread took it
                one = self._ended.popleft()
                if namespace not in (None, one.call.scope.namespace):
                    self._ended.append(one)

    def close(self) -> None:
        """Follow nothing any more, and discard what is left."""
        with self._lock:
            for rows in self._rows.values():
                _let_go(rows)
        self.discard()

    def _of(self, kv_cache: Any) -> dict[int, Followed]:
        """Return the rows of a K/V cache that are followed."""
        with suppress(TypeError):  # None, or another object that nothing refers to weakly
            return self._rows.get(kv_cache) or {}
        return {}

    def _follow(self, kv_cache: Any, rows: Mapping[int, Followed]) -> None:
        with self._lock:
            followed = self._rows.get(kv_cache)
            if followed is None:
                followed = self._rows[kv_cache] = {}
                finalize(kv_cache, _end, followed, self._ended, self._lock).atexit = False
            followed.clear()
            followed.update(rows)

    def _write(self, one: Followed, is_all: bool = False) -> bool:
        """Have new tokens stored, with `is_all` those that fill no block too; return whether they may be."""
        has_stayed = self._stayed(one.call.snapshot, one.call.scope.weights)
        if not (has_stayed and one.is_as_seen() and one.check_steps()):
            return False
        one.n_kept = one.writer.write(one, is_all)
        return True


def _may_grow(row: Row, n_columns: int) -> bool:
    """Whether generated tokens follow a row's own without padding or a gap in between."""
    is_run = isinstance(row.valid, slice) and row.valid.stop == n_columns
    return bool(is_run and row.n_valid and row.start is not None and not row.bypass_reason)


def _continues(row: Row, one: Followed) -> bool:
    return len(row.ids) > len(one.ids) and row.ids.startswith(one.ids)


def _is_plain(arguments: Mapping[str, Any]) -> bool:
    """Whether a decode step has no arguments by which its states may not be those of a prompt."""
    mask = arguments.get("attention_mask")
    is_plain = all(name in _STEP_ARGUMENTS or value is None or value is False for name, value in arguments.items())
    return is_plain and (mask is None or mask.ndim == 2)


def _kept(layers: Sequence[Any]) -> _Kept:
    """Return the keys and values that layers of attention keep, new tensors after each step."""
    every = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    tensors = [tensor for tensor in every if tensor is not None]
    return _Kept(tensors, [0 if tensor.is_inference() else tensor._version for tensor in tensors])


def _let_go(rows: dict[int, Followed]) -> None:
    """Stop following rows, also those that another thread is about to write."""
    for one in rows.values():
        one.is_under_way = True
    rows.clear()


def _end(rows: Mapping[int, Followed], ended: deque[Followed], lock: Any) -> None:
    """Queue the answers in a K/V cache that is being dropped.

    Runs in any thread at any time, so it does not wait: while another thread holds the lock, K/V is kept whole.
    """
    is_free = lock.acquire(blocking=False)
    try:
        for one in rows.values():
            if one.n_kept < one.n_tokens and one.is_as_seen():
                with suppress(Exception), torch.inference_mode(False), torch.no_grad():
                    if is_free:
                        one.writer.detach(one)
                    ended.append(one)
    finally:
        if is_free:
            lock.release()
