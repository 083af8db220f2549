"""Opens a call: reads its rows with keys and fingerprints, or finds the reason for a bypass.

Sizes: B rows, T tokens, D hidden width, F0 features, F fingerprint width.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.calls.wrapped import Wrapped
from llmcache.models.adapters import find_reason_of_layers
from llmcache.models.arguments import Arguments
from llmcache.paper.bank import Kind
from llmcache.paper.call import Call
from llmcache.paper.fingerprints import Fingerprint, View
from llmcache.request.bypass import find_reason_of_cache
from llmcache.request.call_signatures import CallSignatures, find_reason_now
from llmcache.request.reading import RequestReader, to_host
from llmcache.request.rows import Row, Scope


class Opener:
    """Reads calls of one trunk. Thread-safe."""

    def __init__(self, wrapped: Wrapped, fingerprint: Fingerprint) -> None:
        self._trunk, self._payload, self._weights = wrapped.trunk, wrapped.payload, wrapped.weights
        self._reader = RequestReader(wrapped.trunk, wrapped.head, wrapped.payload, wrapped.tokenizer)
        self._fingerprint, module = fingerprint, wrapped.trunk.module
        arguments = Arguments(getattr(module, "_orig_mod", module).forward)  # as `Swap.arguments`
        self._signatures = CallSignatures(
            wrapped.trunk,
            arguments,
            wrapped.coupling,
            wrapped.causality,
            self._reader,
            wrapped.head,
            wrapped.keeps_tokens,
        )
        #: Whether the model would make K/V that its head never reads and entries do not hold.
        self.keeps_no_kv = self._signatures.keeps_no_kv

    def open(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Read a call before the trunk runs; return the reason for a bypass, or None."""
        if reason := find_reason_now(self._trunk):
            return reason
        look = self._weights.look()
        if look.refusal is not None:
            return look.refusal
        call.snapshot = look.snapshot
        opened = self._signatures.open(args, kwargs, look)
        # Layers that are deleted or replaced change what is known of the attention, too.
        if opened == "other_attention" or not isinstance(opened, str):
            opened = find_reason_of_layers(self._trunk) or opened
        if isinstance(opened, str):
            return opened
        state, signature, arguments, mask_4d, autocast = opened
        call.arguments = dict(arguments)
        if state.coupling:
            return "coupled_rows"
        call.scope = Scope(call.namespace, look.digest, autocast, signature.attention)
        requests = self._reader.read(
            call.arguments, mask_4d, call.scope, state.tables, look.activated, signature.causal, False, keeps_kv=True
        )
        call.rows, call.content = requests.rows, torch.from_numpy(requests.content())
        call.may_search = not requests.may_be_refused()  # if the input is out of range, the model must raise
        return None

    def begin(self, call: Call, hidden: Tensor, kv_cache: Any) -> str | None:
        """Check the K/V cache and the states (B, T, D) that enter layer 0; return the reason for a bypass, or None."""
        call.kv_cache = kv_cache
        if kv_cache is not None and (reason := find_reason_of_cache(kv_cache)):
            return reason
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
