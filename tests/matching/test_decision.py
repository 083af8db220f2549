"""Decisions on neighbours: pure functions of similarities and agreement."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isnan

import numpy as np
import pytest

from llmcache.errors import ConfigError
from llmcache.matching import DECISIONS, Consensus, Evidence, Risk, Threshold
from llmcache.matching.decision import Decision, deepest_layer, share_of, thresholds
from llmcache.registry import Component


def seen(similarity: Sequence[float], answers: Sequence[int], favour: Sequence[float] | None = None) -> Evidence:
    """Evidence of neighbours with these answers, without a forecast unless one is given."""
    agree = [[one == other for other in answers] for one in answers]
    return Evidence(similarity, agree, [0.0] * len(answers) if favour is None else favour)


def made(n: int, k: int = 8, seed: int = 0) -> tuple[list[Evidence], list[list[bool]]]:
    """Evidence, and whether neighbours are right: the likelier, the more alike and the more agree."""
    rng = np.random.default_rng(seed)
    similarity = -np.sort(-rng.uniform(0.2, 1.0, (n, k)), axis=1)
    own = rng.integers(0, 5, n)
    is_right = rng.random((n, k)) < similarity**2
    answers = np.where(is_right, own[:, None], 5 + rng.integers(0, 5, (n, k)))
    cases = zip(similarity.tolist(), answers.tolist(), strict=True)
    return [seen(*case) for case in cases], is_right.tolist()


def taught(k: int = 8, n: int = 600, seed: int = 1) -> Risk:
    risk = Risk(k=k)
    risk.fit(*made(n, k, seed))
    return risk


def drawn(decision: Decision, rng: np.random.Generator, n: int) -> tuple[Evidence, list[bool]]:
    """Neighbours, likelier right the more alike, some without an answer; and which of them are right."""
    similarity = np.sort(rng.uniform(0.2, 1, n))[::-1]
    is_right = rng.random(n) < similarity**2
    answers = np.where(is_right, 0, rng.integers(-1, 3, n))  # -1: none
    agree = ((answers[:, None] == answers) & (answers >= 0)).tolist() if decision.reads_answers else ()
    seen = Evidence(similarity.tolist(), agree, rng.normal(is_right, 0.5).tolist())
    return seen, is_right.tolist()


def check_choices(decision: Decision, asked: Sequence[Evidence]) -> list[tuple[int, float]]:
    chosen = []
    for seen in asked:
        n = len(seen.similarity)
        if not n:
            continue  # it is not asked then
        number, risk = decision.choose(seen)
        assert decision.choose(seen) == (number, risk)
        assert not isnan(risk)
        if risk < inf:
            least, most = decision.risk_range
            assert least - 1e-9 <= risk <= most + 1e-9
            assert 0 <= number < n
            assert not decision.reads_answers or seen.agree[number][number]
        chosen.append((number, risk))
    return chosen


@pytest.mark.parametrize("name", DECISIONS)
def test_every_decision_keeps_the_rules(name: str) -> None:
    """Neighbours of every number up to `k`, before and after it could learn; and its state in a second one."""
    decision, rng = DECISIONS[name](), np.random.default_rng(0)
    check_choices(decision, [drawn(decision, rng, n)[0] for n in range(decision.k + 1) for _ in range(20)])
    seen, is_right = zip(*(drawn(decision, rng, decision.k) for _ in range(300)), strict=True)
    decision.fit(seen, is_right)
    asked = [drawn(decision, rng, n)[0] for n in range(decision.k + 1) for _ in range(20)]
    chosen = check_choices(decision, asked)
    other = DECISIONS[name]()
    other.restore(decision.state())
    assert check_choices(other, asked) == chosen


def test_threshold_doubts_less_what_is_more_alike() -> None:
    assert Threshold().choose(Evidence([0.9])) == (0, -0.9)
    assert Threshold().choose(Evidence([0.4])) == (0, -0.4)


def test_consensus_serves_only_what_enough_neighbours_all_agree_on() -> None:
    assert Consensus(3).choose(seen([0.9, 0.8, 0.7], [4, 4, 4])) == (0, -0.9)
    assert Consensus(3).choose(seen([0.9, 0.8, 0.7], [4, 4, 5])) == (0, np.inf)
    assert Consensus(3).choose(seen([0.9, 0.8], [4, 4])) == (0, np.inf)


def test_risk_serves_nothing_before_it_has_learned() -> None:
    assert {Risk().choose(evidence)[1] for evidence in made(5)[0]} == {np.inf}


def test_risk_lets_the_majority_outvote_the_nearest() -> None:
    assert taught(k=4).choose(seen([0.90, 0.89, 0.88, 0.88], [1, 2, 2, 2]))[0] == 1


def test_risk_lets_a_forecast_outvote_the_neighbours() -> None:
    evidence, is_right = made(600, seed=1)
    noise = np.random.default_rng(2).normal(0, 0.3, (600, 8))
    favour = (np.where(is_right, 1.0, -1.0) + noise).tolist()
    risk = Risk()
    risk.fit([replace(one, favour=told) for one, told in zip(evidence, favour, strict=True)], is_right)
    similarity = np.linspace(0.9, 0.8, 8).tolist()
    for sign in (1.0, -1.0):  # for the answer of the first six, then for that of the last two
        chosen, chance = risk.choose(seen(similarity, [1, 1, 1, 1, 1, 1, 2, 2], [sign] * 6 + [-sign] * 2))
        assert chosen == (0 if sign == 1 else 6)
        assert chance < 0.5


def test_of_neighbours_with_one_answer_the_nearest_serves() -> None:
    risk = taught(n=300)
    for evidence in made(200, seed=2)[0]:
        chosen, _ = risk.choose(evidence)
        assert evidence.agree[chosen].index(True) == chosen


def test_risk_ranks_requests_by_the_chance_that_reuse_changes_them() -> None:
    risk, (evidence, is_right) = taught(), made(600, seed=2)
    chosen = [risk.choose(one) for one in evidence]
    risk = np.array([risk for _, risk in chosen])
    changes = np.array([not right[number] for right, (number, _) in zip(is_right, chosen, strict=True)])
    assert ((risk >= 0) & (risk <= 1)).all()
    assert risk.mean() == pytest.approx(changes.mean(), abs=0.06)
    by_doubt = changes[np.argsort(risk)]
    assert by_doubt[:200].mean() < by_doubt[200:400].mean() < by_doubt[400:].mean()


@pytest.mark.parametrize("are_right", [True, False])
def test_risk_learns_from_answers_that_are_all_alike(are_right: bool) -> None:
    evidence, _ = made(50)
    risk = Risk()
    risk.fit(evidence, [[are_right] * 8] * 50)
    risks = [risk.choose(one)[1] for one in evidence]
    assert max(risks) < 0.5 if are_right else min(risks) > 0.5


def test_risk_has_no_use_for_neighbours_that_are_missing_or_without_an_answer() -> None:
    risk, similarity = taught(k=3), [0.9, 0.8, 0.7]
    assert risk.choose(seen(similarity[:2], [1, 1]))[1] == np.inf
    assert risk.choose(Evidence(similarity, [[False] * 3] * 3, [0.0] * 3))[1] == np.inf
    untold = [[False, False, False], [False, True, True], [False, True, True]]  # the nearest has none
    assert risk.choose(Evidence(similarity, untold, [0.0] * 3))[0] == 1


def test_no_odds_are_too_long() -> None:
    risk = taught(k=3)
    for far in (-1e6, 1e6):
        assert 0 <= risk.choose(seen([0.9, 0.8, 0.7], [1, 1, 1], [far] * 3))[1] <= 1


@pytest.mark.parametrize(
    "given_",
    [
        {"name": "consensus", "k": 1},
        {"name": "risk", "k": 2},
        {"name": "risk", "width": 0},
        {"name": "risk", "k": 65},
        {"name": "risk", "weights": [1.0]},
    ],
)
def test_what_cannot_vote_is_refused(given_: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="decide"):
        Component.model_validate(given_).build(DECISIONS)


def test_deepest_layer_within_its_limit() -> None:
    assert deepest_layer(0.2, {1: 0.5, 3: 0.2, 5: 0.1}, [1, 3, 5]) == 3
    assert deepest_layer(0.2, {1: 0.5, 3: 0.2}, [1]) == 1
    assert deepest_layer(0.6, {1: 0.5}, [1]) is None


def test_a_share_is_of_the_risk_that_is_allowed() -> None:
    assert share_of(0.01, 0.04) == pytest.approx(0.25) and share_of(0.0, 0.04) == 0.0
    assert share_of(0.08, 0.04) == share_of(-0.9, -0.8) == share_of(0.5, float("inf")) == share_of(0.5, 0.0) == 1.0


def test_a_threshold_is_one_for_all_stored_layers_or_by_layer_counted_from_either_end() -> None:
    assert thresholds(None, [0, 3], 4) == {}
    assert thresholds(0.9, [0, 3], 4) == {0: 0.9, 3: 0.9}
    assert thresholds({0: 0.8, -1: 0.9}, [0, 3], 4) == {0: 0.8, 3: 0.9}
    with pytest.raises(ValueError, match=r"tau names layers \[2\] that are not stored; stored: \[0, 3\]"):
        thresholds({-2: 0.9}, [0, 3], 4)


def test_a_consensus_of_one_is_refused() -> None:
    assert Consensus(k=2).k == 2
    with pytest.raises(ValueError, match="at least 2"):
        Consensus(k=1)
