"""The data of one call with `tau`, filled step by step.

Sizes: B rows, T tokens, F0 features, F fingerprint width, R rows of a payload, S layers, H K/V heads, n valid tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from llmcache.models.weights import Snapshot
from llmcache.paper.bank import Entry, State
from llmcache.request.rows import Row, Scope
from llmcache.support.arrays import Floats

WITHIN = -1  # a layer is running: layers called inside it are not steps of the trunk
OUT_OF_ORDER = -2  # a layer ran out of its order


@dataclass(slots=True)
class Reuse:
    """A stored state that replaces a layer's output in one row."""

    layer: int
    hidden: Tensor  # payload (R, D)
    keys: Tensor | None  # (S, H, n, D_h), for the layers the row skips, up to `layer`; None without K/V
    values: Tensor | None
    key: str  # key of the request that stored it
    similarity: float


@dataclass(slots=True)
class Call:
    """One call of the trunk, and its progress through the layers."""

    namespace: str
    is_only_if_cached: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of the trunk by name
    reason: str | None = None  # reason for a bypass, a key of `CURES`; layers then run unchanged
    turn: int = 0  # number of the next layer, or one of the two constants above
    # Set by `Opener.open`.
    scope: Scope | None = None
    snapshot: Snapshot | None = None  # state of the weights
    generation: int = 0  # when opened: `Purges.generation`
    rows: Sequence[Row] = ()
    content: Tensor | None = None  # which tokens are neither special nor padding, bool (B, T)
    may_search: bool = True
    # Set at layer 0.
    kv_cache: Any = None  # the caller's K/V cache, if it keeps K/V
    first_output: Any = None  # output of layer 0, if that ran before the lookup
    attention: Tensor | None = None  # output of layer 0's self-attention, if the fingerprint reads it
    features: Floats | None = None  # features (B, F0), until the fingerprint is fitted
    vectors: Floats | None = None  # fingerprints (B, F)
    # Lookups and computed states; dicts are by row.
    near: dict[int, float] = field(default_factory=dict)  # similarity of the nearest stored request
    reused: dict[int, Reuse] = field(default_factory=dict)  # the deepest reuse so far
    reuses: list[int] = field(default_factory=list)  # layer of each reuse
    checked: dict[int, tuple[Reuse, Entry]] = field(default_factory=dict)  # rows computed to check a reuse
    takes_all_rows: bool = False  # rows cannot be taken out of the batch
    n_skipped: int = 0  # skipped layers, summed over rows
    computed: list[tuple[int, State]] = field(default_factory=list)  # states to store, with their row
    lookup_s: float = 0.0
    storing_s: float = 0.0

    @property
    def active_rows(self) -> list[Row]:
        """The rows that do not bypass the cache."""
        return [row for row in self.rows if not row.bypass_reason]

    def skips(self, row: int, layer: int) -> bool:
        """Whether a row skips a layer because a stored state replaces the output of this or a later layer."""
        reuse = self.reused.get(row)
        return reuse is not None and reuse.layer >= layer
