"""Every policy against an oracle that sorts a log, and what is special about each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.policies import LFU, LRU, POLICIES, TTL, Policy

TTL_S = 10.0


@dataclass
class Clock:
    """Time that passes when told."""

    time_s: float = 100.0

    def __call__(self) -> float:
        return self.time_s


@dataclass
class Record:
    """What happened to a key, in ticks of the oracle's own count."""

    put: int
    used: int
    n_uses: int
    put_s: float


@dataclass
class Oracle:
    """Remembers everything; `rank` says who leaves first."""

    rank: Callable[[Record], Any]
    clock: Clock
    lives_s: float = float("inf")
    records: dict[str, Record] = field(default_factory=dict)
    tick: int = 0

    def on_put(self, key: str) -> None:
        self.tick += 1
        n_uses = self.records[key].n_uses if key in self.records else 0
        self.records[key] = Record(self.tick, self.tick, n_uses + 1, self.clock())

    def on_hit(self, key: str) -> None:
        self.tick += 1
        if key in self.records:
            self.records[key].used = self.tick
            self.records[key].n_uses += 1

    def on_remove(self, key: str) -> None:
        self.records.pop(key, None)

    def victim(self) -> str | None:
        return min(self.records, key=lambda key: self.rank(self.records[key]), default=None)

    def expired(self) -> set[str]:
        return {key for key, record in self.records.items() if self.clock() - record.put_s >= self.lives_s}


RANKS: dict[str, Callable[[Record], Any]] = {
    "fifo": lambda record: record.put,
    "lfu": lambda record: (record.n_uses, record.used),
    "lru": lambda record: record.used,
    "ttl": lambda record: record.put,
}


def make(name: str, clock: Clock) -> tuple[Policy, Oracle]:
    """A policy and its oracle."""
    if name == "ttl":
        return TTL(TTL_S, now=clock), Oracle(RANKS[name], clock, TTL_S)
    return POLICIES[name](), Oracle(RANKS[name], clock)


def victims(policy: Policy) -> list[str]:
    """Evict everything, in order."""
    order: list[str] = []
    while True:
        try:
            order.append(policy.victim())
        except KeyError:
            return order
        policy.on_remove(order[-1])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest, clock: Clock) -> Policy:
    return make(request.param, clock)[0]


def test_every_policy_has_an_oracle() -> None:
    assert sorted(RANKS) == sorted(POLICIES)


def test_empty_has_no_victim(policy: Policy) -> None:
    for _ in "never filled", "emptied":
        with pytest.raises(KeyError, match="empty"):
            policy.victim()
        assert policy.expired() == []
        policy.on_put("a", 1)
        assert policy.victim() == "a"
        policy.on_remove("a")


def test_each_key_leaves_once(policy: Policy) -> None:
    for key in "abcde" * 2:
        policy.on_put(key, 1)
    policy.on_hit("c")
    policy.on_remove("b")
    assert sorted(victims(policy)) == ["a", "c", "d", "e"]


def test_without_hits_the_oldest_leaves_first(policy: Policy) -> None:
    for key in "bca":
        policy.on_put(key, 1)
    assert victims(policy) == ["b", "c", "a"]


def test_a_new_put_is_a_new_start(policy: Policy) -> None:
    for key in "abca":
        policy.on_put(key, 1)
    assert victims(policy) == ["b", "c", "a"]


def test_asking_changes_nothing(policy: Policy, clock: Clock) -> None:
    for key in "abc":
        policy.on_put(key, 1)
    clock.time_s += TTL_S
    first = policy.victim(), policy.expired()
    assert [(policy.victim(), policy.expired()) for _ in range(3)] == [first] * 3
    assert victims(policy) == ["a", "b", "c"]


def test_unknown_keys_are_ignored(policy: Policy) -> None:
    policy.on_hit("x")
    policy.on_remove("x")
    policy.on_put("a", 1)
    policy.on_hit("x")
    policy.on_remove("x")
    assert victims(policy) == ["a"]


def test_a_removed_key_starts_anew(policy: Policy) -> None:
    policy.on_put("a", 1)
    for _ in range(3):
        policy.on_hit("a")
    policy.on_remove("a")
    for key in "bca":
        policy.on_put(key, 1)
    policy.on_hit("b")
    policy.on_hit("c")
    policy.on_remove("b")
    policy.on_remove("c")
    policy.on_put("d", 1)
    assert victims(policy) == ["a", "d"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "hit", "hit", "remove", "evict", "wait"]), st.sampled_from("abcdef")),
    max_size=50,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(deadline=None)
@given(steps=STEPS)
def test_any_sequence_agrees_with_the_oracle(name: str, steps: list[tuple[str, str]]) -> None:
    clock = Clock()
    policy, oracle = make(name, clock)
    for verb, key in steps:
        if verb == "put":
            policy.on_put(key, 1)
            oracle.on_put(key)
        elif verb == "hit":
            policy.on_hit(key)
            oracle.on_hit(key)
        elif verb == "wait":
            clock.time_s += TTL_S / 3
        else:
            gone = oracle.victim() if verb == "evict" else key
            policy.on_remove(gone or key)
            oracle.on_remove(gone or key)
        assert set(policy.expired()) == oracle.expired()
        if oracle.records:
            assert policy.victim() == oracle.victim()
    left = len(oracle.records)
    assert len(victims(policy)) == left


def test_lru_keeps_what_is_hit() -> None:
    policy = LRU()
    for key in "abc":
        policy.on_put(key, 1)
    policy.on_hit("a")
    assert victims(policy) == ["b", "c", "a"]


@pytest.mark.parametrize("name", ["fifo", "ttl"])
def test_a_hit_saves_nobody_from_age(name: str, clock: Clock) -> None:
    policy, _ = make(name, clock)
    for key in "abc":
        policy.on_put(key, 1)
    policy.on_hit("a")
    assert victims(policy) == ["a", "b", "c"]


def test_lfu_counts_uses_then_looks_at_the_last() -> None:
    policy = LFU()
    for key in "abcd":
        policy.on_put(key, 1)
    for key in "aabbcd":  # a, b three uses; c, d two
        policy.on_hit(key)
    policy.on_hit("c")  # c three as well, and the last of these
    assert victims(policy) == ["d", "a", "b", "c"]


def test_lfu_keeps_no_empty_bucket() -> None:
    policy = LFU()
    for key in "ab":
        policy.on_put(key, 1)
        for _ in range(100):
            policy.on_hit(key)
    assert policy._ring.higher is policy._ring.lower
    assert policy._ring.higher.n_uses == 101
    victims(policy)
    assert policy._ring.higher is policy._ring


def test_ttl_expires_at_its_age_whatever_was_hit(clock: Clock) -> None:
    policy = TTL(TTL_S, now=clock)
    policy.on_put("a", 1)
    clock.time_s += 4
    policy.on_put("b", 1)
    clock.time_s += 5.9
    policy.on_hit("a")
    assert policy.expired() == []
    clock.time_s += 0.2
    assert policy.expired() == ["a"]
    clock.time_s += 4
    assert policy.expired() == ["a", "b"]
    policy.on_put("a", 1)
    assert policy.expired() == ["b"]
    policy.on_remove("b")
    assert policy.expired() == []
    clock.time_s += TTL_S
    assert policy.expired() == ["a"]


def test_ttl_has_a_clock_of_its_own() -> None:
    policy = TTL(3600)
    policy.on_put("a", 1)
    assert policy.expired() == []
    brief = TTL(1e-9)
    brief.on_put("a", 1)
    while not brief.expired():  # ends with the next tick of the clock
        pass


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
def test_ttl_refuses_an_age_that_makes_no_sense(ttl_s: float) -> None:
    with pytest.raises(ValueError, match=f"got {ttl_s}"):
        TTL(ttl_s)
