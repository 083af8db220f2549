"""What is known of a block of tokens, and of a call whose requests are kept in blocks.

Sizes: C columns cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcache.request.rows import Row, Scope


@dataclass(frozen=True, slots=True)
class Link:
    """One full block of a request, or what it has after its blocks.

    Attributes:
        key: SHA-256 (base64) over the root, all blocks before, and this one; of the end of a request its exact key.
        ids: Its token ids, packed; compared on a hit.
    """

    key: str
    ids: bytes


@dataclass(slots=True)
class Prefill:
    """What one call has to do with blocks.

    Attributes:
        kv_cache: The K/V cache that it fills.
        scope: Of the call.
        rows: Of the call.
        n_purges: Of the pool, when it began.
        has_chains: Its rows may share what they begin with.
        chains: The blocks of rows that were asked for, by number and namespace; None: their own.
        whole: Of rows that are held as a whole, key and blocks, by number; empty when a prefix is served.
        served: Tokens that a stored prefix serves, at least one, by row number.
        matched: The blocks that each row begins with.
        n_cut: C.
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
