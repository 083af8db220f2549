"""The cost model: when the cache bypasses itself, and when it returns. Times are given: nothing hangs on a clock."""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.execution.cost import PATIENCE, CostModel
from llmcache.execution.length_costs import Times
from llmcache.stats import Cost

TOKENS, DEPTH = 20, 4
MISS = Times(whole_s=0.011, lookup_s=0.0006, storing_s=0.0004)  # of which the model takes 10 ms
HIT = Times(whole_s=0.001, lookup_s=0.0006, storing_s=0.0)
BREAK_EVEN = 0.1  # a miss costs 1 ms, a hit saves 9


@pytest.fixture
def cost() -> CostModel:
    return CostModel(DEPTH)


@pytest.fixture
def aside() -> CostModel:
    return gone_aside()


def gone_aside() -> CostModel:
    """A model that has just bypassed itself."""
    cost = CostModel(DEPTH)
    assert all(run(cost, PATIENCE))
    assert row(cost).is_bypassed
    return cost


def ask(cost: CostModel, is_hit: bool = False, hashes: tuple[int, ...] = (), n_tokens: int = TOKENS) -> bool:
    """One call of one request; whether it took the whole way."""
    pays = cost.judge(n_tokens, 1, hashes).is_worthwhile
    if pays:
        cost.took(n_tokens, 1, int(is_hit), HIT if is_hit else MISS)
    return pays


def run(cost: CostModel, n: int, every: int = 0, hashes: Iterable[int] = ()) -> list[bool]:
    """Calls, of which each `every`-th is a hit if it takes the whole way."""
    known = iter(hashes)
    return [ask(cost, bool(every) and i % every == 0, tuple(h for h in (next(known, None),) if h)) for i in range(n)]


def whole_way(taken: list[bool]) -> list[int]:
    """Which calls took the whole way, from 1."""
    return [i for i, is_taken in enumerate(taken, 1) if is_taken]


def row(cost: CostModel) -> Cost:
    (only,) = cost.rows()
    return only


def waits(cost: CostModel) -> int:
    """Calls until it returns, the one that does included, when all requests repeat."""
    n, bucket = 0, cost._buckets[TOKENS.bit_length()]
    while bucket.is_bypassed:
        ask(cost, hashes=(7,))
        n += 1
    return n


def stands(cost: CostModel) -> int:
    """Calls until it bypasses itself, when none is a hit."""
    n = 0
    while not row(cost).is_bypassed:
        ask(cost)
        n += 1
    return n


def test_without_hits_it_steps_aside_once_patience_is_over_but_for_one_call_in_64(aside: CostModel) -> None:
    assert whole_way(run(aside, 640)) == list(range(64, 641, 64))


@pytest.mark.parametrize(("every", "is_bypassed"), [(5, False), (8, False), (20, True), (100, True)])
def test_it_stays_where_hits_save_more_than_misses_cost(cost: CostModel, every: int, is_bypassed: bool) -> None:
    run(cost, 2 * PATIENCE, every)
    assert row(cost).is_bypassed is is_bypassed
    assert row(cost).worthwhile_from == pytest.approx(BREAK_EVEN)


@given(st.floats(1e-4, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_at_the_rate_it_pays_from_time_with_is_time_without(
    model: float, lookup: float, storing: float, hit: float
) -> None:
    cost = CostModel(DEPTH)
    cost.took(TOKENS, 1, 0, Times(model + lookup + storing, lookup, storing))
    cost.took(TOKENS, 1, 1, Times(hit, lookup, 0.0))
    rate = row(cost).worthwhile_from
    if hit >= model:
        assert rate is None or rate == pytest.approx(1.0)  # but for rounding
    else:
        assert rate is not None
        assert rate * hit + (1 - rate) * (model + lookup + storing) == pytest.approx(model)


def test_it_returns_when_enough_requests_come_again(aside: CostModel) -> None:
    assert sum(run(aside, 2000, hashes=range(1, 2001))) == 2000 // 64
    assert row(aside).repeats == 0.0
    run(aside, 60, hashes=range(1, 61))
    assert not row(aside).is_bypassed


def test_it_returns_when_probes_hit(aside: CostModel) -> None:
    """Of approximate reuse hashes know nothing: what takes the whole way all the same tells."""
    assert not all(run(aside, 64 * 20))
    run(aside, 64 * 60, every=1)
    assert not row(aside).is_bypassed


def test_it_does_not_return_at_once(aside: CostModel) -> None:
    assert whole_way(run(aside, PATIENCE, hashes=[7] * PATIENCE)) == [64, 128, 192, PATIENCE]
    assert not row(aside).is_bypassed


@pytest.mark.parametrize("n", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_after_a_return_hits_decide_and_each_that_did_not_pay_doubles_the_wait(aside: CostModel, n: int) -> None:
    """Requests come again after their entries have left: by their hashes it would pay. No hash is kept for longer."""
    for number in range(n):
        assert waits(aside) == min(256 << number, 65_536)
        assert stands(aside) == PATIENCE - 1  # that which returned was the first


def test_a_return_that_stood_begins_the_waits_anew(aside: CostModel) -> None:
    assert [waits(aside), stands(aside), waits(aside)] == [256, PATIENCE - 1, 512]
    run(aside, 1024, every=1)
    stands(aside)
    assert waits(aside) == 256


def test_a_slow_call_does_not_decide(cost: CostModel) -> None:
    """A codec is fitted in the call that brings its last row: two seconds, once."""
    run(cost, 2 * PATIENCE, every=5)
    cost.took(TOKENS, 1, 0, Times(2.0, 0.0006, 2.0))
    run(cost, 10, every=5)
    assert not row(cost).is_bypassed


def test_times_that_stay_slow_are_believed(cost: CostModel) -> None:
    run(cost, PATIENCE, every=5)
    slow = Times(whole_s=MISS.whole_s + 0.05, lookup_s=0.05, storing_s=0.0)
    for _ in range(PATIENCE):
        cost.took(TOKENS, 1, 0, slow)
        cost.took(TOKENS, 1, 1, HIT)
    assert row(cost).lookup_ms == pytest.approx(50, rel=0.05)


def test_lengths_are_judged_apart(cost: CostModel) -> None:
    for _ in range(PATIENCE):
        ask(cost, n_tokens=16)
        ask(cost, n_tokens=31)
        ask(cost, is_hit=True, n_tokens=32)
    assert [(known.tokens, known.is_bypassed) for known in cost.rows()] == [(16, True), (32, False)]


def test_a_rare_length_goes_aside_with_the_others(cost: CostModel) -> None:
    run(cost, PATIENCE)
    taken = [ask(cost, n_tokens=8 * TOKENS) for _ in range(PATIENCE // 8 + 10)]
    assert taken == [True] * (PATIENCE // 8) + [False] * 10


@pytest.mark.parametrize("is_hit", [True, False])
def test_a_rare_length_stays_where_it_or_the_others_hit(cost: CostModel, is_hit: bool) -> None:
    run(cost, PATIENCE, every=0 if is_hit else 4)
    assert all(ask(cost, is_hit and number % 4 == 0, n_tokens=8 * TOKENS) for number in range(PATIENCE // 2))


def test_a_batch_counts_as_its_rows(cost: CostModel) -> None:
    for _ in range(PATIENCE // 64):
        assert cost.judge(640, 64, ()).is_worthwhile
        cost.took(640, 64, 0, MISS)
    assert not cost.judge(640, 64, ()).is_worthwhile


def test_a_batch_served_in_part_gives_a_rate_but_no_times(cost: CostModel) -> None:
    cost.took(TOKENS, 4, 1, MISS)
    assert row(cost).hit_rate == 0.25
    assert row(cost).miss_ms is row(cost).hit_ms is None


def test_without_times_it_stays(cost: CostModel) -> None:
    for _ in range(4 * PATIENCE):
        assert cost.judge(TOKENS, 1, ()).is_worthwhile
        cost.took(TOKENS, 1, 0, None)
    assert row(cost).worthwhile_from is None


def test_where_a_hit_takes_longer_than_the_model_it_never_pays(cost: CostModel) -> None:
    for i in range(2 * PATIENCE):
        cost.judge(TOKENS, 1, (7,))
        cost.took(TOKENS, 1, i % 2, Times(0.002, 0.0019, 0.0) if i % 2 else Times(0.003, 0.0019, 0.001))
    assert row(cost).is_bypassed
    assert row(cost).worthwhile_from is None
    assert sum(run(cost, 640, hashes=[7] * 640)) == 10


def test_a_row_says_what_was_measured_and_none_of_what_was_not(cost: CostModel) -> None:
    cost.judge(TOKENS, 1, ())
    values = json.loads(json.dumps(asdict(row(cost)), allow_nan=False))
    assert {name: value for name, value in values.items() if value is not None} == {"tokens": 16, "is_bypassed": False}
    ask(cost, hashes=(1,))
    ask(cost, is_hit=True, hashes=(1,))
    assert asdict(row(cost)) == pytest.approx(
        {
            "tokens": 16,
            "lookup_ms": 0.6,
            "storing_ms": 0.4,
            "layer_ms": 2.5,
            "plain_ms": None,
            "beside_ms": 0.0,
            "miss_ms": 11.0,
            "hit_ms": 1.0,
            "hit_rate": 0.5,
            "repeats": 0.5,
            "worthwhile_from": BREAK_EVEN,
            "is_bypassed": False,
            "saved_ms": 9.0,
        }
    )
    cost.took(TOKENS, 1, 1, None)  # a hit that is not timed saved as much
    cost.took(TOKENS, 2, 1, MISS)
    assert row(cost).saved_ms == pytest.approx(18.0)


def test_hits_are_counted_anew_and_times_stay_known(cost: CostModel) -> None:
    run(cost, 10, hashes=[7] * 10)
    ask(cost, is_hit=True, hashes=(7,))
    before = asdict(row(cost))
    cost.recount()
    now = asdict(row(cost))
    assert {name for name in now if now[name] != before[name]} == {"saved_ms", "hit_rate", "repeats"}
    assert (now["saved_ms"], now["hit_rate"], now["repeats"], cost.n_let_pass) == (0, None, None, 0)


def test_a_restart_forgets_and_forgetting_requests_keeps_times(cost: CostModel) -> None:
    run(cost, 10, hashes=[7] * 10)
    cost.forget()
    ask(cost, hashes=(7,))
    assert row(cost).repeats == pytest.approx(9 / 11)
    assert row(cost).miss_ms == pytest.approx(11.0)
    cost.restart()
    assert cost.rows() == ()


@pytest.mark.parametrize(("n", "is_known"), [(70_000, False), (32_000, True), (40_000, True)])
def test_only_the_latest_requests_are_known(cost: CostModel, n: int, is_known: bool) -> None:
    cost.judge(2**17, n + 1, (*range(n), 0))
    assert row(cost).repeats == pytest.approx(is_known / (n + 1))


def test_turns_are_logged_once_with_their_figures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="llmcache"):
        cost = gone_aside()
        run(cost, 200)
        waits(cost)
    went, came = caplog.messages
    assert "is bypassed for calls of 16 to 31 tokens: 0.0 % of requests could be served; it is worthwhile from" in went
    assert "serves again" in came


# -- compared with the model alone -------------------------------------------------------------------------------------


def serve_compared(n: int, every: int, beside_s: float = 0.0, plain_s: float = 0.01) -> Cost:
    """What is known after calls of calibrated reuse, of which each `every`-th is a hit."""
    cost = CostModel(DEPTH)
    for i in range(n):
        verdict = cost.judge(TOKENS, 1, (i,), compares=True)
        if verdict.is_worthwhile:
            cost.took(TOKENS, 1, int(i % every == 0), HIT if i % every == 0 else MISS)
            cost.spent(TOKENS, beside_s)
        else:
            assert verdict.is_timed or row(cost).is_bypassed
            cost.passed(TOKENS, plain_s)
    return row(cost)


def test_short_stretches_go_by_rarer_and_rarer_noted_and_told_as_compared(cost: CostModel) -> None:
    verdicts = [cost.judge(TOKENS, 1, (), compares=True) for _ in range(1900)]
    by = [i for i, verdict in enumerate(verdicts) if not verdict.is_worthwhile]
    assert by == [*range(255, 271), *range(782, 798), *range(1821, 1837)]
    assert all(verdicts[i].is_recorded and verdicts[i].is_timed for i in by)
    assert [i for i, verdict in enumerate(verdicts) if verdict.is_compared] == by
    assert all(cost.judge(2 * TOKENS, 1, ()).is_worthwhile for _ in range(1900))  # where nothing is calibrated, none


def test_what_is_done_before_a_foretold_call_is_billed_to_one_that_counts(aside: CostModel) -> None:
    assert row(aside).beside_ms == 0.0
    aside.spent(TOKENS, 0.5)
    aside.took(TOKENS, 1, 1, HIT, is_foretold=True)
    assert row(aside).beside_ms == 0.0  # it says nothing of others
    aside.took(TOKENS, 1, 0, MISS)
    assert (row(aside).beside_ms or 0.0) > 0.0


def test_what_a_miss_takes_longer_than_the_model_is_the_overhead() -> None:
    """Lookup and storing are 1 ms of 11; the model alone would take 8."""
    known = serve_compared(400, every=2, plain_s=0.008)
    assert known.plain_ms == pytest.approx(8.0)
    assert known.worthwhile_from == pytest.approx(3 / (7 + 3))
    assert known.layer_ms == pytest.approx(8.0 / DEPTH)


def test_what_is_done_beside_calls_counts_and_makes_it_step_aside() -> None:
    known = serve_compared(2 * PATIENCE, every=2, beside_s=0.002)
    assert known.beside_ms == pytest.approx(2.0, rel=0.05)
    assert known.worthwhile_from == pytest.approx((1 + 2) / (9 + 1), rel=0.05)
    assert not known.is_bypassed
    # Half of 9 ms are saved; half of 1 and all of 5 lost.
    assert serve_compared(2 * PATIENCE, every=2, beside_s=0.005).is_bypassed


def test_a_cost_that_is_next_to_nothing_is_no_reason_to_step_aside(cost: CostModel) -> None:
    for i in range(2 * PATIENCE):
        assert cost.judge(TOKENS, 1, (i,)).is_worthwhile
        cost.took(TOKENS, 1, 0, Times(0.1, 0.0005, 0.0004))
    assert not row(cost).is_bypassed


# -- what is held, and what is recorded ----------------------------------------------------------------------------


def test_a_call_whose_requests_are_held_is_served_while_aside_and_does_not_speak_for_others(aside: CostModel) -> None:
    for i in range(20):
        verdict = aside.judge(TOKENS, 2, (-i - 1, -i - 101), held=lambda hashes: 1)
        assert verdict.is_worthwhile and verdict.is_foretold and not verdict.is_probe
        aside.took(TOKENS, 2, 1, None, verdict.is_foretold)
    assert row(aside).is_bypassed and row(aside).hit_rate == 0.0
    one_of_twenty = aside.judge(TOKENS, 20, tuple(range(1000, 1020)), held=lambda hashes: 1)
    assert not one_of_twenty.is_worthwhile


def note(cost: CostModel, recording_s: float, n_tokens: int = TOKENS) -> int:
    """Ask 600 requests; how many calls were noted, which takes that long."""
    n_recorded = 0
    for request in range(n_tokens * 1000, n_tokens * 1000 + 600):
        verdict = cost.judge(n_tokens, 1, (request,))
        n_recorded += verdict.is_recorded
        if verdict.is_recorded:
            cost.passed(n_tokens, 0.01, recording_s)
    return n_recorded


def test_the_first_calls_are_noted_whatever_that_takes_and_one_of_each_length(aside: CostModel) -> None:
    for _ in range(PATIENCE // 8):
        assert ask(aside, n_tokens=4 * TOKENS)
    assert all(length.is_bypassed for length in aside.rows())
    assert note(aside, 1.0) == 1 + 256
    assert note(aside, 1.0, 4 * TOKENS) == 1


@pytest.mark.parametrize(("recording_s", "share"), [(0.00002, 1.0), (0.00005, 0.5), (0.00025, 0.1), (0.01, 0.0)])
def test_as_many_calls_are_noted_as_the_time_for_it_allows(aside: CostModel, recording_s: float, share: float) -> None:
    """0.25 % of 10 ms are 0.025 ms a call."""
    note(aside, recording_s)
    n_recorded = 0
    for request in range(1, 2001):
        if aside.lets_pass(TOKENS, request):
            continue
        verdict = aside.judge(TOKENS, 1, (request,), searches=False)
        n_recorded += verdict.is_recorded
        if not verdict.is_worthwhile:
            aside.passed(TOKENS, 0.01, recording_s if verdict.is_recorded else None)
    assert n_recorded / 2000 == pytest.approx(share, abs=0.01)


def test_where_repeats_would_be_served_it_steps_aside_sooner() -> None:
    soon, late = CostModel(DEPTH), CostModel(DEPTH)
    for i in range(PATIENCE // 8):
        assert soon.judge(TOKENS, 1, (i,)).is_worthwhile and late.judge(TOKENS, 1, (i,)).is_worthwhile
        soon.took(TOKENS, 1, 0, MISS, would_record=lambda: True)
        late.took(TOKENS, 1, 0, MISS, would_record=lambda: False)
    assert row(soon).is_bypassed and not row(late).is_bypassed
    while row(soon).is_bypassed:  # all that is asked was asked before
        soon.judge(TOKENS, 1, (1,))
    for _ in range(PATIENCE - 1):
        assert soon.judge(TOKENS, 1, (1,)).is_worthwhile
        soon.took(TOKENS, 1, 0, MISS, would_record=lambda: True)
    assert not row(soon).is_bypassed  # repeats spoke for it, so it waits for hits as long as any other


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=400))
def test_the_short_way_changes_no_decision(asked: list[int]) -> None:
    short, long = gone_aside(), gone_aside()
    for cost in (short, long):
        note(cost, 0.01)
    for one in asked:
        is_taken = not short.lets_pass(TOKENS, one) and ask(short, hashes=(one,))
        assert is_taken == ask(long, hashes=(one,))
    assert row(short) == row(long)


def test_the_short_way_is_for_new_requests_of_lengths_that_are_aside_and_not_noted(aside: CostModel) -> None:
    assert not CostModel(DEPTH).lets_pass(TOKENS, 1) and not aside.lets_pass(4 * TOKENS, 1)
    assert not aside.lets_pass(TOKENS, 1)  # the first ones are recorded
    note(aside, 0.01)
    assert aside.lets_pass(TOKENS, 1) and not aside.lets_pass(TOKENS, 1)


def test_probes_are_rarer_where_calls_are_noted_and_nothing_is_searched(aside: CostModel) -> None:
    taken = [aside.judge(TOKENS, 1, (i + 1,), searches=False).is_worthwhile for i in range(1024)]
    assert whole_way(taken) == [512, 1024]
