"""Divides a budget among namespaces: each has its own policy and an equal share.

The namespace that holds the most, the incoming entry included, evicts an entry: by bytes, or by number where
`max_entries` is the limit. It holds at least an equal share, so a namespace below its share never loses an entry to
another, unless the incoming entry alone is larger than a share. A single namespace may fill the whole budget.
"""

from collections.abc import Callable, Iterator

from llmcache.memory.policies.base import Policy
from llmcache.memory.policies.ranking import Ranking


class Shares:
    """Policies by namespace, and the keys and bytes that each holds. The caller holds a lock."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        """Begin empty; `make` returns a new policy for a namespace."""
        self._make = make
        #: By namespace, for all that hold an entry.
        self.policies: dict[str, Policy] = {}
        self._held: dict[str, dict[str, int]] = {}  # bytes by key
        self._largest = Ranking()  # by bytes, negative

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def keys(self, namespace: str | None) -> list[str]:
        """Return the keys of a namespace (None: of all), the oldest of each first."""
        names = list(self._held) if namespace is None else [namespace]
        return [key for name in names for key in self._held.get(name, ())]

    def add(self, namespace: str, key: str, nbytes: int) -> None:
        """Record an added entry. The caller reports it to the policy."""
        if namespace not in self._held:
            self.policies[namespace], self._held[namespace] = self._make(), {}
        self._held[namespace][key] = nbytes
        self._grow(namespace, nbytes)

    def remove(self, namespace: str, key: str) -> None:
        """Record a removed entry, also in the policy."""
        policy = self.policies[namespace]
        self._grow(namespace, -self._held[namespace].pop(key))
        if not self._held[namespace]:
            del self.policies[namespace], self._held[namespace]
            self._largest.discard(namespace)
        policy.on_remove(key)  # last: a user's policy may raise

    def victim(self, namespace: str, nbytes: int) -> str:
        """Return the key to evict for an entry of `nbytes` bytes in a namespace.

        Raises:
            KeyError: Nothing is held.
        """
        largest = self._largest.first()
        if namespace in self._held and nbytes - self._largest[namespace][0] >= -self._largest[largest][0]:
            largest = namespace
        return self._first(largest)

    def victim_by_number(self, namespace: str) -> str:
        """Return the key to evict for an entry of a namespace when there are too many."""
        held = {name: len(keys) + (name == namespace) for name, keys in self._held.items()}
        return self._first(max(held, key=held.__getitem__))

    def expired(self) -> list[str]:
        return [key for policy in list(self.policies.values()) for key in policy.expired()]

    def _first(self, namespace: str) -> str:
        """Return the key to evict from a namespace: the policy's victim, or the oldest key if that is not held."""
        policy, held = self.policies[namespace], self._held[namespace]
        if (key := policy.victim()) in held:
            return key
        policy.on_remove(key)
        return next(iter(held))

    def _grow(self, namespace: str, nbytes: int) -> None:
        held = self._largest[namespace][0] if namespace in self._largest else 0.0
        self._largest[namespace] = held - nbytes, 0
