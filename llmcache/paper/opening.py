"""Opens a call: reads its rows with keys and fingerprints, or finds the reason for a bypass.

Sizes: B rows, T tokens, D hidden width, F0 features, F fingerprint width.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.models.adapters import Trunk
from llmcache.models.arguments import Arguments
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.hooks import are_hooked, parts_of
from llmcache.models.intact import find_reason_of_layers
from llmcache.models.masks import flatten
from llmcache.models.packing import Payload
from llmcache.models.weights import Weights
from llmcache.paper.bank import Kind
from llmcache.paper.call import Call
from llmcache.paper.fingerprints import Fingerprint, View
from llmcache.request.bypass import are_strange, find_reason_of, find_reason_of_kv, is_plain_cache
from llmcache.request.forms import find_reason_now
from llmcache.request.reading import RequestReader, to_host
from llmcache.request.rows import Row, Scope


class Opener:
    """Reads calls of one trunk. Thread-safe."""

    def __init__(
        self,
        trunk: Trunk,
        head: Head,
        payload: Payload,
        fingerprint: Fingerprint,
        weights: Weights,
        coupling: Coupling,
        reader: RequestReader,
    ) -> None:
        self._trunk, self._head, self._payload = trunk, head, payload
        self._fingerprint, self._weights, self._coupling, self._reader = fingerprint, weights, coupling, reader
        self._observed = head.observed if payload.fits_any_length else None
        # Cached by digest, which covers the configuration they are computed from.
        self._has_changed_direction = lru_cache(16)(lambda digest: trunk.has_changed_direction)
        self._tables = lru_cache(16)(lambda digest: reader.tables())
        #: Whether the model would make K/V that its head never reads and entries do not hold.
        self.keeps_no_kv = payload.fits_any_length and trunk.makes_kv

    def open(self, call: Call, names: Arguments) -> str | None:
        """Read a call before the trunk runs; return the reason for a bypass, or None."""
        call.arguments, mask_4d = flatten(call.arguments)
        if reason := self._find_reason_of_arguments(call, names) or self._find_reason_of_model(call):
            return reason
        assert call.scope is not None
        tables = self._tables(call.scope.weights)
        requests = self._reader.read(
            call.arguments, mask_4d, call.scope, tables, self._weights.activated, is_whole=False
        )
        call.rows, call.content = requests.rows, torch.from_numpy(requests.content())
        call.may_search = not requests.may_be_refused()  # if the input is out of range, the model must raise
        return None

    def begin(self, call: Call, hidden: Tensor, kv_cache: Any) -> str | None:
        """Check the K/V cache and the states (B, T, D) that enter layer 0; return the reason for a bypass, or None."""
        call.kv_cache = kv_cache
        if kv_cache is not None and not is_plain_cache(kv_cache):
            return "kv_cache_kind"
        if hidden.ndim != 3 or hidden.shape[:2] != call.arguments["input_ids"].shape:
            return "unknown_layout"
        return None

    def take_fingerprint(self, call: Call, hidden: Tensor) -> None:
        """Take the fingerprint (line 1) of states (B, T, D) that enter a layer; bypass rows where it is not finite."""
        assert call.content is not None
        call.vectors = None
        ids, content = call.arguments["input_ids"], call.content.to(hidden.device)
        states = hidden if self._fingerprint.reads_states else None
        (features,) = to_host(self._fingerprint.features(View(states, content, ids, call.attention)))
        assert features is not None
        if self._fingerprint.n_fit:
            call.features, made = features, features
        else:
            call.vectors = made = self._fingerprint.project(features)
        for number in np.flatnonzero(~np.isfinite(made).all(axis=1)).tolist():  # no index accepts such a vector
            call.rows[number].bypass_reason = call.rows[number].bypass_reason or "not_finite"

    def kind_of(self, call: Call, row: Row) -> Kind:
        """Return the kind of a request; only entries of the same kind are compared."""
        assert call.scope is not None
        return Kind(call.scope, 0 if self._payload.fits_any_length else row.n_valid, call.kv_cache is not None)

    def _find_reason_of_arguments(self, call: Call, names: Arguments) -> str | None:
        """Return the reason why a call with these arguments cannot be served, or None. Reads no tensor."""
        if reason := find_reason_now(self._trunk):
            return reason
        if are_strange(call.arguments.values()):
            return "traced"
        if not self._trunk.has_same_depth:
            return "other_depth"
        if reason := find_reason_of(call.arguments, self._trunk, names.defaults):
            return reason
        return find_reason_of_kv(call.arguments, self._trunk) if self.keeps_no_kv else None

    def _find_reason_of_model(self, call: Call) -> str | None:
        """Return the reason why the model in its current state cannot be served, or None; set the call's scope."""
        if reason := find_reason_of_layers(self._trunk):
            return reason
        if self._head.pooled is not None and self._head.pooled.has_changed():
            return "other_pooling"
        if self._weights.is_trained:
            return "gradients_held"
        digest = self._weights.digest()
        call.mark = self._weights.mark_of(digest)
        if reason := self._weights.refusal:
            return reason
        if self._observed is not None and self._observed.has_changed(digest):
            return "other_pooling"
        if self._has_changed_direction(digest):
            return "other_attention"
        if self._coupling.reason(digest):
            return "coupled_rows"
        if are_hooked(parts_of(self._trunk.module)):
            return "hooked"
        device = call.arguments["input_ids"].device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        call.scope = Scope(call.namespace, digest, autocast, self._trunk.attention)
        return None
