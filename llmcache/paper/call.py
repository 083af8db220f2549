"""Data of one call with `tau`, filled step by step.

Sizes: B rows, T tokens, F0 features, F fingerprint width, R rows of a payload, S layers, H K/V heads, n valid tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from llmcache.arrays import Floats
from llmcache.models.weights import Mark
from llmcache.paper.bank import Entry, State
from llmcache.request.rows import Row, Scope

WITHIN = -1  # a layer is running: layers that run within it are none of the trunk's steps
OUT_OF_ORDER = -2


@dataclass(slots=True)
class Reuse:
    """A stored state that stands for a layer's output in one row."""

    layer: int
    hidden: Tensor  # payload (R, D)
    keys: Tensor | None  # (S, H, n, D_h), of the layers that it makes its row skip, `layer` the last; None without K/V
    values: Tensor | None
    key: str  # of the request that stored it
    similarity: float


@dataclass(slots=True)
class Call:
    """One call of the trunk, and where it is on its way through the layers."""

    namespace: str
    is_only_if_cached: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)  # of the trunk, by name
    reason: str | None = None  # why it bypasses the cache, a key of `CURES`: layers are plain
    turn: int = 0  # the layer that comes next, or one of the two constants above
    # What was read when it was opened.
    scope: Scope | None = None
    mark: Mark | None = None  # of the weights
    n_purges: int = 0  # see `Banks.n_purges`
    rows: Sequence[Row] = ()
    content: Tensor | None = None  # which tokens are neither special nor padding, bool (B, T)
    may_search: bool = True
    # What shows at layer 0.
    kv_cache: Any = None  # the caller's, if it is to hold K/V afterwards
    first_output: Any = None  # of layer 0, where it had to run before anything was looked up
    attention: Tensor | None = None  # output of its self-attention, likewise
    features: Floats | None = None  # (B, F0), until the fingerprint is fitted
    vectors: Floats | None = None  # fingerprints (B, F)
    # What was found and computed; dicts are by row.
    near: dict[int, float] = field(default_factory=dict)  # similarity of the nearest stored request
    reused: dict[int, Reuse] = field(default_factory=dict)  # the deepest so far
    reuses: list[int] = field(default_factory=list)  # layers, one for each reuse
    checked: dict[int, tuple[Reuse, Entry]] = field(default_factory=dict)  # computed, to be compared with this
    takes_all_rows: bool = False  # rows cannot be taken out of the batch
    n_skipped: int = 0  # layers, summed over rows
    computed: list[tuple[int, State]] = field(default_factory=list)  # with the number of the row
    lookup_s: float = 0.0
    storing_s: float = 0.0

    @property
    def active_rows(self) -> list[Row]:
        """Rows that take part in caching."""
        return [row for row in self.rows if not row.bypass_reason]

    def skips(self, row: int, layer: int) -> bool:
        """Whether a stored state stands for a row's output of a layer, or of a later one."""
        reuse = self.reused.get(row)
        return reuse is not None and reuse.layer >= layer
