"""What one forward call knows: inputs, rows and their exact keys. Made per call and thread, never on the module.

Sizes: B rows, T tokens a row (padding included), n valid tokens of a row.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcache.arrays import Floats
from llmcache.audit.auditor import Sample
from llmcache.prefix.records import Prefill

KEY_LENGTH = 43  # characters of a SHA-256 in base64
Positions = slice | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything but the tokens that decides a state. States are found only within their own scope.

    Attributes:
        namespace: The caller's partition (tenant). No search crosses it.
        weights: Digest of the trunk's weights and active adapters.
        dtype: Dtype of the hidden states, autocast included.
        attention: Attention implementation; kernels differ in the last bits.
    """

    namespace: str
    weights: str
    dtype: str
    attention: str

    @property
    def key(self) -> bytes:
        """Unambiguous bytes to hash."""
        return repr((self.namespace, self.weights, self.dtype, self.attention)).encode()


@dataclass(slots=True)
class Row:
    """One request of a call.

    Attributes:
        number: Its row in the batch.
        key: SHA-256 (base64) of its scope, valid tokens, types and positions.
        ids: Its valid token ids, packed; compared on a hit.
        valid: Where the valid tokens are in the row.
        n_valid: How many they are.
        start: Position of the first valid token where those of the others follow one by one; else None.
        refused: Why the row takes no part in caching, or "".
    """

    number: int
    key: str
    ids: bytes
    valid: Positions
    n_valid: int
    start: int | None = None
    refused: str = ""


@dataclass(slots=True)
class Reuse:
    """A decision: one row takes its state at one layer from an entry.

    Attributes:
        row: Row number.
        layer: The layer whose output is taken; it and those below that have not run yet are skipped.
        rung: Which rung decided.
        entry: The stored state at that layer, decoded.
        kv: K and V (H, n, D_h) of skipped layers, by layer; empty when the caller keeps no K/V.
        key: Key of the stored request.
        similarity: How like the fingerprints are; 1.0 for exact reuse.
        stores_above: What the layers above compute on top of it is stored as the row's own.
        answer: Signature (S,) of the stored request's answer, where that is known.
        share: Of the doubt that was allowed, 0 to 1; 1 where doubts cannot be compared so.
    """

    row: int
    layer: int
    rung: str
    entry: Tensor
    kv: Mapping[int, tuple[Tensor, Tensor]]
    key: str
    similarity: float = 1.0
    stores_above: bool = False
    answer: Floats | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row whose own answer the audit wants to know.

    Attributes:
        sample: Its entry in the account; None for a row that nothing was found for.
        source: Key of the stored request that it is, or would have been, served from.
        answer: Signature (S,) of that request's answer, at that time.
        stands_for_all: It was drawn with the probability that all rows have, hits and misses.
    """

    sample: Sample | None
    source: str
    answer: Floats | None
    stands_for_all: bool


@dataclass(slots=True)
class Call:
    """One forward of the trunk.

    Attributes:
        arguments: The trunk's arguments by name; the mask as 2-D.
        namespace: Namespace in force when the call began.
        mask_4d: The mask that was passed, bool (B, 1, T, M), where it is another one.
        rows: Filled when layer 0 is reached.
        scope: Likewise.
        content: Which tokens carry content, bool (B, T) on the model's device.
        was_asked: The rungs were asked what may be reused at layer 0.
        has_begun: Layer 0 was reached, or the call was answered before.
        entering: Dtype of the states that entered layer 0.
        states: Last states (B, T, D), as the trunk went on with them.
        first_output: What layer 0 returned, where it was run for all rows before anything was looked up, else None.
        attention: Output of layer 0's self-attention (B, T, D), where it was asked for.
        features: What the fingerprint is projected from, float32 (B, F0) on the host, or None when nothing is searched.
        fingerprints: What each layer's bank is searched with, float32 (B, F), by layer; empty when nothing is searched.
        generation: Of the library's fingerprint, when these were made.
        forecasts: What the fingerprint lets expect of the outputs, float32 (B, C), or None.
        nearest: Similarity of the nearest stored request that a search found, by row number.
        reused: Latest decision by row number.
        doubted: Decisions that are not carried out: their rows are computed, and compared with the stored state.
        drawn: Rows that the audit looks into, by number.
        is_served: Every row takes its state at the last layer, so that all layers below are skipped.
        kv_cache: The caller's K/V cache object, or None.
        prefill: What it has to do with stored prefixes, or None.
        captured: Payloads to store: row number, then layer, then named tensors.
        reused_at: Layer of every decision, in order; in `paper` mode a row may have one at each layer.
        n_skipped: Layer executions saved so far, summed over rows.
        is_complete: The last layer was passed.
        lookup_s: Seconds spent on fingerprint, search and decision.
        storing_s: Seconds spent on keeping states and storing misses.
        opened: Clock when this was made.
        started: Clock at its beginning, where it is timed for the cost model, else None.
        is_metered: The cost model wants to know how it comes out.
    """

    arguments: dict[str, Any]
    namespace: str
    mask_4d: Tensor | None = None
    rows: list[Row] = field(default_factory=list)
    scope: Scope | None = None
    content: Tensor | None = None
    was_asked: bool = False
    has_begun: bool = False
    entering: torch.dtype | None = None
    states: Tensor | None = None
    first_output: Any = None
    attention: Tensor | None = None
    features: Floats | None = None
    fingerprints: dict[int, Floats] = field(default_factory=dict)
    generation: int = 0
    forecasts: Floats | None = None
    nearest: dict[int, float] = field(default_factory=dict)
    reused: dict[int, Reuse] = field(default_factory=dict)
    doubted: dict[int, Reuse] = field(default_factory=dict)
    drawn: dict[int, Drawn] = field(default_factory=dict)
    is_served: bool = False
    kv_cache: Any = None
    prefill: Prefill | None = None
    captured: dict[int, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    reused_at: list[int] = field(default_factory=list)
    n_skipped: int = 0
    is_complete: bool = False
    lookup_s: float = 0.0
    storing_s: float = 0.0
    opened: float = field(default_factory=perf_counter)
    started: float | None = None
    is_metered: bool = False

    @property
    def n_rows(self) -> int:
        """B."""
        return len(self.rows)

    @property
    def active_rows(self) -> list[Row]:
        """Rows that take part in caching."""
        return [row for row in self.rows if not row.refused]

    @property
    def served(self) -> Mapping[int, int]:
        """Tokens that a stored prefix serves, by row number."""
        return {} if self.prefill is None else self.prefill.served

    def begin_again(self) -> None:
        """Forget what was read and decided."""
        self.entering, self.was_asked, self.is_served = None, False, False
        for decided in (self.reused, self.doubted, self.reused_at, self.fingerprints, self.nearest):
            decided.clear()

    def saw(self, row: Row, similarity: float) -> None:
        """Take note of how like a stored request is to a row; the most alike counts."""
        self.nearest[row.number] = max(similarity, self.nearest.get(row.number, similarity))


@dataclass(slots=True)
class Inputs:
    """What of a call is read on the host.

    Attributes:
        ids: Token ids (B, T), int64.
        valid: Which tokens are valid, bool (B, T), or None when all are.
        types: Token type ids (B, T) or (1, T), or None.
        positions: Position ids (B, T) or (1, T), or None.
        is_causal: Whether a row's 4-D mask is that of its valid tokens, bool (B,), or None without such a mask.
        features: What the fingerprint is projected from, float32 (B, F0), or None.
    """

    ids: Any
    valid: Any
    types: Any
    positions: Any
    is_causal: Any
    features: Any


def to_host(*tensors: Tensor | None) -> list[NDArray[Any] | None]:
    """Copy tensors to the host with one synchronisation for all of them.

    Args:
        *tensors: On one device; None stays None.

    Returns:
        NumPy arrays; on CPU they share the tensors' memory.
    """
    copies = [
        tensor if tensor is None or tensor.is_cpu else tensor.to("cpu", non_blocking=tensor.is_cuda)
        for tensor in tensors
    ]
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
            break
    return [None if tensor is None else tensor.numpy() for tensor in copies]


def id_dtype(vocabulary: int) -> np.dtype[Any]:
    """Smallest integer dtype in which token ids are packed."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.int32)


def read_rows(scope: Scope, inputs: Inputs, dtype: np.dtype[Any], padding_counts: bool = False) -> list[Row]:
    """Work out each row's valid tokens and exact key.

    The key covers what the output at valid tokens depends on. With positions given, other padding gives the same key.
    Without them a model may derive positions from the padding that comes before a valid token, so that is covered too.

    Args:
        scope: Scope of the call.
        inputs: The call's inputs, arrays on the host.
        dtype: Of packed ids; see `id_dtype`.
        padding_counts: The model may treat padding as it likes: all tokens are kept, and the mask is part of the key.
    """
    prefix = _sha_of(scope)
    rows = []
    for number, row_ids in enumerate(inputs.ids):
        mask = None if inputs.valid is None else inputs.valid[number]
        valid, n_valid = _valid_positions(None if padding_counts else mask, len(row_ids))
        sha = prefix.copy()
        _update(sha, b"ids", row_ids[valid])
        _update(sha, b"types", _row(inputs.types, number, valid))
        _update(sha, b"positions", _row(inputs.positions, number, valid))
        if padding_counts:
            _update(sha, b"mask", mask)
        elif inputs.positions is None and n_valid and not (isinstance(valid, slice) and valid.start == 0):
            end = valid.stop if isinstance(valid, slice) else int(valid[-1]) + 1
            _update(sha, b"before", row_ids[:end])
            _update(sha, b"where", np.arange(end)[valid])
        elif not isinstance(valid, slice):
            _update(sha, b"gaps", valid - valid[0])
        packed = row_ids[valid].astype(dtype).tobytes()
        start = _start(_row(inputs.positions, number, valid), valid, n_valid)
        rows.append(Row(number, _name(sha), packed, valid, n_valid, start))
    return rows


@lru_cache(maxsize=64)
def _sha_of(scope: Scope) -> Any:
    """A SHA-256 that has taken in the scope; copied, never written."""
    return hashlib.sha256(scope.key)


def _name(sha: Any) -> str:
    """A digest in `KEY_LENGTH` characters: keys are held by the hundred thousand."""
    return base64.urlsafe_b64encode(sha.digest())[:KEY_LENGTH].decode()


def _valid_positions(mask: NDArray[Any] | None, length: int) -> tuple[Positions, int]:
    """Valid positions as a slice where they are contiguous, which they are but for masks with holes."""
    if mask is None or mask.all():
        return slice(0, length), length
    where = np.flatnonzero(mask)
    if len(where) == 0:
        return slice(0, 0), 0
    start, stop = int(where[0]), int(where[-1]) + 1
    return (slice(start, stop) if stop - start == len(where) else where), len(where)


def _start(positions: NDArray[np.int64] | None, valid: Positions, n_valid: int) -> int | None:
    """See `Row.start`; a model that is given no positions counts columns."""
    if n_valid == 0 or not isinstance(valid, slice):
        return None
    if positions is None:
        return int(valid.start)
    return int(positions[0]) if (np.diff(positions) == 1).all() else None


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
    packed = np.ascontiguousarray(values, dtype=np.int64).tobytes()
    sha.update(b"%s:%d;" % (name, len(packed)))
    sha.update(packed)
