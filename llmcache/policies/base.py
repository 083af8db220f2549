"""The interface of policies, with the defaults that most of them share."""

from abc import ABC, abstractmethod


class Policy(ABC):
    """An order in which keys leave. Asking changes nothing: a key is forgotten by `on_remove` alone.

    Four methods are each policy's own. The rest has defaults: nothing but the budget makes keys leave, and no entry is
    checked. Settings become keyword arguments of the constructor, checked against its annotations.
    """

    #: Keys may leave before a budget is used up. Sources of a calibration may not, so it refuses such policies.
    lets_entries_leave_early = False
    #: Reuses are checked: `should_check` and `on_check` are called.
    checks_reuse = False

    @abstractmethod
    def on_put(self, key: str, nbytes: int) -> None:
        """Note that an entry of `nbytes` bytes was stored under `key`, for the first time or in place of another."""

    @abstractmethod
    def on_hit(self, key: str) -> None:
        """Note that the entry was reused. An unknown key is ignored."""

    @abstractmethod
    def on_remove(self, key: str) -> None:
        """Forget a key. An unknown one is ignored."""

    @abstractmethod
    def victim(self) -> str:
        """Name the key that should leave next.

        Raises:
            KeyError: No key is held.
        """

    def on_cost(self, key: str, cost: float) -> None:
        """Note what computing the entry anew would take; told right after it was put, where that is known.

        Args:
            key: Key of the entry. An unknown one is ignored.
            cost: Over 0, in a unit that is the same for all entries of the policy: milliseconds of the call that
                computed it, by its share of the rows; with `tau` of the tokens, which are counted alone where the model
                is on an accelerator.

        Raises:
            ValueError: `cost` is not such a number.
        """

    def expired(self) -> list[str]:
        """Name the keys that must leave now, whatever the budget; by default none."""
        return []

    def should_check(self, key: str) -> bool:
        """Decide whether an approximate reuse of the entry, about to happen, is to be computed instead and compared."""
        return False

    def on_check(self, key: str, divergence: float) -> None:
        """Note how such a check came out. An unknown key is ignored.

        Args:
            key: Key of the entry.
            divergence: 1 - cosine of the fresh state and the stored one, 0 to 2.

        Raises:
            ValueError: `divergence` is negative or not a number.
        """
