"""Decisions on neighbours: pure functions of similarities and agreement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.config import Component
from llmcache.decide import DECISIONS, Consensus, Risk, Threshold, deepest_layer
from llmcache.errors import ConfigError

Array = np.ndarray


def agreement(answers: Array) -> Array:
    """Pairs (N, k, k) of equal answers (N, k)."""
    return answers[:, :, None] == answers[:, None]


def made(n: int, k: int = 8, seed: int = 0) -> tuple[Array, Array, Array]:
    """Similarities, agreement, and whether neighbours are right: the likelier, the more alike and the more agree."""
    rng = np.random.default_rng(seed)
    similarity = -np.sort(-rng.uniform(0.2, 1.0, (n, k)), axis=1).astype(np.float32)
    own = rng.integers(0, 5, n)
    is_right = rng.random((n, k)) < similarity**2
    answers = np.where(is_right, own[:, None], 5 + rng.integers(0, 5, (n, k)))
    return similarity, agreement(answers), is_right


def test_threshold_doubts_less_what_is_more_alike() -> None:
    chosen, doubt = Threshold().choose(np.float32([[0.9], [0.4]]), np.ones((2, 1, 1), bool))
    assert chosen.tolist() == [0, 0]
    assert doubt.tolist() == pytest.approx([-0.9, -0.4])


def test_consensus_serves_only_what_all_neighbours_agree_on() -> None:
    similarity = np.float32([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]])
    _, doubt = Consensus(3).choose(similarity, agreement(np.array([[4, 4, 4], [4, 4, 5]])))
    assert doubt[0] == pytest.approx(-0.9)
    assert doubt[1] == np.inf


def test_consensus_refuses_too_few_neighbours() -> None:
    agree = agreement(np.array([[4, 4, 4]]))
    agree[:, 2] = agree[:, :, 2] = False  # the third was not found
    _, doubt = Consensus(3).choose(np.float32([[0.9, 0.8, -1.0]]), agree)
    assert doubt[0] == np.inf


def test_risk_serves_nothing_before_it_has_learned() -> None:
    similarity, agree, _ = made(5)
    assert np.isinf(Risk().choose(similarity, agree)[1]).all()


def test_risk_lets_the_majority_outvote_the_nearest() -> None:
    similarity = np.float32([[0.90, 0.89, 0.88, 0.88]])
    chosen, _ = Risk(k=4).choose(similarity, agreement(np.array([[1, 2, 2, 2]])))
    assert chosen[0] == 1


def test_risk_ranks_requests_by_the_chance_that_reuse_changes_them() -> None:
    risk = Risk()
    risk.fit(*made(600, seed=1))
    similarity, agree, is_right = made(600, seed=2)
    chosen, doubt = risk.choose(similarity, agree)
    changes = ~np.take_along_axis(is_right, chosen[:, None], 1)[:, 0]
    assert ((doubt >= 0) & (doubt <= 1)).all()
    assert doubt.mean() == pytest.approx(changes.mean(), abs=0.06)
    by_doubt = changes[np.argsort(doubt)]
    assert by_doubt[:200].mean() < by_doubt[200:400].mean() < by_doubt[400:].mean()


@pytest.mark.parametrize("are_right", [True, False])
def test_risk_learns_from_answers_that_are_all_alike(are_right: bool) -> None:
    similarity, agree, _ = made(50)
    risk = Risk()
    risk.fit(similarity, agree, np.full(similarity.shape, are_right))
    doubt = risk.choose(similarity, agree)[1]
    assert (doubt < 0.5).all() if are_right else (doubt > 0.5).all()


def test_risk_doubts_without_end_where_neighbours_are_missing() -> None:
    risk = Risk(k=4)
    risk.fit(*made(100, k=4))
    similarity, agree, _ = made(1, k=4)
    similarity[0, 3] = -1.0
    assert np.isinf(risk.choose(similarity, agree)[1][0])


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_each_request_is_decided_by_itself(seed: int) -> None:
    risk = Risk()
    risk.fit(*made(80, seed=3))
    similarity, agree, _ = made(6, seed=seed)
    for decision in (Threshold(), Consensus(3), risk):
        k = decision.k
        together = decision.choose(similarity[:, :k], agree[:, :k, :k])
        for i in range(6):
            chosen, doubt = decision.choose(similarity[i : i + 1, :k], agree[i : i + 1, :k, :k])
            assert chosen[0] == together[0][i]
            assert doubt[0] == pytest.approx(together[1][i], rel=1e-5)


@pytest.mark.parametrize(
    "given_", [{"name": "consensus", "k": 1}, {"name": "risk", "k": 2}, {"name": "risk", "width": 0}]
)
def test_what_cannot_vote_is_refused(given_: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="decide"):
        Component.model_validate(given_).build(DECISIONS, "decide")


def test_deepest_layer_within_its_limit() -> None:
    assert deepest_layer(0.2, {1: 0.5, 3: 0.2, 5: 0.1}, [1, 3, 5]) == 3
    assert deepest_layer(0.2, {1: 0.5, 3: 0.2}, [1]) == 1
    assert deepest_layer(0.6, {1: 0.5}, [1]) is None
