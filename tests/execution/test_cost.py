"""The cost model: when the cache bypasses itself, and when it returns. Times are given: nothing hangs on a clock."""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.execution.cost import PATIENCE, CostModel, Times
from llmcache.stats import Cost

TOKENS, DEPTH = 20, 4
MISS = Times(whole_s=0.011, lookup_s=0.0006, storing_s=0.0004)  # of which the model takes 10 ms
HIT = Times(whole_s=0.001, lookup_s=0.0006, storing_s=0.0)
BREAK_EVEN = 0.1  # a miss costs 1 ms, a hit saves 9


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


def row(cost: CostModel) -> Cost:
    (only,) = cost.rows()
    return only


def aside() -> CostModel:
    """A model that has just bypassed itself."""
    cost = CostModel(DEPTH)
    run(cost, PATIENCE)
    assert row(cost).is_bypassed
    return cost


def test_without_hits_it_steps_aside_once_patience_is_over() -> None:
    cost = CostModel(DEPTH)
    assert all(run(cost, PATIENCE))
    assert not any(run(cost, 63))


@pytest.mark.parametrize(("every", "is_bypassed"), [(5, False), (8, False), (20, True), (100, True)])
def test_it_stays_where_hits_save_more_than_misses_cost(every: int, is_bypassed: bool) -> None:
    cost = CostModel(DEPTH)
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


def test_one_call_in_64_takes_the_whole_way_while_aside() -> None:
    cost = aside()
    taken = run(cost, 640)
    assert [i for i, is_taken in enumerate(taken, 1) if is_taken] == list(range(64, 641, 64))


def test_it_returns_when_enough_requests_come_again() -> None:
    cost = aside()
    assert sum(run(cost, 2000, hashes=range(1, 2001))) == 2000 // 64
    assert row(cost).repeats == 0.0
    run(cost, 60, hashes=range(1, 61))
    assert not row(cost).is_bypassed


def test_it_returns_when_probes_hit() -> None:
    """Of approximate reuse hashes know nothing: what takes the whole way all the same tells."""
    cost = aside()
    assert not all(run(cost, 64 * 20))
    run(cost, 64 * 60, every=1)
    assert not row(cost).is_bypassed


def test_it_does_not_return_at_once() -> None:
    cost = aside()
    taken = run(cost, PATIENCE, hashes=[7] * PATIENCE)
    assert [i for i, is_taken in enumerate(taken, 1) if is_taken] == [64, 128, 192, PATIENCE]
    assert not row(cost).is_bypassed


def waits(cost: CostModel) -> int:
    """Calls until it returns, the one that does included, when all requests repeat."""
    n = 0
    while row(cost).is_bypassed:
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


def test_after_a_return_hits_decide_and_each_that_did_not_pay_doubles_the_wait() -> None:
    """Requests come again after their entries have left: by their hashes it would pay."""
    cost = aside()
    for wait in (256, 512, 1024):
        assert waits(cost) == wait
        assert stands(cost) == PATIENCE - 1  # that which returned was the first


def test_the_wait_ends_when_no_hash_is_kept_for_longer() -> None:
    cost = aside()
    assert [(waits(cost), stands(cost))[0] for _ in range(10)][-2:] == [65_536, 65_536]


def test_a_return_that_stood_begins_the_waits_anew() -> None:
    cost = aside()
    assert [waits(cost), stands(cost), waits(cost)] == [256, PATIENCE - 1, 512]
    run(cost, 1024, every=1)
    stands(cost)
    assert waits(cost) == 256


def test_a_slow_call_does_not_decide() -> None:
    """A codec is fitted in the call that brings its last row: two seconds, once."""
    cost = CostModel(DEPTH)
    run(cost, 2 * PATIENCE, every=5)
    cost.took(TOKENS, 1, 0, Times(2.0, 0.0006, 2.0))
    run(cost, 10, every=5)
    assert not row(cost).is_bypassed


def test_times_that_stay_slow_are_believed() -> None:
    cost = CostModel(DEPTH)
    run(cost, PATIENCE, every=5)
    slow = Times(whole_s=MISS.whole_s + 0.05, lookup_s=0.05, storing_s=0.0)
    for _ in range(PATIENCE):
        cost.took(TOKENS, 1, 0, slow)
        cost.took(TOKENS, 1, 1, HIT)
    assert row(cost).lookup_ms == pytest.approx(50, rel=0.05)


def test_lengths_are_judged_apart() -> None:
    cost = CostModel(DEPTH)
    for _ in range(PATIENCE):
        ask(cost, n_tokens=16)
        ask(cost, n_tokens=31)
        ask(cost, is_hit=True, n_tokens=32)
    assert [(known.tokens, known.is_bypassed) for known in cost.rows()] == [(16, True), (32, False)]


def test_a_rare_length_goes_aside_with_the_others() -> None:
    cost = CostModel(DEPTH)
    run(cost, PATIENCE)
    taken = [ask(cost, n_tokens=8 * TOKENS) for _ in range(PATIENCE // 8 + 10)]
    assert taken == [True] * (PATIENCE // 8) + [False] * 10


@pytest.mark.parametrize("is_hit", [True, False])
def test_a_rare_length_stays_where_it_or_the_others_hit(is_hit: bool) -> None:
    cost = CostModel(DEPTH)
    run(cost, PATIENCE, every=0 if is_hit else 4)
    assert all(ask(cost, is_hit and number % 4 == 0, n_tokens=8 * TOKENS) for number in range(PATIENCE // 2))


def test_a_batch_counts_as_its_rows() -> None:
    cost = CostModel(DEPTH)
    for _ in range(PATIENCE // 64):
        assert cost.judge(640, 64, ()).is_worthwhile
        cost.took(640, 64, 0, MISS)
    assert not cost.judge(640, 64, ()).is_worthwhile


def test_a_batch_served_in_part_gives_a_rate_but_no_times() -> None:
    cost = CostModel(DEPTH)
    cost.took(TOKENS, 4, 1, MISS)
    assert row(cost).hit_rate == 0.25
    assert row(cost).miss_ms is row(cost).hit_ms is None


def test_without_times_it_stays() -> None:
    cost = CostModel(DEPTH)
    for _ in range(4 * PATIENCE):
        assert cost.judge(TOKENS, 1, ()).is_worthwhile
        cost.took(TOKENS, 1, 0, None)
    assert row(cost).worthwhile_from is None


def test_where_a_hit_takes_longer_than_the_model_it_never_pays() -> None:
    cost = CostModel(DEPTH)
    for i in range(2 * PATIENCE):
        cost.judge(TOKENS, 1, (7,))
        cost.took(TOKENS, 1, i % 2, Times(0.002, 0.0019, 0.0) if i % 2 else Times(0.003, 0.0019, 0.001))
    assert row(cost).is_bypassed
    assert row(cost).worthwhile_from is None
    assert sum(run(cost, 640, hashes=[7] * 640)) == 10


def test_a_row_says_what_was_measured() -> None:
    cost = CostModel(DEPTH)
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
        }
    )


def test_what_was_not_seen_is_none_and_never_nan() -> None:
    cost = CostModel(DEPTH)
    cost.judge(TOKENS, 1, ())
    values = json.loads(json.dumps(asdict(row(cost)), allow_nan=False))
    assert {name: value for name, value in values.items() if value is not None} == {"tokens": 16, "is_bypassed": False}


def test_a_restart_forgets_and_forgetting_requests_keeps_times() -> None:
    cost = CostModel(DEPTH)
    run(cost, 10, hashes=[7] * 10)
    cost.forget()
    ask(cost, hashes=(7,))
    assert row(cost).repeats == pytest.approx(9 / 11)
    assert row(cost).miss_ms == pytest.approx(11.0)
    cost.restart()
    assert cost.rows() == ()


def test_only_the_latest_requests_are_known() -> None:
    cost = CostModel(DEPTH)
    cost.judge(2**17, 70_000, range(70_000))
    assert row(cost).repeats == 0.0
    cost.restart()
    cost.judge(2**17, 70_001, (*range(70_000), 0))  # forgotten by then
    assert row(cost).repeats == 0.0
    for n in (32_000, 40_000):
        cost.restart()
        cost.judge(2**17, n + 1, (*range(n), 0))
        assert row(cost).repeats == pytest.approx(1 / (n + 1))


def test_turns_are_logged_once_with_their_figures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="llmcache"):
        cost = aside()
        run(cost, 200)
        waits(cost)
    went, came = caplog.messages
    assert "bypasses itself for calls of 16 to 31 tokens: 0.0 % of requests could be served; it pays from" in went
    assert "serves again" in came


# -- compared with the model alone -------------------------------------------------------------------------------------


def serve_compared(cost: CostModel, n: int, every: int, beside_s: float = 0.0, plain_s: float = 0.01) -> int:
    """Calls of calibrated reuse, of which each `every`-th is a hit; how many were bypassed."""
    n_passed = 0
    for i in range(n):
        verdict = cost.judge(TOKENS, 1, (i,), compares=True)
        if verdict.is_worthwhile:
            cost.took(TOKENS, 1, int(i % every == 0), HIT if i % every == 0 else MISS)
            cost.spent(TOKENS, beside_s)
        else:
            assert verdict.is_timed or row(cost).is_bypassed
            cost.passed(TOKENS, plain_s)
            n_passed += 1
    return n_passed


def test_short_stretches_go_by_rarer_and_rarer() -> None:
    cost = CostModel(DEPTH)
    taken = [cost.judge(TOKENS, 1, (), compares=True).is_worthwhile for _ in range(1900)]
    by = [i for i, is_taken in enumerate(taken) if not is_taken]
    assert by == [*range(255, 271), *range(782, 798), *range(1821, 1837)]
    assert all(cost.judge(2 * TOKENS, 1, ()).is_worthwhile for _ in range(1900))  # where nothing is calibrated, none


def test_calls_of_a_stretch_are_noted_and_tell_that_they_go_by_to_be_compared() -> None:
    cost = CostModel(DEPTH)
    verdicts = [cost.judge(TOKENS, 1, (), compares=True) for _ in range(300)]
    by = [verdict for verdict in verdicts if not verdict.is_worthwhile]
    assert by and all(verdict.is_compared and verdict.is_recorded and verdict.is_timed for verdict in by)
    assert not any(verdict.is_compared for verdict in verdicts if verdict.is_worthwhile)


def test_what_is_done_before_a_foretold_call_is_billed_to_one_that_counts() -> None:
    cost = aside()
    before = row(cost).beside_ms
    assert before == 0.0
    cost.spent(TOKENS, 0.5)
    cost.took(TOKENS, 1, 1, HIT, is_foretold=True)
    assert row(cost).beside_ms == 0.0  # it says nothing of others
    cost.took(TOKENS, 1, 0, MISS)
    assert (row(cost).beside_ms or 0.0) > 0.0


def test_what_a_miss_takes_longer_than_the_model_is_the_overhead() -> None:
    """Lookup and storing are 1 ms of 11; the model alone would take 8."""
    cost = CostModel(DEPTH)
    serve_compared(cost, 400, every=2, plain_s=0.008)
    assert row(cost).plain_ms == pytest.approx(8.0)
    assert row(cost).worthwhile_from == pytest.approx(3 / (7 + 3))
    assert row(cost).layer_ms == pytest.approx(8.0 / DEPTH)


def test_what_is_done_beside_calls_counts_and_makes_it_step_aside() -> None:
    cost = CostModel(DEPTH)
    serve_compared(cost, 2 * PATIENCE, every=2, beside_s=0.002)
    assert row(cost).beside_ms == pytest.approx(2.0, rel=0.05)
    assert row(cost).worthwhile_from == pytest.approx((1 + 2) / (9 + 1), rel=0.05)
    assert not row(cost).is_bypassed
    cost = CostModel(DEPTH)
    serve_compared(cost, 2 * PATIENCE, every=2, beside_s=0.005)  # half of 9 ms are saved; half of 1 and all of 5 lost
    assert row(cost).is_bypassed


def test_a_cost_that_is_next_to_nothing_is_no_reason_to_step_aside() -> None:
    cost = CostModel(DEPTH)
    for i in range(2 * PATIENCE):
        assert cost.judge(TOKENS, 1, (i,)).is_worthwhile
        cost.took(TOKENS, 1, 0, Times(0.1, 0.0005, 0.0004))
    assert not row(cost).is_bypassed


# -- what is held, and what is recorded ----------------------------------------------------------------------------


def test_a_call_whose_requests_are_held_is_served_while_aside_and_does_not_speak_for_others() -> None:
    cost = aside()
    for i in range(20):
        verdict = cost.judge(TOKENS, 2, (-i - 1, -i - 101), held=lambda hashes: 1)
        assert verdict.is_worthwhile and verdict.is_foretold and not verdict.is_probe
        cost.took(TOKENS, 2, 1, None, verdict.is_foretold)
    assert row(cost).is_bypassed and row(cost).hit_rate == 0.0
    assert not cost.judge(
        TOKENS, 20, tuple(range(1000, 1020)), held=lambda hashes: 1
    ).is_worthwhile  # one of twenty: 5 %


def note(cost: CostModel, recording_s: float, n_tokens: int = TOKENS) -> int:
    """Ask 600 requests; how many calls were noted, which takes that long."""
    n_recorded = 0
    for request in range(n_tokens * 1000, n_tokens * 1000 + 600):
        verdict = cost.judge(n_tokens, 1, (request,))
        n_recorded += verdict.is_recorded
        if verdict.is_recorded:
            cost.passed(n_tokens, 0.01, recording_s)
    return n_recorded


def test_the_first_calls_are_noted_whatever_that_takes_and_one_of_each_length() -> None:
    cost = aside()
    for _ in range(PATIENCE // 8):
        assert ask(cost, n_tokens=4 * TOKENS)
    assert all(length.is_bypassed for length in cost.rows())
    assert note(cost, 1.0) == 1 + 256
    assert note(cost, 1.0, 4 * TOKENS) == 1


def test_what_goes_by_is_noted_unless_that_takes_too_long() -> None:
    for recording_s, is_recorded in ((0.00002, True), (0.01, False)):
        cost = aside()
        note(cost, recording_s)
        verdicts = [cost.judge(TOKENS, 1, (i,)) for i in range(10)]
        assert {verdict.is_recorded for verdict in verdicts if not verdict.is_probe} == {is_recorded}


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


@given(st.lists(st.integers(0, 40), min_size=1, max_size=400))
def test_the_short_way_changes_no_decision(asked: list[int]) -> None:
    short, long = aside(), aside()
    for cost in (short, long):
        note(cost, 0.01)

    def ask_shortly(request: int) -> bool:
        return not short.lets_pass(TOKENS, request) and ask(short, hashes=(request,))

    assert [ask_shortly(one) for one in asked] == [ask(long, hashes=(one,)) for one in asked]
    assert row(short) == row(long)


def test_the_short_way_is_for_new_requests_of_lengths_that_are_aside_and_not_noted() -> None:
    cost = aside()
    assert not CostModel(DEPTH).lets_pass(TOKENS, 1) and not cost.lets_pass(4 * TOKENS, 1)
    assert not cost.lets_pass(TOKENS, 1)  # the first ones are recorded
    note(cost, 0.01)
    assert cost.lets_pass(TOKENS, 1) and not cost.lets_pass(TOKENS, 1)


@pytest.mark.parametrize(("recording_s", "share"), [(0.00002, 1.0), (0.00005, 0.5), (0.00025, 0.1)])
def test_as_many_calls_are_noted_as_the_time_for_it_allows(recording_s: float, share: float) -> None:
    """0.25 % of 10 ms are 0.025 ms a call."""
    cost = aside()
    note(cost, recording_s)
    n_recorded = 0
    for request in range(1, 2001):
        if cost.lets_pass(TOKENS, request):
            continue
        verdict = cost.judge(TOKENS, 1, (request,), searches=False)
        n_recorded += verdict.is_recorded
        if not verdict.is_worthwhile:
            cost.passed(TOKENS, 0.01, recording_s if verdict.is_recorded else None)
    assert n_recorded / 2000 == pytest.approx(share, abs=0.01)


def test_probes_are_rarer_where_calls_are_noted_and_nothing_is_searched() -> None:
    cost = aside()
    taken = [cost.judge(TOKENS, 1, (i + 1,), searches=False).is_worthwhile for i in range(1024)]
    assert [i for i, is_taken in enumerate(taken, 1) if is_taken] == [512, 1024]
