"""Every policy against an oracle that sorts a log, and what is special about each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.policies import LFU, LRU, POLICIES, TTL, Divergence, Policy, Staleness
from tests.conformance.outside import MostRecent

TTL_S = 10.0
HALF_LIFE_S = 7.0  # no multiple of the steps in which time passes here: sums of different matches never tie
LIMIT = 0.15


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
    lives_s: float = float("inf")
    limit: float = 2.0
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
            self.records[key].average = (self.records[key].average + divergence) / 2

    def on_remove(self, key: str) -> None:
        self.records.pop(key, None)

    def victim(self) -> str | None:
        return min(self.records, key=lambda key: self.rank(self.records[key]), default=None)

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
}


ALL = {**POLICIES, "outside": MostRecent}


def make(name: str, clock: Clock) -> Policy:
    """A policy; those that are not ours must do without settings."""
    if name == "ttl":
        return TTL(TTL_S, now=clock)
    if name == "staleness":
        return Staleness(HALF_LIFE_S, now=clock)
    return Divergence(limit=LIMIT) if name == "divergence" else ALL[name]()


def oracle_of(name: str, clock: Clock) -> Oracle:
    """What one of our policies has to agree with."""
    lives_s = TTL_S if name == "ttl" else float("inf")
    return Oracle(RANKS[name], clock, lives_s, LIMIT if name == "divergence" else 2.0)


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


@pytest.fixture(params=sorted(ALL))
def policy(request: pytest.FixtureRequest, clock: Clock) -> Policy:
    """Any policy: what follows from the base class."""
    return make(request.param, clock)


@pytest.fixture(params=sorted(RANKS))
def ours(request: pytest.FixtureRequest, clock: Clock) -> Policy:
    """One of ours: they agree on who leaves first among those that were not hit."""
    return make(request.param, clock)


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


def test_without_hits_the_oldest_leaves_first(ours: Policy) -> None:
    for key in "bca":
        ours.on_put(key, 1)
    assert victims(ours) == ["b", "c", "a"]


def test_a_new_put_is_a_new_start(ours: Policy) -> None:
    for key in "abca":
        ours.on_put(key, 1)
    assert victims(ours) == ["b", "c", "a"]


def test_asking_changes_nothing(policy: Policy, clock: Clock) -> None:
    for key in "abc":
        policy.on_put(key, 1)
    clock.time_s += TTL_S
    first = policy.victim(), policy.expired()
    assert [(policy.victim(), policy.expired()) for _ in range(3)] == [first] * 3
    order = victims(policy)
    assert order[0] == first[0] and sorted(order) == ["a", "b", "c"]


def test_unknown_keys_are_ignored(policy: Policy) -> None:
    policy.on_hit("x")
    policy.on_check("x", 1.0)
    policy.on_remove("x")
    policy.on_put("a", 1)
    policy.on_hit("x")
    policy.on_check("x", 1.0)
    policy.on_remove("x")
    assert policy.expired() == []
    assert victims(policy) == ["a"]


def test_a_removed_key_starts_anew(ours: Policy) -> None:
    ours.on_put("a", 1)
    for _ in range(3):
        ours.on_hit("a")
    ours.on_remove("a")
    for key in "bca":
        ours.on_put(key, 1)
    ours.on_hit("b")
    ours.on_hit("c")
    ours.on_remove("b")
    ours.on_remove("c")
    ours.on_put("d", 1)
    assert victims(ours) == ["a", "d"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "hit", "hit", "check", "remove", "evict", "wait"]), st.sampled_from("abcdef")
    ),
    max_size=50,
)


@pytest.mark.parametrize("name", sorted(ALL))
@settings(deadline=None)
@given(steps=STEPS)
def test_after_any_sequence_each_key_leaves_once(name: str, steps: list[tuple[str, str]]) -> None:
    clock, held = Clock(), set[str]()
    policy = make(name, clock)
    for verb, key in steps:
        if verb == "put":
            policy.on_put(key, 1)
            held.add(key)
        elif verb == "hit":
            policy.on_hit(key)
        elif verb == "check":
            policy.on_check(key, 0.5)
        elif verb == "wait":
            clock.time_s += TTL_S / 3
        elif held:
            gone = policy.victim() if verb == "evict" else key
            policy.on_remove(gone)
            held.discard(gone)
        assert {*policy.expired()} <= held
    order = victims(policy)
    assert {*order} == held and len(order) == len(held)


@pytest.mark.parametrize("name", sorted(RANKS))
@settings(deadline=None)
@given(steps=STEPS)
def test_any_sequence_agrees_with_the_oracle(name: str, steps: list[tuple[str, str]]) -> None:
    clock = Clock()
    policy, oracle = make(name, clock), oracle_of(name, clock)
    for verb, key in steps:
        if verb == "put":
            policy.on_put(key, 1)
            oracle.on_put(key)
        elif verb == "hit":
            policy.on_hit(key)
            oracle.on_hit(key)
        elif verb == "check":
            divergence = 0.1 * "abcdef".index(key)  # from faithful to far off
            policy.on_check(key, divergence)
            oracle.on_check(key, divergence)
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
    policy = make(name, clock)
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


def test_a_match_counts_half_after_a_half_life(clock: Clock) -> None:
    """Three old matches and one new one, in either order of age: the score decides, not the count or the last use."""
    policy = Staleness(HALF_LIFE_S, now=clock)
    policy.on_put("often", 1)
    policy.on_hit("often")
    policy.on_hit("often")  # 3
    clock.time_s += HALF_LIFE_S
    policy.on_put("lately", 1)
    assert policy.victim() == "lately"  # 3 / 2 against 1
    clock.time_s += HALF_LIFE_S
    policy.on_hit("lately")
    assert policy.victim() == "often"  # 3 / 4 against 1.5


def test_equally_stale_the_one_put_first_leaves(clock: Clock) -> None:
    policy = Staleness(HALF_LIFE_S, now=clock)
    for key in "ab":
        policy.on_put(key, 1)
    for key in "ba":
        policy.on_hit(key)
    assert victims(policy) == ["a", "b"]


def test_scores_do_not_overflow(clock: Clock) -> None:
    """Ten years in half-lives of a millisecond."""
    policy = Staleness(1e-3, now=clock)
    policy.on_put("a", 1)
    clock.time_s += 10 * 365 * 86400
    policy.on_put("b", 1)
    policy.on_hit("a")
    policy.on_hit("a")
    assert victims(policy) == ["b", "a"]


@pytest.mark.parametrize("half_life_s", [0, -1, 1e-4, float("nan"), float("inf")])
def test_staleness_refuses_a_half_life_that_makes_no_sense(half_life_s: float) -> None:
    with pytest.raises(ValueError, match=f"got {half_life_s}"):
        Staleness(half_life_s)


@pytest.mark.parametrize("name", ["staleness", "divergence"])
def test_a_ranking_does_not_grow_with_what_happened(name: str, clock: Clock) -> None:
    policy = make(name, clock)
    for i in range(2000):
        clock.time_s += 1
        policy.on_remove(str(i - 5))
        policy.on_put(str(i), 1)
        policy.on_hit(str(i - 2))
        policy.on_check(str(i), 0.1 * (i % 2))
    assert len(policy._ranking._heap) <= 2 * 5 + 1
    assert len(victims(policy)) == 5


def test_what_diverged_most_leaves_first_and_over_the_limit_at_once() -> None:
    policy = Divergence(limit=0.3, weight=0.5)
    for key in "abcd":
        policy.on_put(key, 1)
    policy.on_check("c", 0.4)
    policy.on_check("d", 0.2)
    assert policy.expired() == []
    policy.on_check("c", 0.5)  # 0.35
    assert policy.expired() == ["c"]
    policy.on_check("c", 0.0)  # a check that comes too early to evict it may still save it
    assert policy.expired() == []
    assert victims(policy) == ["c", "d", "a", "b"]


def test_a_new_entry_under_the_key_is_not_blamed_for_the_old_one() -> None:
    policy = Divergence(limit=0.3)
    policy.on_put("a", 1)
    policy.on_check("a", 2.0)
    policy.on_put("a", 1)
    assert policy.expired() == []


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.2, 160, 240), (1.0, 1000, 1000)])
def test_checks_are_drawn_at_their_rate_and_seeded(rate: float, least: int, most: int) -> None:
    drawn = [[policy.should_check("a") for _ in range(1000)] for policy in (Divergence(rate), Divergence(rate))]
    assert drawn[0] == drawn[1]
    assert least <= sum(drawn[0]) <= most
    if 0 < rate < 1:
        assert drawn[0] != [Divergence(rate, seed=1).should_check("a") for _ in range(1000)]


@pytest.mark.parametrize("divergence", [-0.1, float("nan")])
def test_what_is_no_divergence_is_refused(divergence: float) -> None:
    policy = Divergence()
    policy.on_put("a", 1)
    with pytest.raises(ValueError, match=f"divergence={divergence}"):
        policy.on_check("a", divergence)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"divergence"}))
def test_the_others_check_nothing(name: str, clock: Clock) -> None:
    policy = make(name, clock)
    policy.on_put("a", 1)
    assert not any(policy.should_check("a") for _ in range(100))
