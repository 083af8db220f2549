"""Copies a call's tokens to the host and builds one `Row` a request: exact key, valid positions, reason for a bypass.

Sizes: B rows, T tokens of a row (padding included).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from llmcache.arrays import Bools, Floats
from llmcache.models.adapters import Trunk, first_position, special_ids, vocabulary_size
from llmcache.models.heads import Head
from llmcache.models.masks import expand
from llmcache.models.model_config import setting
from llmcache.models.payloads import Payload, head_reads_padding
from llmcache.models.rope import steady_length
from llmcache.request.rows import HostInputs, Row, Scope, id_dtype, read_rows, to_host

_ONE = np.int64(1).tobytes()
_SIGN = 7 if sys.byteorder == "little" else 0  # of an int64, the byte that holds the sign


@dataclass(slots=True)
class Requests:
    """The requests of one call.

    Attributes:
        rows: One a request.
        ids: Token ids (B, T), int64, on the host.
        content: Which tokens are valid and not special, bool (B, T).
        reader: The reader that made them.
        inputs: The call's arguments on the host.
    """

    rows: Sequence[Row]
    ids: NDArray[np.int64]
    content: Bools
    reader: "RequestReader"
    inputs: HostInputs

    @property
    def may_be_refused(self) -> bool:
        """Whether the model may raise for positions or token types beyond its tables."""
        return self.reader.may_be_refused(self.inputs)

    def take(self, numbers: Sequence[int]) -> "Requests":
        """Return some of the requests, numbered from 0 as in a call of their own."""
        rows = [replace(self.rows[number], number=place) for place, number in enumerate(numbers)]
        return Requests(rows, self.ids[numbers], self.content[numbers], self.reader, self.inputs)

    def features(self, numbers: int | Sequence[int]) -> Floats:
        """Content tokens of one row, float32 (T,), or of several (B, T); -1 elsewhere."""
        return np.where(self.content[numbers], self.ids[numbers], -1).astype(np.float32)


class RequestReader:
    """Reads calls of one trunk. Thread-safe."""

    def __init__(self, trunk: Trunk, head: Head, payload: Payload, tokenizer: Any = None) -> None:
        """Remember what decides how rows are keyed.

        Args:
            trunk: The model's trunk.
            head: Its head.
            payload: The hidden states that entries keep.
            tokenizer: Names the special tokens; None: those that the config and the family name.
        """
        self._trunk = trunk
        self._tokenizer = tokenizer
        self._head_reads = _reads(trunk, head, payload)
        observed = head.observed
        self._reads_padding = observed is not None and observed.reads_padding and payload.name == "sequence"
        keeps_tokens, heeds_mask = not payload.fits_any_length, head.pooled is not None
        #: Padding is part of the key: everything that reads states may read its, too.
        self.layout_counts = keeps_tokens and not heeds_mask
        #: It is not, but states of padding are given back where it is alike.
        self.layout_is_kept = keeps_tokens and heeds_mask
        self._steady_length = steady_length(trunk.module)
        self._first_position = first_position(trunk.module)
        #: Rows without padding, positions or anything unusual take part if they have content.
        self._is_plain = self._steady_length is None and self._head_reads != "last"

    def read(
        self,
        arguments: Mapping[str, Any],
        mask_4d: Tensor | None,
        scope: Scope,
        content: Bools,
        activated: Sequence[int | None] | None,
        is_whole: bool,
    ) -> Requests:
        """Read a call.

        Args:
            arguments: Of the trunk, by name; checked by `find_reason`.
            mask_4d: The 4-D mask that was passed, of which `arguments` holds the 2-D one; None without.
            scope: Of the call.
            content: See `content_table`.
            activated: For how many of each row's last columns an activated LoRA is in force; None without one.
            is_whole: Rows affect each other, so that the key of each covers the call.

        Raises:
            IndexError: A token id is below 0.
        """
        ids, mask = arguments["input_ids"], arguments.get("attention_mask")
        if mask is not None and mask.is_floating_point() and mask.dtype.itemsize < 4:
            mask = mask.float()  # NumPy knows no bfloat16
        is_causal = None
        if mask_4d is not None and mask is not None:
            is_causal = (mask_4d == expand(mask != 0, mask_4d.shape[-1])).all(dim=-1).all(dim=-1).flatten()
        types, positions = arguments.get("token_type_ids"), arguments.get("position_ids")
        inputs = HostInputs(*to_host(ids, mask, types, positions, is_causal, arguments.get("cache_position")))
        inputs.activated = activated
        _read_mask(inputs)
        # Its sign is in one byte of each, so that no function of NumPy's is needed, which takes long after a model.
        if not inputs.ids.astype(np.int64, copy=False).tobytes()[_SIGN::8].isascii():
            raise IndexError(f"token ids must be at least 0, got {inputs.ids.min()}")  # else taken for one of the last
        is_content = content[inputs.ids]
        is_full = inputs.is_full or inputs.valid is None
        if not is_full:
            is_content &= inputs.valid
        rows = read_rows(
            scope,
            inputs,
            id_dtype(len(content)),
            self._trunk.adapter.is_guess,
            self.layout_counts,
            self.layout_is_kept,
            is_whole=is_whole,
        )
        has_content = is_content.any(axis=1).tolist()
        is_usual = positions is None and inputs.order is None and activated is None
        if not (is_usual and is_full and self._is_plain and all(has_content)):
            reason = self._refusal_of_all(inputs)
            for row, has_any in zip(rows, has_content, strict=True):
                row.bypass_reason = reason or self._refusal(row, inputs, has_any)
        return Requests(rows, inputs.ids, is_content, self, inputs)

    def _refusal_of_all(self, inputs: HostInputs) -> str:
        """Return the reason why no row takes part, or "": tokens in another order, or positions that vary by length."""
        n_tokens = inputs.ids.shape[1]
        if inputs.activated is not None and len(inputs.activated) != len(inputs.ids):
            return "adapter_names"
        if inputs.order is not None and not np.array_equal(inputs.order, np.arange(n_tokens)):
            return "unknown_argument"
        if self._steady_length is None:
            return ""
        length = n_tokens if inputs.positions is None else int(inputs.positions.max(initial=-1)) + 1
        return "" if length < self._steady_length else "rope_by_length"

    def _refusal(self, row: Row, inputs: HostInputs, has_content: bool) -> str:
        """Return the reason why a row takes no part, or ""."""
        if inputs.is_causal is not None and not inputs.is_causal[row.number]:
            return "mask_4d"
        if inputs.is_binary is not None and not inputs.is_binary[row.number]:
            return "mask_values"
        if inputs.valid is None and inputs.positions is not None and row.start is None:
            return "packed"  # several texts in one row, say transformers, unless a mask is given
        if not has_content:
            return "no_content"
        pad_id = setting(self._trunk.config, "pad_token_id")
        row.is_misread = head_reads_padding(self._head_reads, row.valid, inputs.ids[row.number], pad_id)
        row.is_misread |= self._reads_padding and row.n_valid < len(inputs.ids[row.number])
        return "head_reads_padding" if row.is_misread and not self.layout_counts else ""

    def may_be_refused(self, inputs: HostInputs) -> bool:
        """See `Requests.may_be_refused`."""
        config = self._trunk.config
        n_positions, n_types = setting(config, "max_position_embeddings"), setting(config, "type_vocab_size")
        n_tokens = inputs.ids.shape[1] + self._first_position
        return _reaches(inputs.types, n_types) or (
            n_positions is not None and n_tokens > n_positions
            if inputs.positions is None
            else _reaches(inputs.positions, n_positions)
        )

    def content_table(self) -> Bools:
        """Whether a token carries content, bool (vocabulary,), as the model is now."""
        table = np.ones(vocabulary_size(self._trunk), np.bool_)
        table[list(special_ids(self._trunk, self._tokenizer))] = False
        return table


def _reads(trunk: Trunk, head: Head, payload: Payload) -> str:
    """Return the token that a head may read by its place, whatever the mask: `first`, `last` or ""."""
    if head.payload == "cls" or payload.name == "cls" or getattr(trunk.module, "pooler", None) is not None:
        return "first"
    if head.name == "classifier" and head.payload == "last":
        return "last"
    if payload.fits_any_length or head.reads == "tokens":
        return ""
    return "last" if trunk.adapter.is_causal else "first"


def _reaches(values: NDArray[Any] | None, n: int | None) -> bool:
    """Whether a value is below 0, or at least `n`. None: no values, or `n` is not known."""
    return values is not None and n is not None and bool(values.view(f"u{values.itemsize}").max(initial=0) >= n)


def _read_mask(inputs: HostInputs) -> None:
    """Set the valid tokens from the mask. Some models multiply by it, so its values are checked as well."""
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
