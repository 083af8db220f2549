"""What of a call is read on the host: its scope, its rows with their exact keys, and what fingerprints are made of.

Sizes: B rows, T tokens, D hidden width.
"""

import sys
from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcache.arrays import Bools, Floats
from llmcache.execution.components import Components
from llmcache.execution.old_call import Call, Read
from llmcache.fingerprint import Fingerprint, View
from llmcache.models.adapters import first_position, special_ids, vocabulary_size
from llmcache.models.masks import expand
from llmcache.models.model_config import setting
from llmcache.models.payloads import head_reads_padding
from llmcache.models.rope import steady_length
from llmcache.request.rows import HostInputs, Row, Scope, id_dtype, read_rows, to_host

_ONE = np.int64(1).tobytes()
_SIGN = 7 if sys.byteorder == "little" else 0  # of an int64, the byte that holds the sign


class RequestReader:
    """Reads the calls of one wrapped model. Thread-safe."""

    def __init__(self, parts: Components, tokenizer: Any = None) -> None:
        """Prepare for calls.

        Args:
            parts: What calls are served with.
            tokenizer: Names the special tokens; without one the config and the family do.
        """
        self._components = parts
        self._tokenizer = tokenizer
        self._tables: tuple[object, tuple[Bools, Tensor]] | None = None
        self._head_reads = _reads(parts)
        observed = parts.head.observed
        self._reads_padding = observed is not None and observed.reads_padding and parts.payload.name == "sequence"
        keeps_tokens, heeds_mask = not parts.payload.fits_any_length, parts.head.pooled is not None
        self._layout_counts = keeps_tokens and not heeds_mask
        self._layout_is_kept = keeps_tokens and heeds_mask
        self._steady_length = steady_length(parts.trunk.module)
        self._first_position = first_position(parts.trunk.module)

    def scope(self, call: Call, entering: torch.dtype) -> Scope:
        """Scope of a call whose first layer receives states of this dtype."""
        dtype, device = str(entering), call.inputs.arguments["input_ids"].device.type
        if torch.is_autocast_enabled(device):
            dtype += f" autocast {torch.get_autocast_dtype(device)}"
        return Scope(call.inputs.namespace, self._components.weights.digest(), dtype, self._components.trunk.attention)

    def read(self, call: Call, scope: Scope, hidden: Tensor | None, entering: torch.dtype) -> Read:
        """Everything that needs the host, in one transfer.

        Args:
            call: It was not read yet.
            scope: Its scope.
            hidden: States that enter layer 0 (B, T, D); None where the fingerprint does without.
            entering: Their dtype.
        """
        ids, mask = call.inputs.arguments["input_ids"], call.inputs.arguments.get("attention_mask")
        fingerprint, features, shown = self._components.fingerprint, None, None
        on_host, on_device = self._content_tables(ids.device, scope.weights)
        if fingerprint is not None and fingerprint.reads_states:
            shown = on_device[ids] if mask is None else on_device[ids] & (mask != 0)
            features = fingerprint.features(View(hidden, shown, ids, call.progress.attention))
        types, positions = call.inputs.arguments.get("token_type_ids"), call.inputs.arguments.get("position_ids")
        is_causal = None
        if (given := call.inputs.mask_4d) is not None and mask is not None:
            is_causal = (given == expand(mask != 0, given.shape[-1])).all(dim=-1).all(dim=-1).flatten()
        order = call.inputs.arguments.get("cache_position")
        if mask is not None and mask.is_floating_point() and mask.dtype.itemsize < 4:
            mask = mask.float()  # NumPy knows no bfloat16
        inputs = HostInputs(*to_host(ids, mask, types, positions, is_causal, features, order))
        inputs.activated = self._components.weights.activated
        _read_mask(inputs)
        if _has_negative(inputs.ids):  # which would be taken for one of the last tokens
            raise IndexError(f"token ids must be at least 0, got {inputs.ids.min()}")
        content = on_host[inputs.ids]
        if not (inputs.valid is None or inputs.is_full):
            content &= inputs.valid
        if fingerprint is not None and not fingerprint.reads_states:
            view = View(None, torch.from_numpy(content), torch.from_numpy(inputs.ids))
            inputs.features = fingerprint.features(view).numpy()
        is_whole = bool(self._components.coupling.reason(scope.weights))
        rows = read_rows(
            scope,
            inputs,
            id_dtype(len(on_host)),
            self._components.trunk.adapter.is_guess,
            self._layout_counts,
            self._layout_is_kept,
            is_whole=is_whole,
        )
        has_content = content.any(axis=1).tolist()
        reason = self._refusal_of_all(inputs)
        for row in rows:
            row.bypass_reason = reason or self._refusal(row, inputs, has_content[row.number])
        if fingerprint is not None and self._may_be_refused(inputs):
            for row in rows:
                row.is_misread = True
        components, make = self._components, None
        epoch, mark = components.banks.fingerprint_epoch, components.weights.mark_of(scope.weights)
        if fingerprint is not None and fingerprint.n_fit == 0 and self._can_search(scope.weights):
            layers = (0,) if components.is_per_layer else components.banks.layers
            make = partial(_project, fingerprint, inputs.features, layers, rows)
        features = None if components.is_per_layer else inputs.features
        return Read(rows, scope, entering, mark, shown, features, epoch, make, is_whole=is_whole)

    def _can_search(self, weights: str) -> bool:
        """Whether the fingerprint is one for these weights: it keeps vectors of tokens that it meets first."""
        calibrated = self._components.calibrated
        return calibrated is None or (calibrated.calibration is not None and calibrated.calibration.weights == weights)

    def read_layer(self, call: Call, layer: int, hidden: Tensor) -> None:
        """Fingerprints of the states (B, T, D) that enter a later layer, in a transfer of their own."""
        fingerprint = self._components.fingerprint
        assert fingerprint is not None and call.read.content is not None
        (features,) = to_host(fingerprint.features(View(hidden, call.read.content, call.inputs.arguments["input_ids"])))
        assert features is not None
        call.read.fingerprints[layer] = fingerprint.project(features)

    def _refusal_of_all(self, inputs: HostInputs) -> str:
        """Why no row takes part: tokens are not put one after the other, or positions not encoded as in other calls."""
        n_tokens = inputs.ids.shape[1]
        if inputs.activated is not None and len(inputs.activated) != len(inputs.ids):
            return "adapter_names"
        if inputs.order is not None and not np.array_equal(inputs.order, np.arange(n_tokens)):
            return "unknown_argument"
        if self._steady_length is None:
            return ""
        length = n_tokens if inputs.positions is None else int(inputs.positions.max(initial=-1)) + 1
        return "" if length < self._steady_length else "rope_by_length"

    def _may_be_refused(self, inputs: HostInputs) -> bool:
        """Whether positions or token types of a call may be beyond the model's tables, which then raises."""
        config = self._components.trunk.config
        n_positions, n_types = setting(config, "max_position_embeddings"), setting(config, "type_vocab_size")
        n_tokens = inputs.ids.shape[1] + self._first_position
        return _reaches(inputs.types, n_types) or (
            n_positions is not None and n_tokens > n_positions
            if inputs.positions is None
            else _reaches(inputs.positions, n_positions)
        )

    def _refusal(self, row: Row, inputs: HostInputs, has_content: bool) -> str:
        if inputs.is_causal is not None and not inputs.is_causal[row.number]:
            return "mask_4d"
        if inputs.is_binary is not None and not inputs.is_binary[row.number]:
            return "mask_values"
        if inputs.valid is None and inputs.positions is not None and row.start is None:
            return "packed"  # several texts in one row, say transformers, unless K/V is kept or a mask given
        if not has_content:
            return "no_content"
        if inputs.features is not None and not np.isfinite(inputs.features[row.number]).all():
            return "not_finite"  # no index takes such a vector, nor the other rows searched with it
        pad_id = setting(self._components.trunk.config, "pad_token_id")
        row.is_misread = head_reads_padding(self._head_reads, row.valid, inputs.ids[row.number], pad_id)
        row.is_misread |= self._reads_padding and row.n_valid < len(inputs.ids[row.number])
        return "head_reads_padding" if row.is_misread and not self._layout_counts else ""

    def _content_tables(self, device: torch.device, weights: str) -> tuple[Bools, Tensor]:
        """Whether a token carries content, bool (vocabulary,), on the host and on a device.

        Made anew when the weights, and so maybe the vocabulary, changed.
        """
        if self._tables is None or self._tables[0] != (device, weights):
            with torch.inference_mode(False):
                table = torch.ones(vocabulary_size(self._components.trunk), dtype=torch.bool, device="cpu")
                table[list(special_ids(self._components.trunk, self._tokenizer))] = False
                self._tables = ((device, weights), (table.numpy(), table.to(device)))
        return self._tables[1]


def _project(
    fingerprint: Fingerprint, features: Floats, layers: Sequence[int], rows: Sequence[Row]
) -> tuple[dict[int, Floats], Floats | None]:
    """See `Read.make`."""
    vectors, forecasts = fingerprint.project_with_forecast(features)
    if not isfinite(vectors.sum()):  # for the reason in `_refusal`
        for number in np.flatnonzero(~np.isfinite(vectors).all(axis=-1)).tolist():
            rows[number].bypass_reason = rows[number].bypass_reason or "not_finite"
    return dict.fromkeys(layers, vectors), forecasts


def _reaches(values: NDArray[Any] | None, n: int | None) -> bool:
    """Whether a value is below 0, or n or more; None: there are none, or n is not known."""
    return values is not None and n is not None and bool(values.view(f"u{values.itemsize}").max(initial=0) >= n)


def _has_negative(ids: NDArray[np.int64]) -> bool:
    """Whether an id is below 0, by the sign bits alone: they are in the last byte of each, or in the first."""
    return not ids.astype(np.int64, copy=False).tobytes()[_SIGN::8].isascii()


def _read_mask(inputs: HostInputs) -> None:
    """Which tokens a mask lets pass, of what was read of it; some models multiply by it, so its values count, too."""
    mask = inputs.valid
    if mask is None or mask.dtype == np.bool_:
        return
    # Mostly nothing is padded. Bytes take a microsecond to compare; after a model, each function of NumPy's takes ten.
    inputs.is_full = mask.dtype == np.int64 and mask.tobytes() == _ONE * mask.size
    if inputs.is_full:
        return
    inputs.valid = mask.astype(np.bool_)
    if not np.array_equal(mask, inputs.valid):
        inputs.is_binary = (mask == inputs.valid).all(axis=1)


def _reads(parts: Components) -> str:
    """Which row a head may read by its place, whatever the mask says: `first`, `last`, or none of these.

    Where every row is kept a repeat is served at every place. What is reused of another request is not, and a head that
    is not known may read either end.
    """
    head, payload = parts.head, parts.payload
    if head.payload == "cls" or payload.name == "cls" or getattr(parts.trunk.module, "pooler", None) is not None:
        return "first"
    if head.name == "classifier" and head.payload == "last":
        return "last"
    if payload.fits_any_length or head.reads == "tokens":
        return ""
    return "last" if parts.trunk.adapter.is_causal else "first"
