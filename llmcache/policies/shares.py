"""Who leaves for whom: each namespace has a policy, and a share of the budget, of its own.

Where room is needed, the namespace that holds most loses an entry, what is coming counted. It holds at least an equal
share, so a namespace below its share never loses an entry to another one, unless what is coming is by itself larger
than a share. One that is alone may fill the budget.
"""

from collections.abc import Callable, Iterator

from llmcache.policies.base import Policy
from llmcache.policies.ranking import Ranking


class Shares:
    """Policies by namespace, and what each namespace holds. The caller holds a lock."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        """Begin empty; `make` makes the policy of a namespace."""
        self._make = make
        #: Of each namespace that holds something.
        self.policies: dict[str, Policy] = {}
        self._held: dict[str, dict[str, int]] = {}  # bytes by key
        self._nbytes: dict[str, int] = {}
        self._largest = Ranking()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def keys(self, namespace: str | None) -> list[str]:
        """Keys of a namespace (None: of all), the oldest of each first."""
        names = list(self._held) if namespace is None else [namespace]
        return [key for name in names for key in self._held.get(name, ())]

    def add(self, namespace: str, key: str, nbytes: int) -> None:
        """An entry is held from now on. Its policy is told of by the caller."""
        if namespace not in self._held:
            self.policies[namespace], self._held[namespace], self._nbytes[namespace] = self._make(), {}, 0
        self._held[namespace][key] = nbytes
        self._grow(namespace, nbytes)

    def remove(self, namespace: str, key: str) -> None:
        """An entry is held no longer."""
        policy = self.policies[namespace]
        self._grow(namespace, -self._held[namespace].pop(key))
        if not self._held[namespace]:
            del self.policies[namespace], self._held[namespace], self._nbytes[namespace]
            self._largest.discard(namespace)
        policy.on_remove(key)  # last: it may be of somebody else, and fail

    def victim(self, namespace: str, nbytes: int) -> str:
        """The key that leaves for an entry of a namespace that takes so many bytes.

        Raises:
            KeyError: Nothing is held.
        """
        largest = self._largest.first()
        if self._nbytes.get(namespace, -nbytes) + nbytes >= self._nbytes[largest]:
            largest = namespace
        return self._first(largest)

    def victim_by_number(self, namespace: str) -> str:
        """The key that leaves where there are too many entries."""
        held = {name: len(keys) + (name == namespace) for name, keys in self._held.items()}
        return self._first(max(held, key=held.__getitem__))

    def expired(self) -> list[str]:
        """All that must leave now; see `Policy.expired`."""
        return [key for policy in list(self.policies.values()) for key in policy.expired()]

    def _first(self, namespace: str) -> str:
        """The key that leaves a namespace: the oldest one if its policy names one that is not held any more."""
        policy, held = self.policies[namespace], self._held[namespace]
        if (key := policy.victim()) in held:
            return key
        policy.on_remove(key)
        return next(iter(held))

    def _grow(self, namespace: str, nbytes: int) -> None:
        self._nbytes[namespace] += nbytes
        self._largest[namespace] = -float(self._nbytes[namespace]), 0
