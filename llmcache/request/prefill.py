"""What is known of a block of tokens, and of a call that may be served a prefix.

Sizes: B rows, C columns cut, D hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Link:
    """One full block of a request.

    Attributes:
        key: SHA-256 over the root, all blocks before, and this one; hexadecimal.
        ids: Its token ids, packed; compared on a hit.
    """

    key: str
    ids: bytes


@dataclass(slots=True)
class Prefill:
    """What one call has to do with prefixes.

    Attributes:
        kv_cache: The K/V cache that it fills.
        chains: The blocks of each row.
        served: Tokens that a stored prefix serves, at least one, by row number.
        states: What the trunk put out at the columns that are cut (B, C, D); None when nothing is served.
    """

    kv_cache: Any
    chains: Sequence[tuple[Link, ...]]
    served: Mapping[int, int] = field(default_factory=dict)
    states: Tensor | None = None
