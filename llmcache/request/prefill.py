"""What is known of a block of tokens, and of a call whose requests are kept in blocks.

Sizes: B rows, C columns cut, D hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from llmcache.request.rows import Row, Scope

if TYPE_CHECKING:  # which holds this
    from llmcache.execution.old_call import Reuse


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
        scope: As it was read before the layers. What is looked up and stored goes by this, whatever is read later.
        rows: Likewise.
        generation: Likewise; see `Read`.
        keeps_requests: The exact rung is served from blocks, so no entries are stored for it, where rows fit.
        n_purges: Of the pool, when it began.
        chains: The blocks of rows that were asked for, by number and namespace; None: their own.
        served: Tokens that a stored prefix serves, at least one, by row number.
        states: What the trunk put out at the columns that are cut, to be joined (B, C, D); None when nothing is served.
        repeats: Rows that are held as a whole, by number; empty when a prefix is served.
    """

    kv_cache: Any
    scope: Scope
    rows: Sequence[Row]
    generation: int
    keeps_requests: bool
    n_purges: int
    chains: dict[tuple[int, str | None], tuple[Link, ...]] = field(default_factory=dict)
    served: Mapping[int, int] = field(default_factory=dict)
    states: Sequence[Tensor] | None = None
    repeats: "Mapping[int, Reuse]" = field(default_factory=dict)
    whole: Mapping[int, tuple[str, Any]] = field(default_factory=dict)
    matched: Sequence[Any] = ()
    n_cut: int = 0
    has_chains: bool = True

    def fits(self, row: Row) -> bool:
        """Whether a row can be kept in blocks: its tokens are contiguous, and their positions follow one by one."""
        return row.start is not None
