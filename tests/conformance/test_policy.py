"""Every policy against an oracle that remembers everything, and what is special about each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.policies import POLICIES, TTL, Divergence, Policy, Staleness
from tests.conformance.outside import MostRecent

TTL_S = 10.0
HALF_LIFE_S = 7.0  # no multiple of the steps in which time passes here: sums of different matches never tie
LIMIT, WEIGHT = 0.15, 0.25


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
    matched_s: list[float]
    average: float = 0.0


@dataclass
class Oracle:
    """Remembers everything; `rank` says who leaves first."""

    rank: Callable[[Record], Any]
    clock: Clock
    lives_s: float
    limit: float
    records: dict[str, Record] = field(default_factory=dict)
    tick: int = 0

    def on_put(self, key: str) -> None:
        self.tick += 1
        n_uses = self.records[key].n_uses if key in self.records else 0
        self.records[key] = Record(self.tick, self.tick, n_uses + 1, self.clock(), [self.clock()])

    def on_hit(self, key: str) -> None:
        self.tick += 1
        if key in self.records:
            self.records[key].used = self.tick
            self.records[key].n_uses += 1
            self.records[key].matched_s.append(self.clock())

    def on_check(self, key: str, divergence: float) -> None:
        if key in self.records:
            self.records[key].average += WEIGHT * (divergence - self.records[key].average)

    def on_remove(self, key: str) -> None:
        self.records.pop(key, None)

    def order(self) -> list[str]:
        return sorted(self.records, key=lambda key: self.rank(self.records[key]))

    def expired(self) -> set[str]:
        return {
            key
            for key, record in self.records.items()
            if self.clock() - record.put_s >= self.lives_s or record.average > self.limit
        }


def score(record: Record) -> float:
    """Sum of its matches, each halved once a half-life; seen from a fixed time, which changes no order."""
    return sum(2 ** (matched_s / HALF_LIFE_S) for matched_s in record.matched_s)


RANKS: dict[str, Callable[[Record], Any]] = {
    "divergence": lambda record: (-record.average, record.used),
    "fifo": lambda record: record.put,
    "lfu": lambda record: (record.n_uses, record.used),
    "lru": lambda record: record.used,
    "staleness": lambda record: (round(score(record), 3), record.put),
    "ttl": lambda record: record.put,
    "outside": lambda record: -record.used,
}


def make(name: str, clock: Clock) -> Policy:
    if name == "ttl":
        return TTL(TTL_S, now=clock)
    if name == "staleness":
        return Staleness(HALF_LIFE_S, now=clock)
    if name == "divergence":
        return Divergence(limit=LIMIT, weight=WEIGHT)
    return MostRecent() if name == "outside" else POLICIES[name]()


def victims(policy: Policy) -> list[str]:
    """Evict everything, in order; nothing is left then."""
    order: list[str] = []
    try:
        while True:
            order.append(policy.victim())
            policy.on_remove(order[-1])
    except KeyError as error:
        assert "empty" in str(error) and policy.expired() == []
        return order


VERBS = ["put", "put", "hit", "hit", "check", "remove", "evict", "wait"]
STEPS = st.lists(st.tuples(st.sampled_from(VERBS), st.sampled_from("abcdef")), min_size=20, max_size=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*RANKS, *POLICIES}))
@settings(deadline=None)
@given(steps=STEPS)
def test_any_sequence_agrees_with_the_oracle(name: str, steps: list[tuple[str, str]]) -> None:
    """Steps may name keys that are not held; to ask changes nothing."""
    clock = Clock()
    policy = make(name, clock)
    oracle = Oracle(
        RANKS[name], clock, TTL_S if name == "ttl" else math.inf, LIMIT if name == "divergence" else math.inf
    )
    for verb, key in steps:
        if verb == "put":
            policy.on_put(key, 1)
            oracle.on_put(key)
        elif verb == "hit":
            policy.on_hit(key)
            oracle.on_hit(key)
        elif verb == "check":
            divergence = 0.3 * "abcdef".index(key)  # from faithful to far off
            assert name == "divergence" or not policy.should_check(key)
            policy.on_check(key, divergence)
            oracle.on_check(key, divergence)
        elif verb == "wait":
            clock.time_s += TTL_S / 3
        else:
            gone = next(iter(oracle.order()), key) if verb == "evict" else key
            policy.on_remove(gone)
            oracle.on_remove(gone)
        assert {*policy.expired()} == oracle.expired()
        assert not oracle.records or policy.victim() == oracle.order()[0]
    assert victims(policy) == oracle.order()


def test_ttl_has_a_clock_of_its_own() -> None:
    policy = TTL(3600)
    policy.on_put("a", 1)
    assert policy.expired() == []
    brief = TTL(1e-9)
    brief.on_put("a", 1)
    while not brief.expired():  # ends with the next tick of the clock
        pass


@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("make_policy", [TTL, Staleness])
def test_a_time_that_makes_no_sense_is_refused(make_policy: Callable[[float], Policy], number: float) -> None:
    with pytest.raises(ValueError, match=f"got {number}"):
        make_policy(number)


def test_scores_do_not_overflow() -> None:
    """Ten years in half-lives of a millisecond."""
    clock = Clock()
    policy = Staleness(1e-3, now=clock)
    policy.on_put("a", 1)
    clock.time_s += 10 * 365 * 86400
    policy.on_put("b", 1)
    policy.on_hit("a")
    policy.on_hit("a")
    assert victims(policy) == ["b", "a"]
    with pytest.raises(ValueError, match=r"at least 0\.001 and finite, got 0\.0001"):
        Staleness(1e-4)


@pytest.mark.parametrize("name", ["staleness", "divergence"])
def test_a_ranking_does_not_grow_with_what_happened(name: str) -> None:
    clock = Clock()
    policy = make(name, clock)
    for i in range(2000):
        clock.time_s += 1
        policy.on_remove(str(i - 5))
        policy.on_put(str(i), 1)
        policy.on_hit(str(i - 2))
        policy.on_check(str(i), 0.1 * (i % 2))
    assert len(policy._ranking._heap) <= 2 * 5 + 1
    assert len(victims(policy)) == 5


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.2, 160, 240), (1.0, 1000, 1000)])
def test_checks_are_drawn_at_their_rate_and_seeded(rate: float, least: int, most: int) -> None:
    drawn = [[policy.should_check("a") for _ in range(1000)] for policy in (Divergence(rate), Divergence(rate))]
    assert drawn[0] == drawn[1]
    assert least <= sum(drawn[0]) <= most
    if 0 < rate < 1:
        assert drawn[0] != [Divergence(rate, seed=1).should_check("a") for _ in range(1000)]


@pytest.mark.parametrize("divergence", [-0.1, math.nan])
def test_what_is_no_divergence_is_refused(divergence: float) -> None:
    with pytest.raises(ValueError, match=f"divergence={divergence}"):
        Divergence().on_check("a", divergence)
