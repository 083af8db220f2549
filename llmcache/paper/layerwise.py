"""The paper's layer-wise cache: Algorithm 1, line by line in `Layerwise.layer`.

Sizes: B rows, T tokens, D hidden width, F0 features, F fingerprint width, R rows of a payload.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.arrays import Floats, below
from llmcache.counters import Counters
from llmcache.errors import NotCachedError
from llmcache.models.adapters import CACHE, Trunk, repack, unpack
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.hooks import Installed, are_hooked, listen, parts_of
from llmcache.models.intact import Layers
from llmcache.models.mark import Mark
from llmcache.models.masks import flatten
from llmcache.models.model_config import setting
from llmcache.models.payloads import Payload, last_valid
from llmcache.models.pooling import Veil
from llmcache.models.weights import Weights
from llmcache.paper.bank import Entry, Kind, LayerBank
from llmcache.paper.fingerprints import Fingerprint, View
from llmcache.paper.forwards import LayerForward, Reuse, Runner, TrunkForward, Way, can_take_rows, copy_kv, install
from llmcache.policies import Policy
from llmcache.request.bypass import find_reason, is_plain_cache
from llmcache.request.outcome import Outcome
from llmcache.request.reading import RequestReader
from llmcache.request.rows import Row, Scope, to_host
from llmcache.stats import Stats
from llmcache.threads import forkable

DEFAULT_NAMESPACE = "default"
RUNG = "paper"


@dataclass(slots=True)
class Call(Way):
    """One call of the trunk."""

    namespace: str = ""
    is_only_if_cached: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)  # of the trunk, by name
    reason: str | None = None  # why it bypasses the cache: a key of `CURES`
    scope: Scope | None = None
    mark: Mark | None = None  # of the weights, when it was opened
    generation: int = 0  # of the namespace, likewise
    content: Tensor | None = None  # which tokens are neither special nor padding, bool (B, T)
    may_search: bool = True
    features: Floats | None = None  # (B, F0) of layer 0, until the fingerprint is fitted
    vectors: Floats | None = None  # fingerprints (B, F)
    near: dict[int, float] = field(default_factory=dict)  # by row: similarity of the nearest stored request
    checked: dict[int, tuple[Reuse, Entry]] = field(default_factory=dict)  # by row: computed, to be compared with this
    reuses: list[int] = field(default_factory=list)  # layers, one for each reuse
    computed: list[tuple[int, Row, dict[str, Tensor], Floats | None]] = field(default_factory=list)
    lookup_s: float = 0.0
    storing_s: float = 0.0

    @property
    def active_rows(self) -> list[Row]:
        """Rows that take part in caching."""
        return [row for row in self.rows if not row.bypass_reason]


class Layerwise:
    """What hangs on one model. Thread-safe."""

    def __init__(
        self,
        trunk: Trunk,
        head: Head,
        payload: Payload,
        fingerprint: Fingerprint,
        banks: Mapping[int, LayerBank],
        tau: Mapping[int, float],
        is_ahead: bool,
        weights: Weights,
        coupling: Coupling,
        reader: RequestReader,
        device: torch.device,
        attention: torch.nn.Module | None,
    ) -> None:
        """Hang on the trunk's forward and those of its layers.

        Args:
            trunk: Of the model.
            head: Reads its output.
            payload: What entries keep of states.
            fingerprint: Compares requests.
            banks: By layer.
            tau: Least similarity of a hit, by the same layers.
            is_ahead: All banks are searched before layer 0, the deepest first; else each when its layer is reached.
            weights: Of the trunk.
            coupling: Whether rows of a call affect each other.
            reader: Of calls.
            device: Of entries.
            attention: Self-attention of layer 0, if the fingerprint reads its output.

        Raises:
            WrapError: The trunk carries a cache already.
        """
        self._trunk, self._head, self._payload, self._fingerprint = trunk, head, payload, fingerprint
        self._banks, self._tau, self._is_ahead = dict(sorted(banks.items())), tau, is_ahead
        self._weights, self._coupling, self._reader, self._device = weights, coupling, reader, device
        self._runner, self._layers = Runner(payload, trunk.adapter), Layers(trunk)
        self._norm = trunk.norm if payload.after_norm else None  # states are taken, and put in, after it
        self._keeps_no_kv = payload.fits_any_length and trunk.makes_kv
        self._is_veiled = head.pooled is not None and payload.name == "mean"
        self._observed = head.observed if payload.fits_any_length else None
        self._looks_otherwise = lru_cache(16)(lambda digest: trunk.looks_otherwise)
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=False)
        self.is_only_if_cached: ContextVar[bool] = ContextVar("llmcache_only_if_cached", default=False)
        self.counters, self._veil = Counters(), Veil()
        self._local = threading.local()  # `call`, `last`
        self._lock = forkable(threading.RLock())  # of all below; a signal's handler may ask for the stats
        self._waiting: dict[str, tuple[str, Floats]] = {}  # by key: namespace and features, for a fit
        self._n_clears = Counter[str]()
        self._n_clears_of_all = self._n_skipped = self._n_checked = 0
        self._hits_by_layer, self._reuses_by_layer = Counter[int](), Counter[int]()
        self._is_retired = False
        self._heeds_costs = any(type(bank.policy).on_cost is not Policy.on_cost for bank in banks.values())
        self.installed: Installed = install(trunk, self)
        if self._norm is not None:
            self.installed.add(listen(self._norm, self._normed))
        if attention is not None:
            self.installed.add(listen(attention, self._attended))
        if self._is_veiled and head.pooled is not None:
            self.installed.add(self._veil.listen(head.pooled.pooling))

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def call(self, swap: TrunkForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The trunk's output, with the layers of this call decided one by one.

        Raises:
            NotCachedError: Within `only_if_cached`, a row is not served.
        """
        if self._is_retired:
            return swap.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._count_compiled(swap.arguments.bind(args, kwargs))
            return swap.original(*args, **kwargs)
        call, outer, self._local.last = self._open(swap, args, kwargs), self.way(), ()
        started, self._local.call = perf_counter(), call
        try:
            if call.is_only_if_cached and call.reason is not None:
                raise NotCachedError(None)
            if call.reason is None and self._keeps_no_kv:
                args, kwargs = swap.arguments.replace(args, kwargs, "use_cache", False)
            output = swap.original(*args, **kwargs)
            if call.reason is None and not self._is_complete(call):
                call.is_closed, call.reason = True, "unwrapped" if self._is_retired else "other_layers"
                if call.reused:  # layers were skipped, and what stands for them was not put in
                    if call.kv_cache is not None:
                        call.kv_cache.reset()
                    output = swap.original(*args, **kwargs)
        finally:
            self._local.call = outer
        took_s = perf_counter() - started - call.lookup_s - call.storing_s
        self._close(call, output, took_s)
        return output

    def way(self) -> Call | None:
        """This thread's innermost call of the trunk."""
        return getattr(self._local, "call", None)

    def layer(self, swap: LayerForward, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lines 2 to 9 of Algorithm 1, for one layer: search its bank; take h'_l where it hits, else compute h_l."""
        call = self._local.call
        if number == 0 and not self._begin(call, swap, args, kwargs):
            return swap.original(*args, **kwargs) if call.first_output is None else call.first_output
        if number > 0 and self._fingerprint.per_layer and number in self._banks:
            self._take_fingerprint(call, swap.arguments.get(args, kwargs, swap.arguments.names[0]))
        if self._is_ahead and number == 0:
            for layer in reversed(self._banks):
                self._search(call, layer)
            self._require_hits(call, 0)
        elif not self._is_ahead and number in self._banks:
            self._search(call, number)
            self._require_hits(call, number)
        activated = self._weights.activated is not None  # PEFT's hooks expect all rows of the batch
        call.takes_all_rows = bool(call.reused) and (activated or not can_take_rows(call, swap, args, kwargs))
        output = self._runner.run(call, swap, number, args, kwargs)
        if number not in self._banks or self._norm is not None:
            return output
        computed = unpack(output)
        states = self._runner.place(call, number, computed)
        self._keep(call, number, states)
        return output if states is computed else repack(output, states)

    def _search(self, call: Call, number: int) -> None:
        """Line 3 and 4: look for a stored fingerprint f' with sim(f_X, f') >= tau in the bank of a layer."""
        started = perf_counter()
        with self.counters.guard("search a bank"):
            found = self._find(call, number)
            call.reused |= found
            call.reuses += [number] * len(found)
        call.lookup_s += perf_counter() - started

    def _find(self, call: Call, number: int) -> dict[int, Reuse]:
        """What serves rows at a layer, by row; what is to be checked is noted."""
        rows = [row for row in call.active_rows if not row.is_misread and row.number not in call.checked]
        if self._is_ahead:
            rows = [row for row in rows if row.number not in call.reused]
        if call.vectors is None or not (call.may_search and rows):
            return {}
        bank, found = self._banks[number], dict[int, tuple[Entry, float, bool]]()
        with self._lock:
            kinds = [self._kind(call, row) for row in rows]
            for row, near in zip(rows, bank.search(kinds, call.vectors[[row.number for row in rows]]), strict=True):
                if near is None:
                    continue
                entry, similarity = near
                call.near[row.number] = max(similarity, call.near.get(row.number, -1.0))
                if round(similarity, 6) < self._tau[number]:  # a repeat's own may be off by rounding
                    continue
                # A row that stands on another request's state would compute nothing to compare with.
                is_checked = row.number not in call.reused and bank.policy.should_check(entry.key)
                found[row.number] = entry, similarity, is_checked
                if not is_checked:
                    bank.policy.on_hit(entry.key)
        reused = {}
        for place, (entry, similarity, is_checked) in found.items():
            tensors = bank.unpack(entry)
            state = Reuse(number, tensors["hidden"], tensors.get("keys"), tensors.get("values"), entry.key, similarity)
            if is_checked:
                call.checked[place] = state, entry
            else:
                reused[place] = state
        return reused

    def _keep(self, call: Call, number: int, states: Tensor) -> None:
        """Line 8: keep what rows computed at a layer (B, T, D), to be stored once the call has succeeded."""
        started = perf_counter()
        with self.counters.guard("keep a state"), torch.inference_mode(False), torch.no_grad():
            first = 0 if self._is_ahead else number
            for row in call.active_rows:
                reuse = call.reused.get(row.number)
                if reuse is not None and reuse.layer >= number:
                    continue
                tensors = {"hidden": self._payload.take(states[row.number], row.valid)}
                if call.kv_cache is not None:
                    tensors |= copy_kv(call.kv_cache, row, first, number)
                vector = None if call.vectors is None else call.vectors[row.number]
                call.computed.append((number, row, tensors, vector))
        call.storing_s += perf_counter() - started

    def _store(self, call: Call) -> None:
        """Line 9: store what was computed, unless the weights changed or the namespace was cleared meanwhile."""
        if not call.computed:
            return
        assert call.scope is not None
        if not self._weights.stayed(call.mark, call.scope.weights):
            call.reason = "weights_changed"
            return
        moved = _move([tensor for _, _, tensors, _ in call.computed for tensor in tensors.values()], self._device)
        seen = set[tuple[int, str]]()
        with self._lock:
            if call.generation != self._generation(call.namespace):
                return
            for number, row, tensors, vector in call.computed:
                tensors = {name: next(moved) for name in tensors}
                if row.number in call.checked:  # it is not stored: a stored one is near
                    state, entry = call.checked[row.number]
                    if state.layer == number:
                        self._banks[number].check(entry, tensors["hidden"], state.hidden)
                elif (number, row.key) not in seen:
                    seen.add((number, row.key))
                    if not self._banks[number].put(row.key, self._kind(call, row), tensors, vector):
                        self.counters.too_large()
                    elif vector is None and call.features is not None:
                        self._wait(row.key, call.namespace, call.features[row.number])

    def _wait(self, key: str, namespace: str, features: Floats) -> None:
        """Keep features (F0,) until the fingerprint is fitted; once it is, all that waited can be found."""
        if not self._fingerprint.n_fit:  # by another call, meanwhile
            self._point({key: (namespace, features)})
            return
        self._waiting[key] = namespace, features
        if len(self._waiting) >= self._fingerprint.n_fit:
            waiting, self._waiting = self._waiting, {}
            self._fingerprint.fit([of_one for _, of_one in waiting.values()])
            self._point(waiting)

    def _point(self, waiting: Mapping[str, tuple[str, Floats]]) -> None:
        vectors = self._fingerprint.project(np.stack([features for _, features in waiting.values()]))
        for key, vector in zip(waiting, vectors, strict=True):
            for bank in self._banks.values():
                if key in bank.entries and bank.entries[key].number is None:
                    bank.point(key, vector)

    def _take_fingerprint(self, call: Call, hidden: Tensor) -> None:
        """Line 1: fingerprint of the states that enter a layer (B, T, D); rows that have none are left out."""
        started, call.vectors = perf_counter(), None
        with self.counters.guard("take a fingerprint"):
            assert call.content is not None
            ids, content = call.arguments["input_ids"], call.content.to(hidden.device)
            view = View(hidden if self._fingerprint.reads_states else None, content, ids, call.attention)
            (features,) = to_host(self._fingerprint.features(view))
            assert features is not None
            if self._fingerprint.n_fit:
                call.features, vectors = features, features
            else:
                call.vectors = vectors = self._fingerprint.project(features)
            for number in np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist():
                call.rows[number].bypass_reason = call.rows[number].bypass_reason or "not_finite"
        call.lookup_s += perf_counter() - started

    # -- a call --------------------------------------------------------------------------------------------------------

    def _open(self, swap: TrunkForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read a call: its rows with their keys, or the reason for a bypass."""
        call = Call(namespace=self.namespace.get(), is_only_if_cached=self.is_only_if_cached.get())
        started = perf_counter()
        try:
            call.arguments, mask_4d = flatten(swap.arguments.bind(args, kwargs))
            call.reason = self._find_reason(call, swap) or self._read(call, mask_4d)
        except Exception as error:
            call.reason = "error"
            self.counters.error("read a call", error)
        call.is_closed = call.reason is not None
        call.lookup_s += perf_counter() - started
        return call

    def _find_reason(self, call: Call, swap: TrunkForward) -> str | None:
        """Why a call bypasses the cache, as far as its arguments and the model tell."""
        if torch.is_grad_enabled():
            self._weights.suspect()  # an optimizer may write them from now on
        if self.is_disabled.get():
            return "disabled"
        reason = find_reason(call.arguments, self._trunk, swap.arguments.defaults)
        if reason is None and self._keeps_no_kv:
            reason = self._find_reason_of_kv(call.arguments)
        if reason is not None:
            return reason
        if self._head.pooled is not None and self._head.pooled.has_changed():
            return "other_pooling"
        if self._runner.cannot_skip:
            return "unknown_output"
        if are_hooked(parts_of(self._trunk.module)):
            return "hooked"
        return self._layers.find_reason()

    def _find_reason_of_kv(self, arguments: Mapping[str, Any]) -> str | None:
        """Why a call cannot be run without the K/V that the model would make; entries hold none."""
        asked = arguments.get("use_cache")
        if asked or arguments.get(CACHE) is not None:
            return "kv_cache_with_pooled_payload"
        makes_kv = setting(self._trunk.config, "use_cache") if asked is None else asked
        # Without K/V models look at the positions for where a text begins, and hide the texts before from it.
        is_unmasked = arguments.get("attention_mask") is None and arguments.get("position_ids") is not None
        return "packed" if makes_kv and is_unmasked else None

    def _read(self, call: Call, mask_4d: Tensor | None) -> str | None:
        """Read weights and rows; the reason for a bypass, or None."""
        weights, ids = self._weights, call.arguments["input_ids"]
        if weights.is_trained:
            return "gradients_held"
        digest = weights.digest()
        call.mark = weights.mark_of(digest)
        if reason := weights.refusal:
            return reason
        if (
            self._payload.fits_any_length
            and self._head.observed is not None
            and self._head.observed.has_changed(digest)
        ):
            return "other_pooling"
        if self._looks_otherwise(digest):
            return "other_attention"
        if self._coupling.reason(digest):
            return "coupled_rows"
        device = ids.device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        call.scope = Scope(call.namespace, digest, autocast, self._trunk.attention)
        call.generation = self._generation(call.namespace)
        requests = self._reader.read(call.arguments, mask_4d, call.scope, weights.activated, is_whole=False)
        call.rows, call.content = requests.rows, torch.from_numpy(requests.content)
        call.may_search = not requests.may_be_refused  # else the model is to say so
        return None

    def _begin(self, call: Call, swap: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See what shows at layer 0 only; whether the call may go on."""
        hidden = swap.arguments.get(args, kwargs, swap.arguments.names[0])
        call.kv_cache = swap.arguments.get(args, kwargs, CACHE)
        if call.kv_cache is not None and not is_plain_cache(call.kv_cache):
            call.reason = "kv_cache_kind"
        elif (
            not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[:2] != call.arguments["input_ids"].shape
        ):
            call.reason = "unknown_layout"
        if call.reason is None:
            if self._fingerprint.reads_attention:  # not guarded: what fails here is the model itself
                call.first_output = swap.original(*args, **kwargs)
            self._take_fingerprint(call, hidden)
        elif call.is_only_if_cached:
            raise NotCachedError(None)
        call.is_closed = call.reason is not None
        return not call.is_closed

    def _require_hits(self, call: Call, number: int) -> None:
        """Raise unless all rows are served from a layer on, within `only_if_cached`."""
        if call.is_only_if_cached:
            served = {row for row, reuse in call.reused.items() if reuse.layer >= number}
            if missing := tuple(row.number for row in call.rows if row.number not in served):
                raise NotCachedError(missing)

    def _is_complete(self, call: Call) -> bool:
        """Whether all layers ran, each once and in order, and reused states were put in."""
        return call.is_closed or call.turn == self._trunk.depth + (self._norm is not None)

    def _normed(self, output: Any) -> Any:
        """After the final norm: states of a payload that is taken there are put in and kept."""
        call = None if torch.compiler.is_compiling() else self.way()
        last = self._trunk.depth - 1
        if call is None or call.is_closed or call.turn != last + 1:
            return None
        call.turn += 1
        states = self._runner.place(call, last, output)
        self._keep(call, last, states)
        return states

    def _attended(self, output: Any) -> None:
        """After layer 0's self-attention."""
        call = None if torch.compiler.is_compiling() else self.way()
        if call is not None:
            call.attention = unpack(output)

    def _close(self, call: Call, output: Any, took_s: float) -> None:
        """Store and count what was done in a call that has succeeded; note what became of each row."""
        started = perf_counter()
        if call.reason is None:
            with self.counters.guard("store a call"):
                self._store(call)
            with self.counters.guard("tell what computing took"):
                self._tell_costs(call, took_s)
        if self._is_veiled and call.reused and not call.is_closed:
            self._veil.draw(output, {row: last_valid(call.rows[row].valid) for row in call.reused})
        if call.reason is not None:
            n_rows = _count_rows(call.arguments)
            self.counters.bypass(call.reason, n_rows)
            if call.reason != "decode":  # a step of a generation belongs to the request that its prefill was
                self._local.last = (Outcome(bypassed=call.reason),) * n_rows
            return
        outcomes = tuple(self._outcome(call, row) for row in call.rows)
        self._local.last = outcomes
        with self._lock:
            self._hits_by_layer.update(reuse.layer for reuse in call.reused.values())
            self._reuses_by_layer.update(call.reuses)
            self._n_skipped += call.n_skipped
            self._n_checked += len(call.checked)
        counted = tuple(one for one, row in zip(outcomes, call.rows, strict=True) if row.number not in call.checked)
        self.counters.done(counted, 0, call.lookup_s, call.storing_s + perf_counter() - started, 0)

    def _tell_costs(self, call: Call, took_s: float) -> None:
        """Tell policies what computing each row took, in milliseconds by its share of the tokens."""
        n_tokens = {row.key: row.n_valid for row in call.active_rows if row.number not in call.reused}
        if n_tokens and took_s > 0 and self._heeds_costs:
            with self._lock:
                for bank in self._banks.values():
                    for key in n_tokens.keys() & bank.entries.keys():
                        bank.policy.on_cost(key, 1e3 * took_s * n_tokens[key] / sum(n_tokens.values()))

    def _outcome(self, call: Call, row: Row) -> Outcome:
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        reuse = call.reused.get(row.number)
        if reuse is None:
            return Outcome(row.key, similarity=call.near.get(row.number))
        return Outcome(row.key, RUNG, reuse.layer, reuse.key, reuse.similarity)

    def _kind(self, call: Call, row: Row) -> Kind:
        assert call.scope is not None
        return Kind(call.scope, 0 if self._payload.fits_any_length else row.n_valid, call.kv_cache is not None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_compiled(self, arguments: dict[str, Any]) -> None:
        """Leave the compiled graph for a moment: counters cannot be part of it."""
        if torch.is_grad_enabled():
            self._weights.suspect()
        self.counters.bypass("compiled", _count_rows(arguments))
        self._local.last = (Outcome(bypassed="compiled"),) * _count_rows(arguments)

    # -- what the facade asks ------------------------------------------------------------------------------------------

    @property
    def last(self) -> tuple[Outcome, ...]:
        """What became of each row of this thread's last call."""
        outcomes: tuple[Outcome, ...] = getattr(self._local, "last", ())
        return outcomes

    @property
    def payload(self) -> str:
        """What entries keep of a request's states."""
        return self._payload.name

    def stats(self) -> Stats:
        """Counts since the start or `restart_stats`, and what is held now."""
        with self._lock:
            banks = self._banks.items()
            counted = self.counters.snapshot(
                n_entries={layer: len(bank.entries) for layer, bank in banks},
                n_evicted={layer: bank.n_evicted for layer, bank in banks},
                n_expelled={layer: bank.n_expelled for layer, bank in banks},
                n_stored=len({key for _, bank in banks for key in bank.entries}),
                nbytes=sum(bank.nbytes for _, bank in banks),
                nbytes_by_layer={layer: bank.nbytes for layer, bank in banks},
                max_nbytes_by_layer={layer: bank.max_bytes for layer, bank in banks},
                index_nbytes=sum(bank.index_nbytes for _, bank in banks),
                reconstruction_error={layer: bank.latest.loss.relative_error for layer, bank in banks},
                reconstruction_distance={layer: bank.latest.loss.cosine_distance for layer, bank in banks},
            )
            return replace(
                counted,
                n_requests=counted.n_requests + self._n_checked,
                hits_by_layer=dict(self._hits_by_layer),
                reuses_by_layer=dict(self._reuses_by_layer),
                n_revalidated=self._n_checked,
                n_layers_skipped=self._n_skipped,
            )

    def restart_stats(self) -> None:
        """Count requests, hits and times anew."""
        self.counters.restart()
        with self._lock:
            self._hits_by_layer.clear()
            self._reuses_by_layer.clear()
            self._n_skipped = self._n_checked = 0

    def clear(self) -> None:
        """Forget all entries; counts, and what fingerprint and codecs have learned, stay."""
        with self._lock:
            self._n_clears_of_all += 1
            self._forget(None)

    def purge(self, namespace: str) -> int:
        """Forget the entries of a namespace; returns how many requests they were."""
        with self._lock:
            self._n_clears[namespace] += 1
            before = {key for bank in self._banks.values() for key in bank.entries}
            self._forget(namespace)
            return len(before - {key for bank in self._banks.values() for key in bank.entries})

    def drain(self) -> int:
        """Nothing waits for idle moments: 0."""
        return 0

    def close(self) -> None:
        """Take everything off the model; calls under way end with right answers.

        Raises:
            WrapError: Somebody has put another forward on top of one of ours.
        """
        self._is_retired = True  # first: calls that begin from now on are plain
        self.installed.remove()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `restore` needs: metadata that JSON holds, and tensors by name. Leaves out entries of other weights."""
        digest, tensors = self._weights.digest(is_kept=True), dict[str, Tensor]()
        meta: dict[str, Any] = {"banks": {}, "waiting": []}
        with self._lock:
            for name, array in self._fingerprint.state().items():
                tensors[f"fingerprint.{name}"] = torch.from_numpy(array)
            for key, (namespace, features) in self._waiting.items():
                tensors[f"waiting.{len(meta['waiting'])}"] = torch.from_numpy(features)
                meta["waiting"].append([key, namespace])
            for layer, bank in self._banks.items():
                meta["banks"][str(layer)], of_bank = bank.state(digest)
                tensors |= {f"{layer}.{name}": tensor for name, tensor in of_bank.items()}
        return meta, tensors

    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state` of a cache with the same settings and weights gave.

        Raises:
            KeyError: A part is missing.
            ValueError: The parts do not fit each other.
        """
        digest = self._weights.digest()
        with self._lock:
            of_fingerprint = below("fingerprint.", tensors)
            self._fingerprint.restore({name: tensor.numpy() for name, tensor in of_fingerprint.items()})
            for number, (key, namespace) in enumerate(meta["waiting"]):
                self._waiting[key] = namespace, tensors[f"waiting.{number}"].numpy()
            for layer, notes in meta["banks"].items():
                self._banks[int(layer)].restore(digest, notes, below(f"{layer}.", tensors), self._device)

    def _forget(self, namespace: str | None) -> None:
        for bank in self._banks.values():
            bank.clear(namespace)
        self._waiting = {key: one for key, one in self._waiting.items() if namespace not in (None, one[0])}

    def _generation(self, namespace: str) -> int:
        """How often a namespace was cleared, alone or with all others."""
        return self._n_clears_of_all + self._n_clears[namespace]


def _move(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Copies on a device, with one synchronisation for all; those that are there already as they are."""
    with torch.inference_mode(False), torch.no_grad():
        moved = [one.to(device, non_blocking=one.is_cuda) for one in tensors]
    if tensors and tensors[0].is_cuda and device.type == "cpu":
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return iter(moved)


def _count_rows(arguments: Mapping[str, Any]) -> int:
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
