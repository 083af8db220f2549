"""Serves prompts of decoders that keep states (linear attention, convolutions), from copies of the whole K/V cache.

A state covers all tokens before it and cannot be cut, so a copy serves only what continues the tokens it was taken
after: at the end of a prompt, and of the tokens generated after it. It is an entry of the bank: the tokens' ids, the
trunk's states (n, D), and the tensors of the K/V cache, with a description of all else (`models/kv_state.py`).

Sizes: n tokens, D hidden width.
"""

import hashlib
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from llmcache.calls.columns import cut_off
from llmcache.calls.follower import Followed, Follower
from llmcache.calls.kv_fill import last_states, make_output, names_of, with_states
from llmcache.calls.prefill import Blocks
from llmcache.calls.stored_entries import entry_name
from llmcache.memory.bank import Bank, Entry
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import Arguments
from llmcache.models.kv_state import cache_in, describe, is_new, new_cache, own_of, restore
from llmcache.models.packing import STATES
from llmcache.request.outcome import Outcome
from llmcache.request.rows import Row, Scope, key_of
from llmcache.reuse.call import Call, Path, count_tokens
from llmcache.support.threads import forkable

_MARK = b"states"  # that the layout of such an entry begins with; no digest of padding is as short


@dataclass(slots=True)
class Restoring:
    """The plan for one prompt whose K/V cache is restored from a copy."""

    kv_cache: Any  # the caller's, which the call fills
    entry: Entry | None = None  # the copy that serves it

    @property
    def n_known(self) -> int:
        """Tokens that the copy holds."""
        return 0 if self.entry is None else len(self.entry.fields[1])


class Snapshots(Path):
    """Serves and stores calls of one row without padding, each by its `Restoring`, `call.plan`. Thread-safe.

    A `Writer` of the K/V caches that are followed.
    """

    keeps_kv = True
    joins = False

    def __init__(self, bank: Bank, blocks: Blocks, arguments: Arguments, follower: Follower) -> None:
        """Keep copies in `bank`; `blocks` know the kinds of output."""
        self._wrapped, self._trunk, self._bank, self._arguments = blocks.wrapped, blocks.trunk, bank, arguments
        self._kinds, self.size, self._follower = blocks.kinds, blocks.size, follower
        self._lengths: dict[Scope, dict[str, int]] = {}  # tokens of each copy, by key
        self._lock = forkable(threading.RLock())
        bank.watch(self._left)

    def open(self, call: Call) -> str | None:
        """Begin the plan of a call that keeps K/V; return the reason for a bypass, or None."""
        row, kv_cache = call.rows[0], call.arguments.get(CACHE)
        if call.arguments.get("token_type_ids") is not None:
            return "token_types"
        if self._kinds.get(call.kind, ()) is None:
            return "more_output"
        if kv_cache is None and (call.causal.makes_dynamic_cache or call.causal.own_cache):
            kv_cache = self._new_cache()
        is_single = len(call.rows) == 1 and row.n_valid == call.requests.ids.shape[1] and row.start == 0
        is_plain = not (call.is_activated or call.is_coupled or call.state.sees_later or call.mask_4d is not None)
        if not (is_single and is_plain and is_new(kv_cache, self._new_cache())):
            return "kv_states"
        call.plan = Restoring(kv_cache)
        return row.bypass_reason or None

    def _new_cache(self) -> DynamicCache:
        """Return an empty K/V cache, as the trunk makes one."""
        return new_cache(self._trunk, self._wrapped.causal.own_cache or DynamicCache)

    def look_up(self, call: Call) -> None:
        """Find the longest copy whose tokens the prompt begins with; a whole prompt if its output can be made."""
        row = call.rows[0]
        self._follower.settle(call.rows)
        is_whole = self._wrapped.config.serves_exact and self._kinds.knows(call.kind)
        found = [self._find(call.scope, row, row.n_valid if is_whole else row.n_valid - 1)]
        if call.prefixes_from not in (None, call.scope.namespace):
            shared = replace(call.scope, namespace=call.prefixes_from)
            found.append(self._find(shared, row, row.n_valid - 1))
        call.plan.entry = max((one for one in found if one), key=lambda one: len(one.fields[1]), default=None)

    def _find(self, scope: Scope, row: Row, longest: int) -> Entry | None:
        """Return the longest copy of up to `longest` tokens that a row begins with."""
        with self._lock:
            lengths = sorted({n for n in self._lengths.get(scope, {}).values() if n <= longest})
        sha, at, key = hashlib.sha256(scope.key + _MARK), 0, ""
        for end in (n * row.id_width for n in lengths):
            sha.update(row.ids[at:end])
            at, now = end, key_of(sha.digest())
            key = now if now in self._bank else key
        (entry,) = self._bank.find([replace(row, key=key)]) if key else [None]
        is_same = entry is not None and row.ids.startswith(entry.fields[0].cpu().numpy().tobytes())
        return entry if is_same else None

    def served(self, call: Call) -> Collection[int]:
        return (0,) if call.plan.n_known == call.rows[0].n_valid else ()

    def drop(self, call: Call) -> None:
        call.plan.entry = None

    def answer(self, call: Call) -> Any:
        """Return the trunk's output after `look_up`, and fill the caller's K/V cache."""
        started, plan = perf_counter(), call.plan
        try:
            return self._serve(call, plan)
        except Exception as error:
            if plan.entry is None:
                raise
            plan.entry = None
            vars(plan.kv_cache).update(vars(self._new_cache()))
            output = self._serve(call, plan)  # an error of the model is raised again here
            self._wrapped.counters.error("serve a prefix", error)
            return output
        finally:
            call.computing_s = perf_counter() - started

    def _serve(self, call: Call, plan: Restoring) -> Any:
        args, kwargs = self._arguments.replace(call.args, call.kwargs, {CACHE: plan.kv_cache})
        if plan.entry is None:
            return call.engine.run(args, kwargs, call.rows)
        _, states, *tensors = plan.entry.fields
        states = states[None].to(call.arguments["input_ids"].device, copy=True)
        restore(plan.kv_cache, json.loads(plan.entry.layout.removeprefix(_MARK)), tensors)
        if states.shape[1] == call.rows[0].n_valid:
            kind, names, _ = self._kinds[call.kind] or (tuple, (STATES, CACHE), False)
            return make_output(kind, names, states, plan.kv_cache)
        args, kwargs = cut_off(self._arguments, call, states.shape[1], *self._place(call, args, kwargs))
        output = call.engine.run(args, kwargs, call.rows)
        return with_states(output, torch.cat([states.to(output[0].dtype), output[0]], dim=1))

    def _place(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with positions, if the trunk takes them: some count from 0 whatever the cache holds."""
        if "position_ids" not in self._arguments.names or call.arguments.get("position_ids") is not None:
            return args, kwargs
        ids = call.arguments["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return self._arguments.replace(args, kwargs, {"position_ids": positions})

    def store(self, call: Call, output: Any) -> str | None:
        """Keep a copy at the end of a prompt; return the bypass reason if its output or K/V is not understood."""
        plan, states = call.plan, last_states(output)
        if states is None:
            self._kinds.learn(call.kind, None)
            return "more_output"
        plan.kv_cache = cache_in(output, plan.kv_cache)
        is_usual = type(plan.kv_cache) is (self._wrapped.causal.own_cache or DynamicCache)
        if not is_usual or plan.kv_cache.get_seq_length() != states.shape[1]:
            return "kv_layout"
        self._kinds.learn(call.kind, (type(output), names_of(output), False))
        entry = self._copy(call, call.rows[0].ids, states[0], plan.kv_cache.layers, own_of(plan.kv_cache))
        self._put(call, entry, 1e3 * call.computing_s)
        return None

    def follow(self, call: Call, output: Any) -> None:
        if (states := last_states(output)) is not None:
            self._follower.begin(call, call.plan.kv_cache, states, self)

    def write(self, followed: Followed, is_all: bool) -> int:
        """Keep a copy at the end of an answer, if its prompt was not forgotten; see `Writer`."""
        call = followed.call
        if not is_all:
            return followed.n_kept
        entry = self._copy(call, followed.ids, torch.cat(followed.states), followed.layers, followed.own)
        if self._bank.purges.is_current(call.scope.namespace, _key_of(call.scope, followed.row.ids), call.generation):
            self._put(call, entry)
        return followed.n_tokens

    def detach(self, followed: Followed) -> None:
        """Copy nothing: the layers live as long as they are followed, and are needed whole."""

    def _copy(self, call: Call, ids: bytes, states: Tensor, layers: Sequence[Any], own: Mapping[str, Any]) -> Entry:
        """Copy a K/V cache that holds these tokens and no more, and the trunk's states (n, D), as normal tensors."""
        described, tensors = describe(layers, own)
        with torch.inference_mode(False), torch.no_grad():
            packed = torch.frombuffer(bytearray(ids), dtype=torch.uint8)
            copies = [one.detach().to(self._wrapped.device, copy=True) for one in (states, *tensors)]
        layout = _MARK + json.dumps(described).encode()
        return Entry(_key_of(call.scope, ids), call.scope, (packed, *copies), layout=layout)

    def _put(self, call: Call, entry: Entry, cost: float | None = None) -> None:
        if n_too_large := self._bank.put([entry], call.generation, cost):
            self._wrapped.counters.too_large(n_too_large)
        self._note(entry)

    def notice(self) -> None:
        """Take up the copies in a bank that was restored from a save."""
        for entry in self._bank.entries():
            if entry.layout.startswith(_MARK):
                self._note(entry)

    def _note(self, entry: Entry) -> None:
        with self._lock:
            self._lengths.setdefault(entry.scope, {})[entry.key] = len(entry.fields[1])
        if entry.key not in self._bank:
            self._left(entry.key)

    def _left(self, key: str) -> None:
        with self._lock:
            for lengths in self._lengths.values():
                lengths.pop(key, None)

    def outcome(self, call: Call, row: Row) -> Outcome:
        plan: Restoring = call.plan
        if plan.entry is None:
            return Outcome(row.key, missed="snapshots")
        if self.served(call):
            return Outcome(row.key, "exact", self._trunk.depth - 1, plan.entry.key, 1.0)
        return Outcome(row.key, "prefix", n_prefix=plan.n_known, n_known=plan.n_known, missed="differs")

    def names(self, call: Call) -> list[str]:
        """Return the names of the prompt's entry, and of all copies that it begins with or that begin with it."""
        row = call.rows[0]
        with self._lock:
            keys = [*self._lengths.get(call.scope, ())]
        held = zip(keys, self._bank.find([replace(row, key=key) for key in keys]), strict=True)
        ids = {key: entry.fields[0].cpu().numpy().tobytes() for key, entry in held if entry is not None}
        alike = [key for key, own in ids.items() if own.startswith(row.ids) or row.ids.startswith(own)]
        return [entry_name(key) for key in (row.key, _key_of(call.scope, row.ids), *alike)]

    def n_computed(self, call: Call) -> int:
        plan: Restoring = call.plan
        return count_tokens(call, (0,)) - plan.n_known


def _key_of(scope: Scope, ids: bytes) -> str:
    return key_of(hashlib.sha256(scope.key + _MARK + ids).digest())
