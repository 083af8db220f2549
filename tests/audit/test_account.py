"""Limits, alarm and draws keep their promises at every moment, and are not vacuous. All seeds are fixed."""

import random

import numpy as np
import pytest

from llmcache.reuse.audit.account import BY_RISK, AuditAccount, AuditSample
from llmcache.reuse.audit.alarm import CLOSER, EPOCH, WATCH, Alarm, epoch_of
from llmcache.reuse.audit.rate import Rate

# -- Rate --------------------------------------------------------------------------------------------------------------


def observe(rate: Rate, n: int, n_events: int, chance: float) -> None:
    for _ in range(n):
        rate.see()
    for _ in range(n_events):
        rate.draw(1 / chance)
        rate.settle(1 / chance, True)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[0.01] * 5 + [0.3] * 2 + [0.01] * 5, [0] * 2 + [0.5] * 4])
def test_limits_hold_at_all_moments_together(shares: list[float]) -> None:
    """Limits hold for the mean so far of a changing rate, even if more is drawn at first."""
    rng = np.random.default_rng(5)
    n_wrong = np.zeros(2, int)
    for _ in range(30):
        rate, wrong, total = Rate(0.05), np.zeros(2, bool), 0.0
        for step, share in enumerate(shares):
            chance = 0.25 if step < 2 else 0.05
            total += share
            observe(rate, 250, int((rng.random(250) < share * chance).sum()), chance)
            mean = total / (step + 1)
            wrong |= rate.lower(0.05) > mean, rate.upper(0.05) < mean
        n_wrong += wrong
    assert n_wrong.max() <= 4  # of 30, each wrong with probability 0.05 at most: 5 or more with probability 0.02


@pytest.mark.slow
def test_limits_hold_where_probabilities_are_lowered_for_a_while() -> None:
    """In 300 streams of one rate, limits at 10 % are wrong in at most 10 %, though waiting samples lower the draws."""
    rng, wrong = np.random.default_rng(0), np.zeros(2)
    for _ in range(300):
        rate, n_waiting = Rate(0.2), 0
        for _ in range(400):
            scale = 0.25 if n_waiting > 5 else 1.0
            rate.see(scale)
            n_waiting = max(0, n_waiting - (rng.random() < 0.1))
            if rng.random() < 0.2 * scale:
                n_waiting += 1
                rate.draw(1 / (0.2 * scale), scale)
                rate.settle(1 / (0.2 * scale), bool(rng.random() < 0.05), scale)
        wrong += (rate.lower(0.1) > 0.05, rate.upper(0.1) < 0.05)
    assert (wrong / 300 <= 0.1).all()
    assert rate.upper(0.1) < 0.5


def test_limits_close_in_on_the_rate() -> None:
    rate = Rate(0.5)
    assert (rate.lower(0.05), rate.upper(0.05), rate.mean) == (0.0, 1.0, None)  # nothing seen, nothing known
    widths = []
    for n in (200, 2000, 20_000):
        observe(rate, n, n // 100, chance=0.5)
        widths.append(rate.upper(0.05) - rate.lower(0.05))
    assert rate.mean == pytest.approx(0.02)
    assert rate.lower(0.05) < 0.02 < rate.upper(0.05)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]
    assert widths[2] < 0.01


def test_a_sample_that_waits_counts_for_the_worse_on_both_sides() -> None:
    known, waits = Rate(0.5), Rate(0.5)
    for rate in (known, waits):
        observe(rate, 2000, 5, chance=0.5)
        for _ in range(10):
            rate.draw(2.0)
    at_worst = known.upper(0.05)
    for _ in range(10):
        known.settle(2.0, has_event=False)
    assert known.upper(0.05) < waits.upper(0.05) == at_worst
    assert known.lower(0.05) == waits.lower(0.05)
    assert known.mean == waits.mean
    for _ in range(10):
        waits.settle(2.0, has_event=True)
    assert waits.upper(0.05) == at_worst
    assert waits.lower(0.05) > known.lower(0.05)


# -- Alarm -------------------------------------------------------------------------------------------------------------


def rings_at(alarm: Alarm, floor: float, n: int, rate: float, rng: np.random.Generator) -> int | None:
    """Check requests as often as the alarm asks for; return the number of requests after which it rings."""
    for count in range(1, n + 1):
        chance = min(1.0, floor * (CLOSER if alarm.is_suspicious else 1))
        number = alarm.see()
        if rng.random() < rate * chance and alarm.found(number, 1 / chance):
            return count
    return None


@pytest.mark.parametrize("n_before", [0, 10_000])
def test_it_rings_about_when_it_is_expected_after_a_change(n_before: int) -> None:
    rng = np.random.default_rng(4)
    ratios = []
    for _ in range(40):
        alarm = Alarm(0.01, floor=0.02, alpha=0.05)
        assert rings_at(alarm, 0.02, n_before, 0.0005, rng) is None
        expected = alarm.needed(0.04)
        ratios.append(rings_at(alarm, 0.02, 20 * expected, 0.04, rng) / expected)
    assert 0.6 < np.mean(ratios) < 1.3


def test_it_is_suspicious_at_first_and_for_a_while_after_an_event() -> None:
    alarm = Alarm(0.005, floor=0.01, alpha=0.05)
    seen = [alarm.is_suspicious for _ in range(5 * EPOCH) if alarm.see() is not None]
    assert seen == [True] * (WATCH - 1) + [False] * (5 * EPOCH - WATCH + 1)
    assert not alarm.found(alarm.n - 1, 100.0) and alarm.is_suspicious
    seen = [alarm.is_suspicious for _ in range(20 * EPOCH) if alarm.see() is not None]
    assert seen[0] and not seen[-1]


def test_the_more_it_exceeds_the_sooner_it_is_expected_and_what_is_found_late_counts_alike() -> None:
    alarm = Alarm(0.005, floor=0.05, alpha=0.05)
    needed = [alarm.needed(rate) for rate in (0.01, 0.05, 0.2)]
    assert needed == sorted(needed, reverse=True) and needed[-1] > EPOCH
    assert Alarm(0.02, floor=0.25, alpha=0.05).needed(0.0201) is None  # too little to be heard
    at_once, late = Alarm(0.05, 0.5, 0.05), Alarm(0.05, 0.5, 0.05)
    for n in range(3 * EPOCH):
        assert at_once.see() == late.see() == n
        if n == EPOCH + 7:
            at_once.found(n, 2.0)
    late.found(EPOCH + 7, 2.0)
    for alarm in (at_once, late):
        alarm.found(3 * EPOCH - 1, 2.0)
    np.testing.assert_allclose(at_once.wealth()[0], late.wealth()[0])


def test_epochs_are_longer_the_more_came_before() -> None:
    numbers = [epoch_of(n) for n in range(0, 400_000, 50)]
    assert numbers[: 3 * EPOCH // 50] == [n // EPOCH for n in range(0, 3 * EPOCH, 50)]
    assert set(np.diff(numbers)) == {0, 1} and epoch_of(10**9) < 1_200


# -- Auditor -----------------------------------------------------------------------------------------------------------


def serve(auditor: AuditAccount, n: int, hit_rate: float, wrong_per_hit: float, seed: int) -> int | None:
    """Serve requests, auditing each sample at once; return after how many the alarm rang."""
    rng = random.Random(seed)
    for number in range(1, n + 1):
        sample = auditor.see(rng.random() if rng.random() < hit_rate else None)
        if sample is not None and auditor.settle(sample, rng.random() < wrong_per_hit):
            return number
    return None


@pytest.mark.slow
def test_the_rate_is_one_of_all_requests_without_bias_and_limits_cover_it() -> None:
    means, n_missed = [], 0
    for seed in range(20):
        auditor, is_missed = AuditAccount(limit=0.5, floor=0.1, alpha=0.05, seed=seed), False
        for part in range(3):
            assert serve(auditor, 500, hit_rate=0.7, wrong_per_hit=0.05, seed=100 * seed + part) is None
            lower, upper = (auditor.figures()[name] for name in ("lower", "upper"))
            is_missed |= not lower <= 0.035 <= upper
        n_missed += is_missed
        means.append(auditor.rate.mean)
    assert np.mean(means) == pytest.approx(0.035, abs=0.0067)  # three standard errors
    assert n_missed <= 5  # of 20, each with probability 0.1 at most: 6 or more with probability 0.01


@pytest.mark.slow
def test_it_seldom_rings_while_the_rate_is_at_its_limit() -> None:
    rang = [serve(AuditAccount(0.02, 0.1, 0.05, seed=s), 2500, 0.8, 0.025, seed=s) is not None for s in range(80)]
    assert sum(rang) <= 8  # each with probability 0.05 at most: 9 or more with probability 0.02


def test_it_rings_once_and_within_what_is_needed() -> None:
    ratios = []
    for seed in range(15):
        auditor = AuditAccount(limit=0.02, floor=0.1, alpha=0.05, seed=seed)
        needed = auditor.figures()["needed"]  # for twice the limit; the stream has 2.5 times
        rang = serve(auditor, 10 * needed, hit_rate=0.8, wrong_per_hit=0.0625, seed=seed)
        ratios.append(rang / needed)
        assert serve(auditor, 2000, hit_rate=0.8, wrong_per_hit=0.5, seed=seed) is None
    assert np.median(ratios) < 1


def test_it_draws_by_risk_and_suspicion_and_never_under_the_floor() -> None:
    auditor = AuditAccount(limit=0.5, floor=0.01, alpha=0.05)

    def drawn(share: float, n: int) -> list[float]:
        return [sample.weight for _ in range(n) if (sample := auditor.see(share)) is not None]

    assert set(drawn(0.0, WATCH)) == {1 / (CLOSER * 0.01)}  # an account begins suspicious
    for share in (0.0, 0.5, 1.0):
        chance = 0.01 * (1 + BY_RISK * share)
        weights = drawn(share, 10_000)
        assert len(weights) == pytest.approx(10_000 * chance, rel=0.3) and set(weights) == {1 / chance}
    assert auditor.see(None) is None
    assert auditor.rate.n == WATCH + 30_001
    everything = AuditAccount(limit=0.5, floor=1.0, alpha=0.05)
    samples = [everything.see(share) for share in (0.0, 1.0) for _ in range(2 * WATCH)]
    assert all(isinstance(sample, AuditSample) and sample.weight == 1.0 for sample in samples)
    auditor = AuditAccount(0.01, 0.2, 0.05)  # where samples wait, fewer are drawn and count more
    weights = {sample.weight for _ in range(3000) if (sample := auditor.see(0.0, 0.25)) is not None}
    assert weights == {1 / (0.2 * 0.25), 1 / min(1.0, 0.25 * CLOSER * 0.2)}
    assert auditor.counts["n_drawn"] < 3000 * 0.2 / 2
