"""The policy interface, with the defaults that most policies share."""

from abc import ABC, abstractmethod


class Policy(ABC):
    """An eviction order of keys. Only `on_remove` removes a key; `victim` and `expired` change nothing.

    A policy implements four methods. By default the others expire no key and check no entry. Settings become keyword
    arguments of the constructor, checked against its annotations.
    """

    #: Whether keys may expire while there is room. A calibration refuses such policies: its sources must stay.
    lets_entries_leave_early = False
    #: Whether reuses are checked with `should_check` and `on_check`.
    checks_reuse = False

    @abstractmethod
    def on_put(self, key: str, nbytes: int) -> None:
        """Record that an entry of `nbytes` bytes was stored under `key`, new or in place of another."""

    @abstractmethod
    def on_hit(self, key: str) -> None:
        """Record that the entry was reused. An unknown key is ignored."""

    @abstractmethod
    def on_remove(self, key: str) -> None:
        """Forget a key. An unknown key is ignored."""

    @abstractmethod
    def victim(self) -> str:
        """Return the key to evict next.

        Raises:
            KeyError: No key is held.
        """

    def on_cost(self, key: str, cost: float) -> None:
        """Record the cost of recomputing the entry. Called right after `on_put` if the cost is known.

        Args:
            key: Key of the entry. An unknown key is ignored.
            cost: Over 0, in the same unit for all entries of the policy: the milliseconds of the call that computed
                it, divided equally among its computed rows; with `tau`, in proportion to their tokens.

        Raises:
            ValueError: `cost` is not a finite number over 0.
        """

    def expired(self) -> list[str]:
        """Return the keys that must be removed now, whatever the budget; by default none."""
        return []

    def should_check(self, key: str) -> bool:
        """Whether the next approximate reuse of the entry is computed instead, to compare the states."""
        return False

    def on_check(self, key: str, divergence: float) -> None:
        """Record the result of a check. An unknown key is ignored.

        Args:
            key: Key of the entry.
            divergence: 1 - cosine of the computed and the stored state, 0 to 2.

        Raises:
            ValueError: `divergence` is negative or not a number.
        """
