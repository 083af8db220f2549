"""Copies a call's tokens to the host and builds one `Row` per request: exact key, valid positions, bypass reason.

Sizes: B rows, T tokens of a row (padding included), n valid tokens of a row.
"""

import base64
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcache.models.adapters import Trunk, first_position, special_ids, vocabulary_size
from llmcache.models.causal import Causal
from llmcache.models.heads import Head
from llmcache.models.masks import expand
from llmcache.models.model_config import setting
from llmcache.models.packing import Payload, head_reads_padding
from llmcache.models.rope import steady_length
from llmcache.request.rows import KEY_LENGTH, Row, Scope, id_dtype, key_of
from llmcache.support.arrays import Bools, Positions

_ONE = np.int64(1).tobytes()
_ZERO = b"\0"  # stripped from an array's bytes it leaves some if a value is not 0; cold, `any` takes ten times as long
_SIGN = 7 if sys.byteorder == "little" else 0  # the byte of an int64 that holds the sign


@dataclass(slots=True)
class HostInputs:
    """A call's arguments on the host, as NumPy arrays; None: not passed."""

    ids: Any  # token ids (B, T), int64
    valid: Any  # mask of valid tokens, bool (B, T); if `is_full`, as it was passed, of any dtype
    types: Any  # token type ids (B, T) or (1, T)
    positions: Any  # position ids (B, T) or (1, T)
    is_causal: Any  # whether each row's 4-D mask is the causal one of its valid tokens, bool (B,)
    order: Any  # positions of the tokens in the K/V cache (T,)
    is_binary: Any = None  # whether each row's mask holds only 0 and 1, bool (B,); None: all do
    is_full: Any = False  # every token is valid
    activated: Any = None  # number of last columns that an activated LoRA applies to, per row (None: none)


def to_host(*tensors: Tensor | None) -> list[NDArray[Any] | None]:
    """Copy tensors of one device to the host in one synchronisation; arrays share the memory of tensors on the CPU."""
    first = tensors[0]
    if first is not None and first.is_cuda:
        tensors = tuple(None if one is None else one.to("cpu", non_blocking=True) for one in tensors)
        torch.cuda.current_stream(first.device).synchronize()
    return [None if one is None else one.numpy() if one.is_cpu else one.cpu().numpy() for one in tensors]


class Tables(NamedTuple):
    """The sizes of a model's embedding tables, and which tokens carry content."""

    content: bytes  # 1 for each token of the vocabulary that carries content, else 0
    n_positions: int | None  # None: unknown
    n_types: int | None


@dataclass(slots=True)
class Requests:
    """The requests of one call."""

    rows: Sequence[Row]
    ids: NDArray[np.int64]  # (B, T)
    valid: Bools | None  # mask of valid tokens (B, T); None: all are
    tables: Tables
    first_position: int  # position id of the first token if none are passed
    inputs: HostInputs
    _may_be_refused: bool | None = None

    def may_be_refused(self) -> bool:
        """Whether the model may raise for positions or token types beyond its tables."""
        if self._may_be_refused is not None:  # asked for by engine, sources and draft
            return self._may_be_refused
        types, positions = self.inputs.types, self.inputs.positions
        n_types, n_positions = self.tables.n_types, self.tables.n_positions
        if types is not None and (types.tobytes().strip(_ZERO) or not n_types) and _reaches(types, n_types):
            is_beyond = True
        elif positions is not None:
            is_beyond = _reaches(positions, n_positions)
        else:
            is_beyond = n_positions is not None and self.ids.shape[1] + self.first_position > n_positions
        self._may_be_refused = is_beyond
        return is_beyond

    def are_usual(self) -> bool:
        """Whether positions and types, if passed, follow from the tokens, in every row.

        Positions count up from `first_position`; types count up from 0 and change only beside a special token.
        """
        types = self.inputs.types
        if self.inputs.positions is not None and any(row.start != self.first_position for row in self.rows):
            return False
        if types is None or not types.tobytes().strip(_ZERO):
            return True
        is_content = self.content()
        for row in self.rows:
            own = _row(types, row.number)[row.valid].astype(np.int64)
            is_within = is_content[row.number][row.valid]
            steps = np.diff(own, prepend=0)
            if (steps < 0).any() or (steps[:1] > 0).any() or (steps[1:] > 0)[is_within[1:] & is_within[:-1]].any():
                return False
        return True

    def take(self, numbers: Sequence[int]) -> "Requests":
        """Return the requests with these numbers, renumbered from 0."""
        places: dict[int | None, int] = {number: place for place, number in enumerate(numbers)}
        taken = [self.rows[number] for number in numbers]
        rows = [replace(row, number=place, same_as=places.get(row.same_as)) for place, row in enumerate(taken)]
        valid = None if self.valid is None else self.valid[numbers]
        return Requests(rows, self.ids[numbers], valid, self.tables, self.first_position, self.inputs)

    def content(self) -> Bools:
        """Return the mask of content tokens, which are valid and not special, bool (B, T)."""
        is_content: Bools = np.frombuffer(self.tables.content, np.bool_)[self.ids]
        return is_content if self.valid is None else is_content & self.valid

    def tokens(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the content tokens of each row."""
        tokens = []
        for row in rows:  # requests are short: arrays would take longer
            ids = self.ids[row.number]
            own = (ids if self.valid is None else ids[self.valid[row.number]]).tolist()
            tokens.append(list(compress(own, map(self.tables.content.__getitem__, own))))
        return tokens


class RequestReader:
    """Reads calls of one trunk. Thread-safe."""

    def __init__(self, trunk: Trunk, head: Head, payload: Payload, tokenizer: Any = None) -> None:
        """Derive from a model and its payload how rows are keyed; `tokenizer` names the special tokens, if given."""
        self._trunk, self._tokenizer, self._is_guess = trunk, tokenizer, trunk.adapter.is_guess
        self._head_reads = _reads(trunk, head, payload)
        self._observed = observed = head.observed
        reads_padding = head.is_own if observed is None else observed.reads_padding
        self._reads_padding = reads_padding and payload.name == "sequence"
        keeps_tokens, heeds_mask = not payload.fits_any_length, head.pooled is not None
        #: Padding is part of the key: readers of the states may read those of padding.
        self.reads_padding = keeps_tokens and not heeds_mask
        #: Padding is not part of the key; its states are returned only to a row with the same padding.
        self.keeps_padding = keeps_tokens and heeds_mask
        self._steady_length = steady_length(trunk.module)
        self._first_position = first_position(trunk.module)
        #: Rows without padding, positions or other unusual arguments are cached if they have content.
        self._is_plain = self._steady_length is None and self._head_reads != "last"

    def read(
        self,
        arguments: Mapping[str, Any],
        mask_4d: Tensor | None,
        scope: Scope,
        tables: Tables,
        activated: Sequence[int | None] | None,
        causal: Causal,
        is_coupled: bool,
        keeps_kv: bool,
    ) -> Requests:
        """Return the requests of a call, with the bypass reason of each row; raise `IndexError` for an id below 0.

        Without `keeps_kv`, the place of a row's tokens is not part of its key where states do not depend on it.
        `arguments` are the trunk's, by name, checked by `CallSignatures.find`; they hold the 2-D mask that `mask_4d` is
        equal to. `activated`: see `HostInputs`. `causal`: what the trunk allows. If rows affect each other, each key
        covers the whole call.
        """
        ids, mask = arguments["input_ids"], arguments.get("attention_mask")
        if mask is not None and mask.is_floating_point() and mask.dtype.itemsize < 4:
            mask = mask.float()  # NumPy has no bfloat16
        is_causal = None
        if mask_4d is not None and mask is not None:
            is_causal = (mask_4d == expand(mask != 0, mask_4d.shape[-1])).all(dim=-1).all(dim=-1).flatten()
        types, positions = arguments.get("token_type_ids"), arguments.get("position_ids")
        inputs = HostInputs(*to_host(ids, mask, types, positions, is_causal, arguments.get("cache_position")))
        inputs.activated = activated
        mask = inputs.valid
        if mask is not None and mask.dtype != np.bool_:
            # Most calls have no padding. Comparing bytes takes 1 us; NumPy's functions, cold after a forward, take 10.
            inputs.is_full = mask.dtype == np.int64 and mask.tobytes() == _ONE * mask.size
            if not inputs.is_full:
                inputs.valid = mask.astype(np.bool_)
                if not np.array_equal(mask, inputs.valid):  # some models multiply by the mask
                    inputs.is_binary = (mask == inputs.valid).all(axis=1)
        is_full = inputs.is_full or inputs.valid is None
        dtype, knows_no_padding = id_dtype(len(tables.content)), self._is_guess and not causal.knows_padding
        of_padding = knows_no_padding, self.reads_padding, self.keeps_padding
        is_by_column = causal.is_by_column or mask_4d is not None  # no positions follow from a 4-D mask
        is_movable = bool(causal.rotates) and not (causal.counts_padding or keeps_kv)
        of_positions = self._head_reads == "first", is_by_column, is_movable
        rows = read_rows(scope, inputs, dtype, *of_padding, is_coupled, *of_positions)
        valid = None if is_full else inputs.valid
        requests = Requests(rows, inputs.ids, valid, tables, self._first_position, inputs)
        if is_full:  # usually the second token ends the search; NumPy is slow when cold after a forward
            has_content = [any(map(tables.content.__getitem__, row)) for row in inputs.ids.tolist()]
        else:
            has_content = np.any(requests.content(), axis=1).tolist()
        is_usual = positions is None and inputs.order is None and activated is None
        if not (is_usual and is_full and self._is_plain and all(has_content)):
            reason = self._refusal_of_all(inputs)
            pad_ids = self._pad_ids() if self._head_reads == "last" else ()
            for row, has_any in zip(rows, has_content, strict=True):
                row.bypass_reason = reason or self._refusal(row, inputs, has_any, pad_ids)
        return requests

    def _pad_ids(self) -> set[int | None]:
        configs = (self._trunk.config,) if self._observed is None else self._observed.configs
        return {setting(one, "pad_token_id") for one in configs}

    def _refusal_of_all(self, inputs: HostInputs) -> str:
        """Return the bypass reason of all rows, or "": wrong number of LoRA offsets, token order, RoPE by length."""
        n_tokens = inputs.ids.shape[1]
        if inputs.activated is not None and len(inputs.activated) != len(inputs.ids):
            return "adapter_names"
        if inputs.order is not None and not np.array_equal(inputs.order, np.arange(n_tokens)):
            return "unknown_argument"
        if self._steady_length is None:
            return ""
        length = n_tokens if inputs.positions is None else int(inputs.positions.max(initial=-1)) + 1
        return "" if length < self._steady_length else "rope_by_length"

    def _refusal(self, row: Row, inputs: HostInputs, has_content: bool, pad_ids: Iterable[int | None]) -> str:
        """Return the bypass reason of a row, or "", and set `row.is_misread`."""
        if inputs.is_causal is not None and not inputs.is_causal[row.number]:
            return "mask_4d"
        if inputs.is_binary is not None and not inputs.is_binary[row.number]:
            return "mask_values"
        if inputs.valid is None and inputs.positions is not None and row.start is None:
            return "packed"  # without a mask, transformers takes the row for several texts
        if not has_content:
            return "no_content"
        row.is_misread = head_reads_padding(self._head_reads, row.valid, inputs.ids[row.number], *pad_ids)
        row.is_misread |= self._reads_padding and row.n_valid < len(inputs.ids[row.number])
        return "head_reads_padding" if row.is_misread and not (self.reads_padding or row.has_layout) else ""

    def tables(self) -> Tables:
        """Return the tables of the model's present config and embeddings."""
        content, config = np.ones(vocabulary_size(self._trunk), np.bool_), self._trunk.config
        content[list(special_ids(self._trunk, self._tokenizer))] = False
        n_positions, n_types = setting(config, "max_position_embeddings"), setting(config, "type_vocab_size")
        return Tables(content.tobytes(), n_positions, n_types)


def _reads(trunk: Trunk, head: Head, payload: Payload) -> str:
    """Return the column that a head may read whatever the mask: `first`, `last` or ""."""
    if head.payload == "cls" or payload.name == "cls" or getattr(trunk.module, "pooler", None) is not None:
        return "first"
    if head.name == "classifier" and head.payload == "last":
        return "last"
    if payload.fits_any_length or head.reads == "tokens":
        return ""
    if head.pooled is not None:  # a pooling that heeds the mask, but of the first column in old versions
        return "first" if head.pooled.reads_first else ""
    return "last" if trunk.adapter.is_causal else "first"


def _reaches(values: NDArray[Any], n: int | None) -> bool:
    """Whether a value is below 0 or at least `n`; False if `n` is unknown (None)."""
    return n is not None and bool(values.view(f"u{values.itemsize}").max(initial=0) >= n)


def read_rows(
    scope: Scope,
    inputs: HostInputs,
    dtype: np.dtype[Any],
    knows_no_padding: bool = False,
    reads_padding: bool = False,
    keeps_padding: bool = False,
    is_coupled: bool = False,
    reads_first: bool = False,
    is_by_column: bool = True,
    is_movable: bool = False,
) -> list[Row]:
    """Return each row with its valid tokens, packed as `dtype`, and its exact key.

    The key covers all that the output at valid tokens depends on. If position ids are passed, it does not depend on
    padding. Otherwise a model may derive positions from the padding before a valid token, so the key covers that too,
    unless a trial has shown that it does not.

    Args:
        knows_no_padding: How the model treats padding is unknown: all tokens are valid, and the key covers the mask.
        reads_padding: The head may read states of padding: the key of a padded row covers all that they depend on.
        keeps_padding: The head does not read states of padding, but they are returned: the entry keeps them, and a
            digest of all that they depend on, beside the key.
        is_coupled: Rows affect each other: each key covers all rows, and the row's place among them.
        reads_first: The head may read the first column: with `keeps_padding`, the key covers it if it is padding.
        is_by_column: Positions, if none are passed, may be columns; else they count from the first valid token.
        is_movable: States depend on the distances between tokens alone: the key covers no other positions.
    """
    prefix = _sha_of(scope)
    if is_coupled:
        prefix = prefix.copy()
        for number, mask in enumerate([None] * len(inputs.ids) if inputs.valid is None else inputs.valid):
            _update_layout(prefix, inputs, number, mask)
    ids, types, positions = np.asarray(inputs.ids, np.int64), inputs.types, inputs.positions
    types = None if types is None else np.asarray(types, np.int64)
    # Most rows are full and are sliced from the bytes of all rows: NumPy is slow when cold after a forward.
    of_ids, of_short, of_types = ids.tobytes(), ids.astype(dtype).tobytes(), b"" if types is None else types.tobytes()
    if not of_ids[_SIGN::8].isascii():  # a sign byte of 0x80 or more: a negative id
        raise IndexError(f"token ids must be at least 0, got {ids.min()}")  # it would index from the end
    n_tokens = ids.shape[1]
    width, short_width = 8 * n_tokens, dtype.itemsize * n_tokens
    rows: list[Row] = []
    seen: dict[str, list[Row]] = {}
    for number in range(len(ids)):
        mask = None if inputs.valid is None else inputs.valid[number]
        valid: Positions = slice(0, n_tokens)
        n_valid, start = n_tokens, 0 if n_tokens else None
        type_row = 0 if types is None or len(types) == 1 else number
        if mask is None or knows_no_padding or inputs.is_full or mask.all():
            own_ids = of_ids[number * width : (number + 1) * width]
            own_types = of_types[type_row * width : (type_row + 1) * width]
            own_short = of_short[number * short_width : (number + 1) * short_width]
        else:
            valid, n_valid = _valid_positions(mask)
            own_ids, own_short = ids[number, valid].tobytes(), ids[number, valid].astype(dtype).tobytes()
            own_types = b"" if types is None else types[type_row, valid].tobytes()
            start = valid.start * is_by_column if isinstance(valid, slice) and n_valid else None
        sha = prefix.copy()
        if is_coupled:
            _update(sha, b"place", [number])
        type_field = b"types:none;" if types is None else b"types:%d;%b" % (len(own_types), own_types)
        sha.update(b"ids:%d;%b%b" % (len(own_ids), own_ids, type_field))
        if positions is not None:
            own = _row(positions, number)[valid]
            is_steady = start is not None and bool((np.diff(own) == 1).all())
            if not (is_movable and is_steady):
                _update(sha, b"positions", own)
            start = int(own[0]) if is_steady and n_valid else None
        if knows_no_padding:
            _update(sha, b"mask", mask)
        elif positions is None and n_valid and start != 0 and not (is_movable and isinstance(valid, slice)):
            end = valid.stop if isinstance(valid, slice) else int(valid[-1]) + 1
            _update(sha, b"before", ids[number, :end])
            _update(sha, b"where", np.arange(end)[valid])
        elif not isinstance(valid, slice):
            _update(sha, b"gaps", valid - valid[0])
        activated_at = None
        if inputs.activated is not None:
            activated_at = _activated_at(inputs.activated, number, valid, n_tokens)
            _update(sha, b"activated", None if activated_at is None else [activated_at])
        starts_late = reads_first and keeps_padding and not (mask is None or mask[0])
        has_layout, layout = (reads_padding or starts_late) and n_valid < n_tokens, b""
        if has_layout:
            _update_layout(sha, inputs, number, mask)
        elif keeps_padding and n_valid < n_tokens:
            whole = sha.copy()
            _update_layout(whole, inputs, number, mask)
            layout = whole.digest()
        key = base64.urlsafe_b64encode(sha.digest())[:KEY_LENGTH].decode()  # as `key_of`
        row = Row(number, key, own_short, valid, n_valid, start, "", has_layout, layout, activated_at=activated_at)
        if alike := seen.setdefault(key, []):
            _update(sha, b"again", [len(alike)])
            row.duplicate_key = key_of(sha.digest())
            first = alike[0].number
            if layout == alike[0].layout and (mask is None or np.array_equal(mask, inputs.valid[first])):
                row.same_as = first
        alike.append(row)
        rows.append(row)
    return rows


def _update_layout(sha: Any, inputs: HostInputs, number: int, mask: NDArray[Any] | None) -> None:
    """Hash the whole row, padding and mask included."""
    _update(sha, b"row", inputs.ids[number])
    _update(sha, b"row types", None if inputs.types is None else _row(inputs.types, number))
    _update(sha, b"row positions", None if inputs.positions is None else _row(inputs.positions, number))
    _update(sha, b"row mask", mask)
    sha.update(b"2-D;" if inputs.is_causal is None else b"4-D;")


@lru_cache(maxsize=64)
def _sha_of(scope: Scope) -> Any:
    """Return a SHA-256 of the scope, to be copied, never updated."""
    return hashlib.sha256(scope.key)


def _valid_positions(mask: NDArray[Any]) -> tuple[Positions, int]:
    """Return the columns of valid tokens, as a slice if contiguous, and their number."""
    where = np.flatnonzero(mask)
    if len(where) == 0:
        return slice(0, 0), 0
    start, stop = int(where[0]), int(where[-1]) + 1
    return (slice(start, stop) if stop - start == len(where) else where), len(where)


def _activated_at(offsets: Sequence[int | None], number: int, valid: Positions, length: int) -> int | None:
    """Return the first valid token of a row that an activated LoRA applies to; None if there is none."""
    n_columns = offsets[number] if number < len(offsets) else None
    if not n_columns:
        return None
    return length - min(n_columns, length) - (valid.start if isinstance(valid, slice) else 0)


def _row(values: NDArray[Any], number: int) -> Any:
    """Return a row (T,) of values (B, T), or of (1, T) that all rows share."""
    return values[number if len(values) > 1 else 0]


def _update(sha: Any, name: bytes, values: NDArray[Any] | Sequence[int] | None) -> None:
    """Hash one field, prefixed by name and length, so that different sets of fields never hash the same bytes."""
    if values is None:
        sha.update(b"%s:none;" % name)
        return
    packed = np.asarray(values, np.int64).tobytes()
    sha.update(b"%s:%d;" % (name, len(packed)))
    sha.update(packed)
