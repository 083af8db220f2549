"""A store behind memory: failures are misses, a full queue drops writes, and purges reach every cache."""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from llmcache import StoreError
from llmcache.memory.stores import Bytes, Purges, Put, StoreKey, write_behind
from llmcache.memory.stores.break_even import BreakEven
from llmcache.memory.stores.seal import Seal
from llmcache.memory.stores.tier import Tier
from llmcache.memory.stores.write_behind import NO_NUMBER
from llmcache.request.counters import Counters
from llmcache.request.rows import Scope
from tests.fixtures import Patch
from tests.stores.shared import Shared

SCOPE = Scope("a", "weights", "float32", "eager")


class Frail(Shared):
    """A store that fails or waits on demand."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.fails = self.tells_no_numbers = False
        self.may_write = threading.Event()
        self.may_write.set()

    def check(self) -> None:
        if self.fails:
            raise StoreError("out of order")

    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        self.check()
        return super().get_many(keys, deadline)

    def put_many(self, puts: Sequence[Put]) -> None:
        self.check()
        assert self.may_write.wait(20)
        super().put_many(puts)

    def purges(self, since: str | None) -> Purges:
        self.check()
        return super().purges(since)

    def numbers(self, namespaces: Sequence[str]) -> list[int]:
        self.check()
        if self.tells_no_numbers and namespaces:
            raise StoreError("out of order")
        return super().numbers(namespaces)


class Memory:
    """A memory that records what it must forget."""

    def __init__(self) -> None:
        self.dropped: list[str | None] = []
        self.names: list[str] = []

    def namespaces(self) -> Iterable[str]:
        return ["a"]

    def drop(self, namespace: str | None) -> int:
        self.dropped.append(namespace)
        return 3

    def drop_names(self, namespace: str, names: Sequence[str]) -> int:
        self.names += names
        return 1


Make = Callable[..., tuple[Tier, Frail, Memory]]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes tiers on one shared place; returns each with its store and memory."""
    made: list[Tier] = []

    def act(seal: Seal | None = None, settings: str = "", fails: bool = False) -> tuple[Tier, Frail, Memory]:
        store, memory = Frail(request.node.name), Memory()
        store.fails = fails
        made.append(Tier(store, seal or Seal(), settings, Counters(), memory))
        return made[-1], store, memory

    yield act
    for tier in made:
        tier.close()
    Shared.places.pop(request.node.name, None)


def put(tier: Tier, *names: str, scope: Scope = SCOPE) -> None:
    since, number = tier.follow(), tier.number(scope.namespace)
    for name in names:
        tier.write(scope, name, {"h": torch.full((4,), float(len(name)))}, {"name": name}, number, since)
    tier.drain()


def get(tier: Tier, *names: str, scope: Scope = SCOPE) -> list[str]:
    return [one.about["name"] for one in tier.read([(scope, name) for name in names], 1) if one is not None]


def dropped(tier: Tier, memory: Memory) -> list[str | None]:
    """Follow purges; return the namespaces that memory drops."""
    memory.dropped.clear()
    tier.follow()
    return memory.dropped


# -- values ------------------------------------------------------------------------------------------------------------


def test_what_one_puts_another_finds_and_counts(make: Make) -> None:
    (one, *_), (other, *_) = make(), make()
    put(one, "x", "xy")
    assert get(other, "x", "none", "xy") == ["x", "xy"]
    put(other, "x")  # already stored
    stats = other.stats()
    assert (stats.n_asked, stats.n_found, stats.n_written, stats.n_dropped, stats.n_values) == (3, 2, 0, 0, 2)


@pytest.mark.parametrize("what", ["weights", "namespace", "dtype", "attention", "settings", "secret"])
def test_what_differs_in_anything_is_not_found_and_a_mismatch_is_counted(make: Make, what: str) -> None:
    (one, *_), (other, *_) = make(), make(Seal(b"other" * (what == "secret")), settings="x" * (what == "settings"))
    put(one, "x")
    scope = replace(SCOPE, **({what: "other"} if what in SCOPE.__slots__ else {}))
    assert get(other, "x", scope=scope) == []
    assert other.stats().n_mismatched == ({"damaged": 1} if what == "secret" else {})


def test_what_is_dropped_is_offered_again(make: Make, monkeypatch: Patch) -> None:
    tier, store, _ = make()
    monkeypatch.setattr(write_behind, "MAX_WAITING_BYTES", 40)
    store.may_write.clear()
    since, number = tier.follow(), tier.number("a")
    for name in ("x", "y", "z"):
        tier.write(SCOPE, name, {"h": torch.ones(4)}, {"name": name}, number, since)
    store.may_write.set()
    tier.drain()
    lacking = [name for name in ("x", "y", "z") if tier.lacks(SCOPE, name)]
    assert lacking and tier.stats().n_dropped == len(lacking) and not tier.has_dropped
    put(tier, *lacking)
    assert get(tier, "x", "y", "z") == ["x", "y", "z"]


def test_what_came_in_time_is_opened_however_late(make: Make) -> None:
    """`peek` opens all values that arrived by the deadline; it serves shared calibrations, not speed."""
    tier, store, _ = make()
    put(tier, "x")
    ask = store.get_many

    def late(keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        found = ask(keys, deadline)
        while time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    store.get_many = late  # type: ignore[method-assign]
    (found,) = tier.peek([(SCOPE, "x")], 0.01)
    assert found is not None and found.about == {"name": "x"}


def test_closing_writes_what_waits_and_so_does_leaving_it(make: Make) -> None:
    tier, store, _ = make()
    tier.write(SCOPE, "x", {"h": torch.ones(4)}, {"name": "x"}, tier.number("a"), tier.follow())
    tier.close()
    assert not store.is_open and len(store.place.values) == 1
    left = Frail(store.place and next(iter(Shared.places)))
    Tier(left, Seal(), "", Counters(), Memory())
    gc.collect()
    assert not left.is_open


# -- purges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["a", None])
def test_a_purge_reaches_every_memory(make: Make, namespace: str | None) -> None:
    (one, _, mine), (other, _, theirs) = make(), make()
    put(one, "e.x")
    before = other.number("a")
    assert one.purge(namespace) == 3 and mine.dropped[0] == namespace
    assert dropped(other, theirs) == [namespace]
    assert get(other, "e.x") == [] and other.number("a") not in (before, NO_NUMBER)
    put(one, "e.x", "e.y")
    assert one.forget("a", {SCOPE: ["e.x"]}) == 1
    assert dropped(other, theirs) == [] and theirs.names == ["e.x"]
    assert get(other, "e.x", "e.y") == ["e.y"]


def test_what_was_computed_before_a_purge_is_put_nowhere(make: Make) -> None:
    (one, *_), (other, *_) = make(), make()
    number, since = one.number("a"), one.follow()
    other.purge("a")
    one.write(SCOPE, "x", {"h": torch.ones(4)}, {"name": "x"}, number, since)
    one.drain()
    assert get(one, "x") == get(other, "x") == []


def test_where_purges_may_be_missing_only_what_moved_is_dropped(make: Make) -> None:
    (one, store, memory), (other, *_) = make(), make()
    for act in (lambda: other.purge("b"), lambda: other.forget("b", {replace(SCOPE, namespace="b"): ["x"]})):
        for namespace in ("a", "b"):
            one.number(namespace)
        act()
        one._cursor = "unknown"
        assert dropped(one, memory) == ["b"]
    one._cursor, store.tells_no_numbers = "unknown", True
    assert dropped(one, memory) == ["a"]  # it may have been purged


def test_a_number_that_is_asked_for_during_a_purge_is_not_that_from_before(make: Make) -> None:
    (one, store, _), (other, *_) = make(), make()
    asked, purges = store.numbers, iter([other])

    def numbers(namespaces: Sequence[str]) -> list[int]:
        found = asked(namespaces)
        for purging in purges:
            purging.purge("a")
            one.follow()
        return found

    store.numbers = numbers  # type: ignore[method-assign]
    assert one.number("a") == asked(["a"])[0]


def test_what_came_before_the_number_is_known_is_forgotten_then_and_once(make: Make, monkeypatch: Patch) -> None:
    monkeypatch.setattr("llmcache.memory.stores.tier._REST_S", 0.0)
    tier, store, memory = make(fails=True)
    assert tier.number("a") == NO_NUMBER and memory.dropped == []
    store.fails = False
    asked, calls = store.numbers, iter(range(1))

    def numbers(namespaces: Sequence[str]) -> list[int]:
        found = asked(namespaces)
        for _ in calls:
            assert tier.number("a") != NO_NUMBER  # another call asks and gets its answer meanwhile
        return found

    store.numbers = numbers  # type: ignore[method-assign]
    assert tier.number("a") == tier.number("a") == asked(["a"])[0]
    assert memory.dropped == ["a"]


def test_what_is_loaded_is_compared_with_the_store(make: Make) -> None:
    (one, _, memory), (other, *_) = make(), make()
    for name in ("a", "b"):
        one.number(name)
    saved = one.numbers()
    other.purge("a")
    late, late_store, late_memory = make(fails=True)
    for tier in (one, late):
        tier.expect(saved)
    assert dropped(one, memory) == ["a"]
    assert dropped(late, late_memory) == []  # the store does not answer
    late_store.fails = False
    assert dropped(late, late_memory) == ["a"]


def test_forgetting_that_fails_is_tried_again_and_a_purge_that_fails_is_told(make: Make) -> None:
    (one, store, memory), (other, *_) = make(), make()
    one.number("a")
    drop, fails = memory.drop, iter([True])

    def failing(namespace: str | None) -> int:
        if next(fails, False):
            raise RuntimeError("not now")
        return drop(namespace)

    memory.drop = failing  # type: ignore[method-assign]
    other.purge("a")
    with pytest.raises(RuntimeError):
        one.follow()
    assert dropped(one, memory) == ["a"]
    store.close()
    store.purge = lambda namespace: store.check_open()  # type: ignore[assignment,method-assign]
    memory.dropped.clear()
    with pytest.raises(StoreError):
        one.purge("a")
    assert {*memory.dropped} == {"a"}  # memory forgets it anyway


# -- whether reading pays ----------------------------------------------------------------------------------------------


def test_reading_that_takes_longer_than_computing_is_left_out() -> None:
    """Measured times decide for each length; now and then a read is tried again."""
    known = BreakEven()
    for _ in range(20):
        known.looked_up(10, 0.002)
        known.looked_up(1_000, 0.003)
        assert known.pays(10) and known.pays(1_000)  # no computing time is known
    for _ in range(20):
        known.computed(10, 0.001)
        known.computed(1_000, 0.1)
    assert sum(known.pays(10) for _ in range(320)) == 10 and known.pays(1_000)
    assert (known.least_tokens, known.patience_s(10), known.patience_s(1_000)) == (16, 0.005, pytest.approx(0.1))
    given = BreakEven(least_tokens=5)
    assert (given.pays(4), given.pays(5)) == (False, True)
