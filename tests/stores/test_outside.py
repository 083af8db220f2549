"""`check_store` passes a user's store, and names the rule that a faulty store breaks."""

from collections.abc import Sequence
from math import inf

import pytest

from llmcache.stores import Bytes, StoreKey
from llmcache.testing import check_store
from tests.stores.shared import Shared


def test_a_class_from_outside_passes() -> None:
    check_store(Shared)


class Unmoved(Shared):
    """Keeps its numbers at a purge: a put that began before the purge still lands."""

    def number(self, namespace: str) -> int:
        return 0


class Shuffled(Shared):
    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        return super().get_many(sorted(keys, key=lambda key: key.name), deadline)


class Patient(Shared):
    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        return super().get_many(keys, inf)


class Nameless(Shared):
    """Compares keys by their joined text."""

    def find(self, key: StoreKey) -> bytes | None:
        text = f"{key.namespace}:{key.name}"
        return next((v for k, (_, v) in self.place.values.items() if f"{k.namespace}:{k.name}" == text), None)


class Silent(Shared):
    """Does not report forgotten keys."""

    def forget(self, keys: Sequence[StoreKey]) -> None:
        super().forget(keys)
        self.place.told.pop()


class Alone(Shared):
    def __init__(self) -> None:
        super().__init__(f"{id(self)}")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Unmoved, "purge: the namespace has another number in all stores"),
        (Shuffled, "get_many: a value for each key, in their order, bit for bit"),
        (Patient, "get_many: nothing after the deadline, and no error"),
        (Silent, "purges: all purges, in order"),
        (Nameless, "get_many: a value for each key, in their order, bit for bit"),
        (Alone, "get_many: a value for each key, in their order, bit for bit"),
    ],
)
def test_a_class_that_breaks_a_rule_is_told_which(made: type[Shared], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_store(made)
