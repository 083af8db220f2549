"""Who leaves a full bank (component 5, replacement).

A policy sees keys only; the bank tells it what happens and removes what it names. Nothing here holds a lock: the
library above does. With n keys each call is O(1), in `staleness` and `divergence` O(log n) averaged over calls;
`expired` is O(1) and the number of keys that it returns.
"""

from typing import Any, Protocol

from llmcache.policies.divergence import Divergence
from llmcache.policies.lfu import LFU
from llmcache.policies.lru import FIFO, LRU, TTL
from llmcache.policies.staleness import Staleness


class Policy(Protocol):
    """An order in which keys leave. Asking changes nothing: a key is forgotten by `on_remove` alone."""

    def __init__(self, **options: Any) -> None:
        """Open an empty policy; options are what the class names in its own signature."""

    def on_put(self, key: str, nbytes: int) -> None:
        """Note that an entry of `nbytes` bytes was stored under `key`, for the first time or in place of another."""

    def on_hit(self, key: str) -> None:
        """Note that the entry was reused. An unknown key is ignored."""

    def on_remove(self, key: str) -> None:
        """Forget a key. An unknown one is ignored."""

    def victim(self) -> str:
        """Name the key that should leave next.

        Raises:
            KeyError: No key is held.
        """

    def expired(self) -> list[str]:
        """Name the keys that must leave now, whatever the budget."""

    def should_check(self, key: str) -> bool:
        """Decide whether an approximate reuse of the entry, about to happen, is to be computed instead and compared."""

    def on_check(self, key: str, divergence: float) -> None:
        """Note how such a check came out. An unknown key is ignored.

        Args:
            key: Key of the entry.
            divergence: 1 - cosine of the fresh state and the stored one, 0 to 2.

        Raises:
            ValueError: `divergence` is negative or not a number.
        """


POLICIES: dict[str, type[Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "ttl": TTL,
    "staleness": Staleness,
    "divergence": Divergence,
}
