"""Names of blocks of tokens: a block's key covers all that its states depend on, so also every block before it.

As in vLLM's automatic prefix caching (block hash of parent hash, tokens and extra keys), but that the root, not each
block, takes in what is not tokens.
"""

import hashlib

from llmcache.request.prefill import Link
from llmcache.request.rows import Row, Scope, key_of


def links(scope: Scope, row: Row, size: int) -> tuple[Link, ...]:
    """The full blocks of a request, first to last; tokens that do not fill a block are left out.

    The first n are those of another request exactly where both have the same root (scope, block size, first position)
    and the same first n * size tokens.
    """
    key = hashlib.sha256(f"{row.start}:{size}:".encode() + scope.key).digest()
    width = len(row.ids) // row.n_valid * size
    found = []
    for begin in range(0, len(row.ids) - width + 1, width):
        ids = row.ids[begin : begin + width]
        key = hashlib.sha256(key + ids).digest()
        found.append(Link(key_of(key), ids))
    return tuple(found)
