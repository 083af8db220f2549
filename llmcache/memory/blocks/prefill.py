"""The blocks of a call that keeps K/V.

Sizes: C columns cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcache.memory.blocks.block import Link
from llmcache.request.rows import Row, Scope


@dataclass(slots=True)
class Prefill:
    """The blocks of one call that keeps K/V.

    Attributes:
        kv_cache: The caller's K/V cache, which the call fills.
        scope: The scope of the call.
        rows: The rows of the call.
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
