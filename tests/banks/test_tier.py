"""A store behind memory: what fails is a miss, what is too much is left out, and purges reach every cache."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from llmcache import StoreError
from llmcache.banks import tier as tier_module
from llmcache.banks import write_behind
from llmcache.banks.generations import NO_GENERATION
from llmcache.banks.stores import Bytes, Events, Put, StoreKey
from llmcache.banks.stores.seal import Opened, Seal
from llmcache.banks.tier import BreakEven, Tier
from llmcache.counters import Counters
from llmcache.request.rows import Scope
from tests.conformance.outside import Shared

SCOPE = Scope("a", "weights", "float32", "eager")


class Frail(Shared):
    """Fails, or waits, when it is told to."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.fails, self.may_write = False, threading.Event()
        self.may_write.set()
        self.n_calls = 0

    def check(self) -> None:
        self.n_calls += 1
        if self.fails:
            raise StoreError("out of order")

    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        self.check()
        return super().get_many(keys, deadline)

    def put_many(self, puts: Sequence[Put]) -> None:
        self.check()
        assert self.may_write.wait(20)
        super().put_many(puts)

    def contains_prefix(self, keys: Sequence[StoreKey]) -> int:
        self.check()
        return super().contains_prefix(keys)

    def events(self, since: str | None) -> Events:
        self.check()
        return super().events(since)

    def generations(self, namespaces: Sequence[str]) -> list[int]:
        self.check()
        return super().generations(namespaces)

    def ping(self) -> None:
        self.check()
        super().ping()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Tier, Frail]]]:
    """Makes tiers of one place, with their stores."""
    made: list[Tier] = []

    def act(seal: Seal | None = None, settings: str = "") -> tuple[Tier, Frail]:
        store = Frail(request.node.name)
        made.append(Tier(store, seal or Seal(), settings, Counters()))
        return made[-1], store

    yield act
    for tier in made:
        tier.close()
    Shared.places.pop(request.node.name, None)


def put(tier: Tier, *names: str, scope: Scope = SCOPE) -> None:
    for name in names:
        tensors = {"h": torch.full((4,), float(len(name)))}
        tier.put(scope, name, tensors, {"name": name}, tier.generation(scope.namespace))
    tier.drain()


def get(tier: Tier, *names: str, scope: Scope = SCOPE) -> list[str]:
    return [value.about["name"] for value in tier.fetch(scope, names, 1) if value is not None]


def forgotten(tier: Tier) -> list[str | None]:
    told: list[str | None] = []
    tier.follow(told.append)
    return told


def test_what_one_puts_another_finds(make: Callable[..., tuple[Tier, Frail]]) -> None:
    (one, _), (other, _) = make(), make()
    put(one, "x", "xy")
    assert get(other, "x", "none", "xy") == ["x", "xy"]
    assert other.held(SCOPE, ["x", "xy", "none", "x"]) == 2
    stats = other.stats()
    assert (stats.n_asked, stats.n_found, stats.n_written, stats.n_values) == (3, 2, 0, 2)
    put(other, "x")
    assert (other.stats().n_written, other.stats().n_dropped) == (0, 0)  # it is there


@pytest.mark.parametrize("what", ["weights", "namespace", "dtype", "attention", "settings"])
def test_what_differs_in_anything_is_not_found(make: Callable[..., tuple[Tier, Frail]], what: str) -> None:
    (one, _), (other, _) = make(), make(settings="x" * (what == "settings"))
    put(one, "x")
    fields = {name: getattr(SCOPE, name) for name in SCOPE.__slots__} | ({what: "other"} if what != "settings" else {})
    assert get(other, "x", scope=Scope(**fields)) == []


@pytest.mark.parametrize("seal", [Seal(b"other"), Seal(key=bytes(32))])
def test_values_of_another_secret_are_counted_misses(make: Callable[..., tuple[Tier, Frail]], seal: Seal) -> None:
    (one, _), (other, _) = make(Seal(b"secret")), make(seal)
    put(one, "x")
    assert get(other, "x") == []
    assert other.stats().n_mismatched == {"damaged": 1}
    assert other._behind.counters.snapshot().errors == 0


def test_values_of_a_later_format_and_of_other_keys_are_counted_misses(make: Callable[..., tuple[Tier, Frail]]) -> None:
    tier, store = make()
    put(tier, "x", "xy")
    values = store.place.values
    (a, (generation, first)), (b, (_, second)) = values.items()
    values[a] = generation, second
    values[b] = generation, second[:4] + b"\3\0" + second[6:]
    assert get(tier, "x", "xy") == []
    assert tier.stats().n_mismatched == {"other_key": 1, "other_format": 1}
    values[a] = generation, first
    assert get(tier, "x") == ["x"]


def test_a_store_that_fails_is_left_alone_until_it_answers(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "_REST_S", 0.001)
    tier, store = make()
    put(tier, "x")
    store.fails = True
    for _ in range(5):
        assert get(tier, "x") == [] and tier.held(SCOPE, ["x"]) == 0
    assert not tier.stats().is_answering
    assert tier._behind.counters.snapshot().errors == 3  # the others did not ask
    put(tier, "xy")
    assert tier.stats().n_dropped == 1
    store.fails = False
    end = time.monotonic() + 20
    while not tier.stats().is_answering and time.monotonic() < end:
        time.sleep(0.001)
    put(tier, "xy")
    assert get(tier, "x", "xy") == ["x", "xy"]


def test_a_write_that_goes_on_to_fail_drops_what_it_was_to_write(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "_REST_S", 0.001)
    tier, store = make()
    tier.generation("a")
    store.fails, store.n_calls = True, 0
    put(tier, "x")
    assert store.n_calls == 3 and tier.lacks(SCOPE, "x") and not tier.lacks(SCOPE, "x")  # that is asked once
    store.fails = False
    time.sleep(0.01)
    put(tier, "xy")
    assert get(tier, "x", "xy") == ["xy"]
    assert (tier.stats().n_written, tier.stats().n_dropped) == (1, 1)
    assert tier._behind.counters.snapshot().errors == 1


def test_a_write_that_fails_once_is_tried_again(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, store = make()
    failing = iter([StoreError("out of order")])

    def put_many(puts: Sequence[Put]) -> None:
        for error in failing:
            raise error
        Shared.put_many(store, puts)

    monkeypatch.setattr(store, "put_many", put_many)
    put(tier, "x")
    assert get(tier, "x") == ["x"]
    assert (tier.stats().n_written, tier.stats().n_dropped) == (1, 0)


def test_reads_that_fail_end_no_write(make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch) -> None:
    tier, store = make()
    tier.generation("a")

    def fail(*_: object) -> None:
        raise StoreError("no answer in time")

    with monkeypatch.context() as patched:
        patched.setattr(write_behind, "_REST_S", 60.0)  # until it is pinged
        patched.setattr(store, "get_many", fail)
        for _ in range(5):
            assert get(tier, "x") == []
        assert not tier.stats().is_answering
        put(tier, "x")
        put(tier, "xy", scope=Scope("new", "weights", "float32", "eager"))  # whose number is asked for all the same
    assert len(store.place.values) == 2 and tier.stats().n_dropped == 0


def test_what_was_put_before_the_number_was_known_is_offered_again(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, store = make()
    with monkeypatch.context() as patched:
        patched.setattr(store, "generation", unknown)
        put(tier, "x")
    assert (tier.stats().n_written, tier.stats().n_dropped) == (0, 1)
    assert tier.has_dropped and tier.lacks(SCOPE, "x") and not tier.has_dropped


def test_putting_never_waits_and_what_is_too_much_is_dropped(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "MAX_WAITING_BYTES", 100)
    tier, store = make()
    store.may_write.clear()
    for i in range(10):
        tier.put(SCOPE, f"{i}", {"h": torch.zeros(5)}, {"name": f"{i}"}, tier.generation("a"))
    store.may_write.set()
    tier.drain()
    stats = tier.stats()
    assert stats.n_written + stats.n_dropped == 10
    assert stats.n_written == 5 and get(tier, *map(str, range(10))) == [*"01234"]


def test_a_purge_reaches_who_follows(make: Callable[..., tuple[Tier, Frail]]) -> None:
    (one, _), (other, _) = make(), make()
    put(one, "x")
    put(other, "xy", scope=Scope("b", "weights", "float32", "eager"))
    assert forgotten(other) == []
    before, told = other.generation("a"), list[str | None]()
    one.remove("a", told.append)
    assert told == ["a"] and forgotten(one) == []
    assert get(one, "x") == get(other, "x") == []
    other.put(SCOPE, "late", {"h": torch.zeros(1)}, {"name": "late"}, other.generation("a"))  # it has not looked yet
    other.drain()
    assert get(other, "late") == []
    assert forgotten(other) == ["a"] and forgotten(other) == []
    assert other.generation("a") == one.generation("a") != before
    put(other, "again")
    assert get(one, "again") == ["again"]
    one.remove(None, told.append)
    assert told == ["a", None] and forgotten(other) == [None]


def test_where_events_are_missing_namespaces_that_moved_are_forgotten(make: Callable[..., tuple[Tier, Frail]]) -> None:
    (one, _), (other, _) = make(), make()
    for name in "abc":
        other.generation(name)
    one.remove("b", lambda name: None)
    other._cursor = "no cursor"
    assert forgotten(other) == ["b"]
    assert forgotten(other) == []


def unknown(namespace: str) -> int:
    raise StoreError("out of order")


def test_what_came_before_a_generation_was_known_is_forgotten_when_it_can_be_asked_for(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, _), (other, store) = make(), make()
    with monkeypatch.context() as patched:
        patched.setattr(store, "generation", unknown)
        before = other.generation("a")
        assert other.generation("a") == before <= NO_GENERATION
        assert forgotten(other) == []
    one.remove("a", lambda name: None)
    assert other.generation("a") == before  # memory may hold what was purged: it has no number that the store knows
    other._cursor = "no cursor"
    assert forgotten(other) == ["a"]
    assert other.generation("a") == one.generation("a")
    assert forgotten(other) == []


def test_a_generation_that_was_not_known_settles_when_no_purge_was_told(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, _), (other, store) = make(), make()
    with monkeypatch.context() as patched:
        patched.setattr(store, "generation", unknown)
        other.generation("a")
        assert forgotten(other) == []
    assert forgotten(other) == forgotten(other) == []
    assert other.generation("a") <= NO_GENERATION  # stores may tell late
    monkeypatch.setattr(tier_module, "_LAG_S", 0.0)
    assert forgotten(other) == []
    assert other.generation("a") == one.generation("a")
    put(other, "x")
    assert get(one, "x") == ["x"]


def test_generations_that_are_not_known_differ_before_and_after_a_purge(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, store), (other, _) = make(), make()
    monkeypatch.setattr(store, "generation", unknown)
    before = one.generation("a")
    other.remove("a", lambda name: None)
    assert forgotten(one) == ["a"]
    assert before != one.generation("a") <= NO_GENERATION


def test_a_generation_that_is_asked_for_during_a_purge_is_not_that_from_before(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, store), (other, _) = make(), make()
    one.generation("b")

    def late(namespace: str) -> int:
        found = Shared.generation(store, namespace)
        other.remove(None, lambda name: None)
        assert forgotten(one) == [None]
        return found

    with monkeypatch.context() as patched:
        patched.setattr(store, "generation", late)
        assert one.generation("a") <= NO_GENERATION
    assert one.generation("a") == other.generation("a")


def test_while_it_is_forgotten_no_generation_is_alike(make: Callable[..., tuple[Tier, Frail]]) -> None:
    tier, _ = make()
    tier.generation("a")
    seen: list[int] = []
    tier.remove("a", lambda name: seen.extend(tier.generation("a") for _ in range(3)))
    assert len({*seen, tier.generation("a")}) == len(seen) + 1 and max(seen) <= NO_GENERATION


def test_what_is_loaded_is_compared_with_the_store_at_once_or_once_it_answers(
    make: Callable[..., tuple[Tier, Frail]],
) -> None:
    (one, _), (other, store) = make(), make()
    saved: dict[str, int | None] = {name: one.generation(name) for name in "abc"} | {"unknown": None}
    one.remove("a", lambda name: None)
    forgotten(other)
    store.fails = True
    with other.loading(saved) as gone:
        assert gone == {"unknown"}
    del saved["unknown"]
    assert forgotten(other) == [] and other.generations() == saved
    store.fails = False
    one.remove("b", lambda name: None)
    assert sorted(forgotten(other)) == ["a", "b"]
    assert other.generations() == {"c": saved["c"]} and forgotten(other) == []
    (third, _) = make()
    with third.loading(saved) as gone:
        assert gone == {"a", "b"}
    assert third.generations() == {"c": saved["c"]} and forgotten(third) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_forgetting_what_was_loaded_is_tried_again(
    make: Callable[..., tuple[Tier, Frail]], error: type[BaseException]
) -> None:
    (one, _), (other, store) = make(), make()
    saved: dict[str, int | None] = {name: one.generation(name) for name in "ab"}
    one.remove("a", lambda name: None)
    one.remove("b", lambda name: None)
    forgotten(other)
    store.fails = True
    with other.loading(saved):
        pass
    store.fails = False

    def fail(namespace: str | None) -> None:
        raise error

    with pytest.raises(error):
        other.follow(fail)
    assert sorted(forgotten(other)) == ["a", "b"] and other.generations() == {}


@pytest.mark.parametrize("numbers", [[], [1, 2], None, "ab"], ids=["too few", "too many", "none", "text"])
def test_what_was_loaded_is_forgotten_where_the_store_is_there_and_does_not_say(
    make: Callable[..., tuple[Tier, Frail]], numbers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, store = make()
    monkeypatch.setattr(store, "generations", lambda namespaces: numbers)
    with tier.loading({"a": tier.generation("a")}) as gone:
        assert not gone
    for _ in range(5):
        assert forgotten(tier) == []
    monkeypatch.setattr(tier_module, "_LAG_S", 0.0)
    assert forgotten(tier) == ["a"] and forgotten(tier) == []


def test_numbers_are_asked_for_after_failures_too_and_who_pings_decides_when_all_is_well(
    make: Callable[..., tuple[Tier, Frail]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "_REST_S", 60.0)
    tier, store = make()
    number, store.fails = tier.generation("a"), True
    while tier.is_answering or not tier._behind.breaker.is_open:
        list(tier.fetch(SCOPE, ["x"], 8))
    store.fails = False
    with tier.loading({"a": number, "b": number + 1}) as gone:
        assert gone == {"b"} and not tier.is_answering
    assert tier._behind.breaker.is_open


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_forgetting_that_fails_is_tried_again(
    make: Callable[..., tuple[Tier, Frail]], error: type[BaseException]
) -> None:
    (one, _), (other, _) = make(), make()
    other.generation("a")
    one.remove("a", lambda name: None)

    def fail(namespace: str | None) -> None:
        raise error

    with pytest.raises(error):
        other.follow(fail)
    assert other.generation("a") <= NO_GENERATION
    assert "a" in forgotten(other) and other.generation("a") == one.generation("a")


def test_what_was_announced_before_a_purge_is_not_heard_after_it(make: Callable[..., tuple[Tier, Frail]]) -> None:
    (one, _), (other, _) = make(), make()

    class Heard(list[str]):
        def hear(self, told: Sequence[tuple[StoreKey, Bytes]]) -> None:
            self.extend(key.name for key, _ in told)

    other.generation("a")
    one.announce(SCOPE, "x", {"h": torch.zeros(1)}, {}, one.generation("a"))
    one.drain()
    one.remove("a", lambda name: None)
    heard = Heard()
    other.follow(lambda name: other.generation("a"), heard.hear)  # a call asks for it meanwhile
    other.drain()
    assert heard == []


def test_what_a_purge_could_not_remove_is_an_error_of_the_purge(make: Callable[..., tuple[Tier, Frail]]) -> None:
    tier, store = make()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.ping()
    store.is_open = True

    def fail(namespace: str | None) -> int:
        raise StoreError("out of order")

    store.remove = fail  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="out of order"):
        tier.remove("a", lambda name: None)


def test_a_purge_reaches_the_memory_though_the_store_cannot_tell_of_it(make: Callable[..., tuple[Tier, Frail]]) -> None:
    tier, store = make()
    put(tier, "x")
    store.fails, told = True, list[str | None]()
    tier.remove("a", told.append)
    assert told == ["a"] and store.stats().n_values == 0


def test_what_is_discarded_is_gone_and_asked_for_anew(make: Callable[..., tuple[Tier, Frail]]) -> None:
    tier, _ = make()
    before = tier.generation("a")
    put(tier, "x")
    tier.discard("a")
    assert get(tier, "x") == [] and forgotten(tier) == []  # memory has nothing of it
    assert tier.generation("a") != before


def test_what_was_purged_before_the_store_could_be_asked_is_forgotten(make: Callable[..., tuple[Tier, Frail]]) -> None:
    (one, _), (other, store) = make(), make()
    store.fails = True
    late = Tier(store, Seal(), "", Counters())  # opened while the store does not answer
    before = late.generation("a")
    one.remove("a", lambda name: None)
    store.fails = False
    assert forgotten(late) == ["a"] and forgotten(late) == []
    assert late.generation("a") == other.generation("a") != before


def test_once_a_store_has_failed_what_waits_is_dropped(make: Callable[..., tuple[Tier, Frail]]) -> None:
    tier, store = make()
    generation = tier.generation("a")
    store.may_write.clear()
    store.n_calls = 0
    for i in range(100):
        tier.put(SCOPE, f"{i}", {"h": torch.zeros(5)}, {"name": f"{i}"}, generation)
        while store.n_calls < 3:  # until the first one is being put
            time.sleep(0.001)
    store.fails, store.n_calls = True, 0
    store.may_write.set()
    tier.drain()
    assert (tier.stats().n_written, tier.stats().n_dropped) == (0, 100)
    assert store.n_calls < 20


def test_what_is_late_is_not_read(make: Callable[..., tuple[Tier, Frail]]) -> None:
    class Slow(Seal):
        def open(self, key: StoreKey, value: Bytes) -> Opened:
            time.sleep(0.02)
            return super().open(key, value)

    tier, _ = make(Slow())
    put(tier, *"abc")
    tier.break_even = BreakEven(token_s=0.0)
    assert len(get(tier, *"abc")) <= 1
    tier.break_even = BreakEven(token_s=60.0)
    assert get(tier, *"abc") == [*"abc"]


def test_closing_writes_what_waits(make: Callable[..., tuple[Tier, Frail]]) -> None:
    tier, store = make()
    for i in range(50):
        tier.put(SCOPE, f"{i}", {"h": torch.zeros(5)}, {}, tier.generation("a"))
    tier.close()
    tier.close()
    assert len(store.place.values) == 50 and not store.is_open
    tier.put(SCOPE, "late", {"h": torch.zeros(5)}, {}, 0)
    assert tier.stats().n_dropped == 1


def test_a_store_is_closed_when_its_cache_is_gone(make: Callable[..., tuple[Tier, Frail]]) -> None:
    store = Frail("gone")
    tier = Tier(store, Seal(), "", Counters())
    put(tier, "x")
    del tier
    assert not store.is_open
    del Shared.places["gone"]


@pytest.mark.parametrize(
    ("least", "n_tokens", "pays"), [(0, 0, True), (16, 15, False), (16, 16, True), (None, 10**6, False)]
)
def test_short_values_are_not_read(least: int | None, n_tokens: int, pays: bool) -> None:
    assert BreakEven(least).pays(n_tokens) is pays


def test_a_read_may_take_as_long_as_computing() -> None:
    assert BreakEven(0).patience_s(10**6) == 1.0
    assert BreakEven(0, 0.01).patience_s(512) == pytest.approx(5.12)
    assert BreakEven(0, 1e-6).patience_s(1) == 0.005
