"""Every policy agrees with an oracle that remembers everything; then each policy's own rules."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.memory.bank import Bank, Entry
from llmcache.memory.policies import GDSF, LRU, POLICIES, S3FIFO, TTL, Divergence, Policy, Staleness
from llmcache.request.rows import Row, Scope
from llmcache.testing import check_policy

TTL_S = 10.0
TRIAL = 0.3  # a tenth of a few bytes would be less than the smallest entry
HALF_LIFE_S = 7.0  # no multiple of the tests' time steps, so that scores never tie
LIMIT, WEIGHT = 0.15, 0.25


@dataclass
class Clock:
    """A clock that a test advances."""

    time_s: float = 100.0

    def __call__(self) -> float:
        return self.time_s


@dataclass
class Record:
    """What an oracle knows of a key: steps, uses, times in s, and the running mean of its divergences."""

    put: int
    used: int
    n_uses: int
    put_s: float
    matched_s: list[float]
    average: float = 0.0


def score(record: Record) -> float:
    """Sum the matches, each halved once per half-life; the fixed reference time changes no order."""
    return sum(2 ** (matched_s / HALF_LIFE_S) for matched_s in record.matched_s)


RANKS: dict[str, Callable[[Record], Any]] = {
    "divergence": lambda record: (-record.average, record.used),
    "fifo": lambda record: record.put,
    "lfu": lambda record: (record.n_uses, record.used),
    "lru": lambda record: record.used,
    "staleness": lambda record: (round(score(record), 3), record.put),
    "ttl": lambda record: record.put,
}
#: By policy: whether a key leaves before the bank is full, at a time in s.
LEAVES: dict[str, Callable[[Record, float], bool]] = {
    **dict.fromkeys(RANKS, lambda record, time_s: False),
    "ttl": lambda record, time_s: time_s - record.put_s >= TTL_S,
    "divergence": lambda record, time_s: record.average > LIMIT,
}


def make(name: str, clock: Clock) -> Policy:
    options: dict[str, dict[str, Any]] = {
        "ttl": {"ttl_s": TTL_S, "now": clock},
        "staleness": {"half_life_s": HALF_LIFE_S, "now": clock},
        "divergence": {"limit": LIMIT, "weight": WEIGHT},
        "s3_fifo": {"trial": TRIAL},
    }
    return POLICIES[name](**options.get(name, {}))


def victims(policy: Policy) -> list[str]:
    """Evict everything and check that nothing is left; return the order."""
    order: list[str] = []
    try:
        while True:
            order.append(policy.victim())
            policy.on_remove(order[-1])
    except KeyError as error:
        assert "empty" in str(error) and policy.expired() == []
        return order


@pytest.mark.parametrize("name", sorted({*RANKS, *POLICIES}))
def test_every_policy_keeps_the_rules(name: str) -> None:
    for seed in range(5):
        check_policy(lambda: make(name, Clock()), seed)


VERBS = ["put", "put", "hit", "hit", "check", "cost", "remove", "evict", "wait"]
NBYTES = {key: number for number, key in enumerate("abcdef", 1)}
STEPS = st.lists(st.tuples(st.sampled_from(VERBS), st.sampled_from("abcdef")), min_size=20, max_size=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
@settings(deadline=None)
@given(steps=STEPS)
def test_any_sequence_agrees_with_the_oracle(name: str, steps: list[tuple[str, str]]) -> None:
    """Steps may name keys that are not held; `victim` and `expired` change nothing."""
    clock, records = Clock(), dict[str, Record]()
    policy = make(name, clock)

    def order() -> list[str]:
        return sorted(records, key=lambda key: RANKS[name](records[key]))

    for number, (verb, key) in enumerate(steps):
        known = records.get(key)
        if verb == "put":
            policy.on_put(key, NBYTES[key])
            records[key] = Record(number, number, 1 + (known.n_uses if known else 0), clock(), [clock()])
        elif verb == "hit":
            policy.on_hit(key)
            if known:
                known.used, known.n_uses = number, known.n_uses + 1
                known.matched_s.append(clock())
        elif verb == "check":
            divergence = 0.3 * "abcdef".index(key)  # from faithful to far off
            policy.on_check(key, divergence)
            if known:
                known.average += WEIGHT * (divergence - known.average)
        elif verb == "cost":
            policy.on_cost(key, 2.0 * NBYTES[key] ** 2)
        elif verb == "wait":
            clock.time_s += TTL_S / 3
        elif verb == "remove" or records:
            gone = key if verb == "remove" else order()[0]
            policy.on_remove(gone)
            records.pop(gone, None)
        assert {*policy.expired()} == {key for key, record in records.items() if LEAVES[name](record, clock())}
        assert not records or policy.victim() == order()[0]
    assert victims(policy) == order()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        *(
            (partial(kind, time_s), f"got {time_s}")
            for kind in (TTL, Staleness)
            for time_s in (0, -1, math.nan, math.inf)
        ),
        (partial(Staleness, 1e-4), r"at least 0\.001 and finite, got 0\.0001"),
        *((partial(GDSF().on_cost, "a", cost), f"cost={cost}") for cost in (0.0, -1.0, math.nan, math.inf)),
        *((partial(S3FIFO, trial), f"trial={trial}") for trial in (0.0, 1.0, -0.1, math.nan)),
    ],
)
def test_numbers_that_make_no_sense_are_refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


def test_scores_do_not_overflow() -> None:
    """Ten years with a half-life of a millisecond."""
    clock = Clock()
    policy = Staleness(1e-3, now=clock)
    policy.on_put("a", 1)
    clock.time_s += 10 * 365 * 86400
    policy.on_put("b", 1)
    policy.on_hit("a")
    policy.on_hit("a")
    assert victims(policy) == ["b", "a"]


@pytest.mark.parametrize("name", ["staleness", "divergence", "gdsf", "s3_fifo"])
def test_what_is_known_does_not_grow_with_what_happened(name: str) -> None:
    clock = Clock()
    policy = make(name, clock)
    for i in range(2000):
        clock.time_s += 1
        policy.on_remove(str(i - 5))
        policy.on_put(str(i), 1)
        policy.on_hit(str(i - 2))
        policy.on_check(str(i), 0.1 * (i % 2))
        policy.on_cost(str(i), 1.0)
    assert name == "s3_fifo" or len(policy._ranking._heap) <= 2 * 5 + 1
    assert all(len(held) <= 5 for held in vars(policy).values() if isinstance(held, dict))
    assert len(victims(policy)) == 5


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.2, 160, 240), (1.0, 1000, 1000)])
def test_checks_are_drawn_at_their_rate_and_seeded(rate: float, least: int, most: int) -> None:
    drawn = [[policy.should_check("a") for _ in range(1000)] for policy in (Divergence(rate), Divergence(rate))]
    assert drawn[0] == drawn[1]
    assert least <= sum(drawn[0]) <= most
    if 0 < rate < 1:
        assert drawn[0] != [Divergence(rate, seed=1).should_check("a") for _ in range(1000)]


def n_hits(make: Callable[[], Policy], keys: Iterable[str], max_entries: int = 20, pinned: Sequence[str] = ()) -> int:
    """Return the hits of a bank that stores every miss; pinned entries come first and stay."""
    bank, scope = Bank(make, 10**6, max_entries), Scope("default", "w", "", "sdpa")
    made = {key: Entry(key, scope, (torch.zeros(1),)) for key in (*pinned, *keys)}
    assert bank.pin([made[key] for key in pinned])
    hits = 0
    for key in keys:
        (found,) = bank.find([Row(0, key, b"", slice(0, 1), 1)])
        hits += found is not None
        if found is None:
            bank.put([made[key]], bank.purges.generation)
    assert all(key in bank for key in pinned) and len(bank) <= max_entries
    return hits


def with_scans(popular: int = 16, rounds: int = 20, scanned: int = 40) -> list[str]:
    """Return rounds of popular keys, each twice, followed by many keys requested once."""
    once = count()
    again = [f"popular {i}" for i in range(popular)]
    return [key for _ in range(rounds) for key in (*again, *again, *(f"once {next(once)}" for _ in range(scanned)))]


def test_a_scan_drives_out_newcomers_alone() -> None:
    """S3-FIFO keeps popular keys through each scan; LRU finds them only the second time of each round."""
    assert n_hits(S3FIFO, with_scans()) == 16 * (2 * 20 - 1)
    assert n_hits(LRU, with_scans()) == 16 * 20
    assert n_hits(S3FIFO, with_scans(), 24, ["pinned 1", "pinned 2"]) == 16 * (2 * 20 - 1)


def test_what_comes_again_soon_after_its_trial_stays() -> None:
    policy = S3FIFO()
    for key in "abc":
        policy.on_put(key, 1)
    policy.on_remove("a")
    policy.on_put("a", 1)
    assert victims(policy) == ["b", "c", "a"]
    policy.on_put("a", 1)  # nothing was held, so nothing is remembered
    policy.on_put("b", 1)
    assert victims(policy) == ["a", "b"]


def test_the_dearest_per_byte_stays() -> None:
    policy = GDSF()
    for key, nbytes, cost in (("small", 1, 10.0), ("large", 100, 10.0), ("dear", 100, 1000.0)):
        policy.on_put(key, nbytes)
        policy.on_cost(key, cost)
    policy.on_put("unknown", 50)  # as dear as the average, 1020 / 201
    policy.on_cost("nobody", 1.0)
    policy.on_hit("small")
    assert victims(policy) == ["large", "unknown", "dear", "small"]
