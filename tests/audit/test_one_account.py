"""Several caches keep one account: its alarm keeps its promise, hears what none alone can, and counts nothing twice."""

import random
from collections import Counter
from collections.abc import Iterator
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.audit.account import N_REPORT, AuditAccount
from llmcache.audit.alarm import EPOCH, epoch_of
from llmcache.audit.tally import Tally
from llmcache.calibration.published import Standing

N_WORKERS = 4


class Workers:
    """Accounts of one calibration, and what each has reported last, which all hear after so many further requests."""

    def __init__(self, limit: float, floor: float, seed: int, delay: int = 0) -> None:
        self.accounts = [AuditAccount(limit, floor, 0.05, f"{seed} {i}") for i in range(N_WORKERS)]
        for account in self.accounts:
            account.is_shared = True
        self.random = random.Random(seed)
        self.reports: list[Tally] = [Tally() for _ in self.accounts]
        self.waiting: list[tuple[int, int, Tally]] = []
        self.delay = delay
        self.n = 0

    def serve(self, n: int, wrong_per_hit: float) -> int | None:
        """Serve requests, each by one of them, drawn; the number of all requests after which the alarm rang."""
        for _ in range(n):
            i = self.random.randrange(N_WORKERS)
            sample = self.accounts[i].see(0.5 if self.random.random() < 0.8 else None)
            if sample is not None:
                assert not self.accounts[i].settle(sample, self.random.random() < wrong_per_hit)
            self.n += 1
            if (report := self.accounts[i].report(False)) is not None:
                self.waiting.append((self.n + self.random.randint(0, self.delay), i, report))
            if any(self.hear()):
                return self.n
        return None

    def hear(self) -> Iterator[bool]:
        """All hear what has come, in one order; whether the alarm rings."""
        for one in sorted((one for one in self.waiting if one[0] <= self.n), key=lambda one: one[0]):
            self.waiting.remove(one)
            _, sender, report = one
            self.reports[sender] = report if report.n > self.reports[sender].n else self.reports[sender]
            for i, account in enumerate(self.accounts):
                others = {f"{j}": known for j, known in enumerate(self.reports) if j != i}
                yield account.hear(others, self.reports[i])


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 300])
def test_it_seldom_rings_while_the_rate_of_all_is_at_its_limit(delay: int) -> None:
    rang = [Workers(0.02, 0.1, seed, delay).serve(3000, 0.025) is not None for seed in range(100)]
    assert sum(rang) <= 10  # each with probability 0.05 at most: 11 or more with probability 0.01


@pytest.mark.slow
def test_it_rings_about_when_one_cache_would_that_had_all_requests() -> None:
    pooled = [Workers(0.02, 0.1, seed, delay=20).serve(20_000, 0.05) for seed in range(20)]
    single = []
    for seed in range(20):
        account, chance = AuditAccount(0.02, 0.1, 0.05, seed), random.Random(seed)
        for n in range(20_000):
            sample = account.see(0.5 if chance.random() < 0.8 else None)
            if sample is not None and account.settle(sample, chance.random() < 0.05):
                single.append(n)
                break
    assert None not in pooled and len(single) == 20
    assert np.median(pooled) < 1.5 * np.median(single)  # each has a fourth of the requests


def test_one_that_hears_from_nobody_asks_what_it_knows_itself() -> None:
    alone, pooled = AuditAccount(0.02, 1.0, 0.05), AuditAccount(0.02, 1.0, 0.05)
    rings = []
    for account in (alone, pooled):
        if account is pooled:
            assert not account.hear({}, Tally())
        samples = [account.see(1.0) for _ in range(60)]
        rings.append([account.settle(sample, True) for sample in samples if sample is not None])
    assert sum(rings[0]) == 1 and sum(rings[1]) == 0  # it waits for what the store tells
    assert not pooled.hear({}, Tally())
    assert pooled.hear({}, None)
    assert not pooled.hear({}, None)  # once


def test_what_it_reports_does_not_hang_on_what_was_found() -> None:
    accounts = [AuditAccount(0.02, 1.0, 0.05) for _ in range(2)]
    told: list[list[int]] = [[], []]
    for account, numbers, is_changed in zip(accounts, told, (False, True), strict=True):
        for n in range(5_000):
            sample = account.see(1.0)
            assert sample is not None
            account.settle(sample, is_changed)
            if account.report(False) is not None:
                numbers.append(n)
    assert told[0] == told[1]
    assert told[0][:2] == [N_REPORT - 1, 2 * N_REPORT - 1]
    assert N_REPORT < np.diff(told[0]).max() <= 5_000 // 64
    assert accounts[0].report(True) is not None and accounts[0].report(True) is None  # nothing is new


def tallied(seed: int, n: int = 400) -> Tally:
    account = AuditAccount(0.02, 0.2, 0.05, seed)
    for i in range(n):
        sample = account.see(0.3, 0.5 if i % 7 == 0 else 1.0)
        if sample is not None and i % 3:
            account.settle(sample, i % 5 == 0)
    return account.tally


def test_a_report_says_what_was_counted() -> None:
    tally = tallied(1)
    tensors, about = tally.pack()
    again = Tally.unpack(tensors, about, 0.2)
    assert (again.n, again.by_epoch, again.figures) == (tally.n, tally.by_epoch, tally.figures)
    for name in ("open", "found", "struck"):
        kinds = [sorted(getattr(one, name).items()) for one in (tally, again)]
        counted = [[(*kind, n) for kind, n in some if n] for some in kinds]
        np.testing.assert_allclose(counted[0], counted[1], rtol=1e-6)
    assert counted[0]
    empty = Tally.unpack(*Tally().pack(), 0.2)
    assert empty == Tally()


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("found", [50.0, 1.0, 1.0]),
        ("open", [1.0, 2.0, 1.0]),
        ("by_ease", [0.0, 3.0]),
        ("by_epoch", [1e9, 3.0]),
        ("struck", [float("nan"), 1.0, 1.0]),
        ("struck", [0.0, 5.0, -1.0]),
    ],
)
def test_a_report_of_what_cannot_be_is_refused(name: str, row: list[float]) -> None:
    tensors, about = tallied(1).pack()
    with pytest.raises(ValueError):
        Tally.unpack({**tensors, name: torch.tensor([row])}, about, 0.2)


@given(st.permutations(range(5)), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_tallies_add_up_in_any_order(order: list[int], first: int) -> None:
    tallies = [tallied(seed, 60) for seed in range(5)]
    shuffled = [tallies[i] for i in order]
    halves = [Tally.total(shuffled[:first]), Tally.total(shuffled[first:])]
    assert Tally.total(halves) == Tally.total(tallies)
    assert sum((one.by_epoch for one in tallies), Counter()) == Tally.total(tallies).by_epoch


def test_epochs_are_longer_the_more_came_before() -> None:
    numbers = [epoch_of(n) for n in range(0, 400_000, 50)]
    assert numbers[: 3 * EPOCH // 50] == [n // EPOCH for n in range(0, 3 * EPOCH, 50)]
    assert set(np.diff(numbers)) == {0, 1}
    assert epoch_of(10**9) < 1_200


standings = st.builds(Standing, st.integers(1, 3), st.sampled_from(["a", "b"]), st.integers(0, 2), st.booleans())


@given(st.lists(standings, min_size=1, max_size=6), st.randoms())
@settings(max_examples=200, deadline=None)
def test_standings_are_joined_in_any_order_and_again(told: list[Standing], chance: random.Random) -> None:
    joined = reduce(Standing.joined, told)
    again = [*told, *told]
    chance.shuffle(again)
    assert reduce(Standing.joined, again) == joined
    assert (joined.version, joined.body) == max((one.version, one.body) for one in told)
    of_it = [one for one in told if (one.version, one.body) == (joined.version, joined.body)]
    assert joined.n_alarms == max(one.n_alarms for one in of_it)
    assert joined.has_drifted == any(one.has_drifted for one in of_it)
    assert Standing.read(joined.about()) == joined
