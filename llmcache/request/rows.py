"""The requests of a call as they are read on the host: the valid tokens of each, and its exact key.

Sizes: B rows, T tokens a row (padding included), n valid tokens of a row.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcache.arrays import Positions
from llmcache.errors import ConfigError

KEY_LENGTH = 43  # characters of a SHA-256 in base64
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything but the tokens that decides a state. States are found only within their own scope.

    Attributes:
        namespace: The caller's partition (tenant). No search crosses it.
        weights: Digest of the trunk's weights and active adapters.
        dtype: Dtype of the hidden states, autocast included.
        attention: Attention implementation; kernels differ in the last bits.
        engine: Name of the engine that computes, "" for the trunk itself; kernels differ likewise.
    """

    namespace: str
    weights: str
    dtype: str
    attention: str
    engine: str = ""

    @property
    def key(self) -> bytes:
        """Unambiguous bytes to hash: the characters of each field, quoted and escaped.

        `str.__repr__`, not `repr`: a subclass of `str` may have one of its own. Saved caches depend on these bytes.
        """
        engine = (self.engine,) if self.engine else ()
        fields = (self.namespace, self.weights, self.dtype, self.attention, *engine)
        return f"({', '.join(map(str.__repr__, fields))})".encode()


def checked_namespace(name: Any) -> str:
    """Return a namespace as it was given, after checking it.

    Subclasses of `str` are refused: they may have an equality and a hash of their own, and scopes are compared by both.

    Raises:
        ConfigError: It is no `str`, or of a subclass, or has surrogates, which no file can hold as text.
    """
    if type(name) is not str:
        raise ConfigError(f"namespace: give a plain str, str(name) of another type (got a {type(name).__name__})")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"namespace: {name!r} is no Unicode text: character {error.start} is a surrogate") from error
    return name


@dataclass(slots=True)
class Row:
    """One request of a call.

    Attributes:
        number: Its row in the batch.
        key: SHA-256 (base64) of its scope, valid tokens, types and positions; of the whole call where rows affect each
            other.
        ids: Its valid token ids, packed.
        valid: Columns of the valid tokens.
        n_valid: Number of valid tokens.
        start: Position of the first valid token where those of the others follow one by one; else None.
        bypass_reason: Why the row takes no part in caching, or "".
        has_layout: Its key covers its padding as well, so that an entry holds the states of padding too.
        layout: Digest of its padding, where states of padding are kept and the key does not cover it; else b"".
        is_misread: No other request may serve it: the head may read a place of it that is not valid, and what another
            one left there is not known; or its call may be one that the model refuses.
        again: A key of its own, where an earlier row of the call has the same key; else "". Their outputs may differ in
            the last bits, since kernels round by the place in a batch.
    """

    number: int
    key: str
    ids: bytes
    valid: Positions
    n_valid: int
    start: int | None = None
    bypass_reason: str = ""
    has_layout: bool = False
    layout: bytes = b""
    is_misread: bool = False
    again: str = ""


@dataclass(slots=True)
class HostInputs:
    """A call's arguments on the host.

    Attributes:
        ids: Token ids (B, T), int64.
        valid: Which tokens are valid, bool (B, T), or None without a mask; of one that is all ones the mask itself.
        types: Token type ids (B, T) or (1, T), or None.
        positions: Position ids (B, T) or (1, T), or None.
        is_causal: Whether a row's 4-D mask is that of its valid tokens, bool (B,), or None without such a mask.
        order: Where the K/V of the tokens goes (T,), or None.
        is_binary: Whether the mask holds nothing but 0 and 1, bool (B,), or None where it holds no others.
        is_full: Every token is valid.
        activated: For how many of a row's last columns an activated LoRA is in force (None: for none), or None.
    """

    ids: Any
    valid: Any
    types: Any
    positions: Any
    is_causal: Any
    order: Any
    is_binary: Any = None
    is_full: Any = False
    activated: Any = None


def to_host(*tensors: Tensor | None) -> list[NDArray[Any] | None]:
    """Copy tensors to the host with one synchronisation for all of them.

    Args:
        *tensors: On one device; None stays None.

    Returns:
        NumPy arrays; on CPU they share the tensors' memory.
    """
    made: list[NDArray[Any] | None] = []
    waits_for = next((tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda), None)
    if waits_for is not None:
        tensors = tuple(None if one is None else one.to("cpu", non_blocking=True) for one in tensors)
        torch.cuda.current_stream(waits_for).synchronize()
    for tensor in tensors:
        made.append(None if tensor is None else tensor.cpu().numpy())
    return made


def id_dtype(vocabulary: int) -> np.dtype[Any]:
    """Smallest integer dtype in which token ids are packed."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.int32)


def read_rows(
    scope: Scope,
    inputs: HostInputs,
    dtype: np.dtype[Any],
    padding_counts: bool = False,
    layout_counts: bool = False,
    layout_is_kept: bool = False,
    is_whole: bool = False,
) -> list[Row]:
    """Work out each row's valid tokens and exact key.

    The key covers what the output at valid tokens depends on. With positions given, other padding gives the same key.
    Without them a model may derive positions from the padding that comes before a valid token, so that is covered too.

    Args:
        scope: Scope of the call.
        inputs: The call's inputs, arrays on the host.
        dtype: Of packed ids; see `id_dtype`.
        padding_counts: The model may treat padding as it likes: all tokens are kept, and the mask is part of the key.
        layout_counts: States of padding may be read, too: the key of a padded row covers all that decides them.
        layout_is_kept: They are not read, but given back where they are known: a digest of that is kept beside the key.
        is_whole: Rows affect each other: the key of each covers all rows, and its place among them.
    """
    prefix = _sha_of(scope)
    if is_whole:
        prefix = prefix.copy()
        for number, mask in enumerate([None] * len(inputs.ids) if inputs.valid is None else inputs.valid):
            _update_layout(prefix, inputs, number, mask)
    ids, types, positions = np.asarray(inputs.ids, np.int64), inputs.types, inputs.positions
    types = None if types is None else np.asarray(types, np.int64)
    n_tokens = ids.shape[1]
    everything = slice(0, n_tokens)
    rows: list[Row] = []
    n_seen: dict[str, int] = {}
    for number in range(len(ids)):
        mask, row_ids = None if inputs.valid is None else inputs.valid[number], ids[number]
        valid: Positions = everything
        n_valid, start = n_tokens, 0 if n_tokens else None
        if not (mask is None or padding_counts or inputs.is_full or mask.all()):
            valid, n_valid = _valid_positions(mask)
            row_ids = row_ids[valid]
            start = valid.start if isinstance(valid, slice) and n_valid else None
        sha, packed = prefix.copy(), row_ids.tobytes()
        if is_whole:
            _update(sha, b"place", [number])
        sha.update(b"ids:%d;" % len(packed) + packed)
        if types is None:
            sha.update(b"types:none;")
        else:
            packed = types[number if len(types) > 1 else 0, valid].tobytes()
            sha.update(b"types:%d;" % len(packed) + packed)
        if positions is not None:
            own = positions[number if len(positions) > 1 else 0, valid]
            _update(sha, b"positions", own)
            is_steady = start is not None and bool((np.diff(own) == 1).all())
            start = int(own[0]) if is_steady and n_valid else None
        if padding_counts:
            _update(sha, b"mask", mask)
        elif positions is None and n_valid and start != 0:
            end = valid.stop if isinstance(valid, slice) else int(valid[-1]) + 1
            _update(sha, b"before", ids[number, :end])
            _update(sha, b"where", np.arange(end)[valid])
        elif not isinstance(valid, slice):
            _update(sha, b"gaps", valid - valid[0])
        if inputs.activated is not None:
            _update(sha, b"activated", _activated(inputs.activated, number, valid, n_tokens))
        has_layout, layout = layout_counts and n_valid < n_tokens, b""
        if has_layout:
            _update_layout(sha, inputs, number, mask)
        elif layout_is_kept and n_valid < n_tokens:
            whole = sha.copy()
            _update_layout(whole, inputs, number, mask)
            layout = whole.digest()
        key = base64.urlsafe_b64encode(sha.digest())[:KEY_LENGTH].decode()
        row = Row(number, key, row_ids.astype(dtype).tobytes(), valid, n_valid, start, "", has_layout, layout)
        if nth := n_seen.get(key, 0):
            _update(sha, b"again", [nth])
            row.again = key_of(sha.digest())
        n_seen[key] = nth + 1
        rows.append(row)
    return rows


def _update_layout(sha: Any, inputs: HostInputs, number: int, mask: NDArray[Any] | None) -> None:
    """Add the whole row, padding included, and how it was masked."""
    everything = slice(None)
    _update(sha, b"row", inputs.ids[number])
    _update(sha, b"row types", _row(inputs.types, number, everything))
    _update(sha, b"row positions", _row(inputs.positions, number, everything))
    _update(sha, b"row mask", mask)
    sha.update(b"2-D;" if inputs.is_causal is None else b"4-D;")


@lru_cache(maxsize=64)
def _sha_of(scope: Scope) -> Any:
    """A SHA-256 that has taken in the scope; copied, never written."""
    return hashlib.sha256(scope.key)


def key_of(digest: bytes) -> str:
    """A digest in `KEY_LENGTH` characters: keys are held by the hundred thousand."""
    return base64.urlsafe_b64encode(digest)[:KEY_LENGTH].decode()


def _valid_positions(mask: NDArray[Any]) -> tuple[Positions, int]:
    """Valid positions as a slice where they are contiguous, which they are but for masks with holes."""
    where = np.flatnonzero(mask)
    if len(where) == 0:
        return slice(0, 0), 0
    start, stop = int(where[0]), int(where[-1]) + 1
    return (slice(start, stop) if stop - start == len(where) else where), len(where)


def _activated(offsets: Sequence[int | None], number: int, valid: Positions, length: int) -> list[int] | None:
    """Return the first valid token of a row for which an activated LoRA is in force; None: there is none."""
    n_columns = offsets[number] if number < len(offsets) else None
    if not n_columns:
        return None
    return [length - min(n_columns, length) - (valid.start if isinstance(valid, slice) else 0)]


def _row(values: NDArray[np.int64] | None, number: int, valid: Positions) -> NDArray[np.int64] | None:
    if values is None:
        return None
    row: NDArray[np.int64] = values[number if len(values) > 1 else 0][valid]
    return row


def _update(sha: Any, name: bytes, values: NDArray[Any] | Sequence[int] | None) -> None:
    """Add one field, so that no two different sets of fields hash the same bytes."""
    if values is None:
        sha.update(b"%s:none;" % name)
        return
    packed = np.asarray(values, np.int64).tobytes()
    sha.update(b"%s:%d;" % (name, len(packed)))
    sha.update(packed)
