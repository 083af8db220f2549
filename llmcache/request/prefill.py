"""The blocks of a call that keeps K/V.

Sizes: C columns cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcache.request.rows import Row, Scope


@dataclass(frozen=True, slots=True)
class Link:
    """One full block of a request, or its tail: the tokens after its last full block.

    Attributes:
        key: Of a full block, SHA-256 (base64) over scope, block size, first position and all tokens up to its end. Of a
            tail, the exact key of the request.
        ids: Its token ids, packed; compared on a hit.
    """

    key: str
    ids: bytes


@dataclass(slots=True)
class Prefill:
    """The blocks of one call that keeps K/V.

    Attributes:
        kv_cache: The caller's K/V cache, which the call fills.
        scope: The scope of the call.
        rows: The rows of the call.
        n_purges: `BlockPool.n_purges` when the call began.
        has_chains: Its rows may share prefixes with other requests.
        chains: The full blocks of rows, by row number and namespace (None: the call's own).
        whole: Key and blocks of each row that is stored whole, by row number; empty if prefixes are served.
        served: Number of tokens that a stored prefix serves, at least 1, by row number.
        matched: The stored blocks that each row begins with.
        n_cut: C.
        missed: Why stored prefixes of rows are not served, a key of `MISSES`, by row number.
    """

    kv_cache: Any
    scope: Scope
    rows: Sequence[Row]
    n_purges: int
    has_chains: bool = True
    chains: dict[tuple[int, str | None], tuple[Link, ...]] = field(default_factory=dict)
    whole: Mapping[int, tuple[str, Any]] = field(default_factory=dict)
    served: Mapping[int, int] = field(default_factory=dict)
    matched: Sequence[Any] = ()
    n_cut: int = 0
    missed: Mapping[int, str] = field(default_factory=dict)

    def drop(self) -> None:
        """Discard all hits."""
        self.whole, self.served = {}, {}
