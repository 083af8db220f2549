"""Decisions on neighbours: pure functions of similarities and agreement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.config import Component
from llmcache.decide import DECISIONS, Consensus, Evidence, Risk, Threshold, deepest_layer
from llmcache.errors import ConfigError

Array = np.ndarray


def agreement(answers: Array) -> Array:
    """Pairs (N, k, k) of equal answers (N, k)."""
    return answers[:, :, None] == answers[:, None]


def seen(similarity: Array, agree: Array, favour: Array | None = None) -> Evidence:
    """Evidence, without a forecast unless one is given."""
    return Evidence(similarity, agree, np.zeros_like(similarity) if favour is None else favour)


def made(n: int, k: int = 8, seed: int = 0) -> tuple[Evidence, Array]:
    """Evidence, and whether neighbours are right: the likelier, the more alike and the more agree."""
    rng = np.random.default_rng(seed)
    similarity = -np.sort(-rng.uniform(0.2, 1.0, (n, k)), axis=1).astype(np.float32)
    own = rng.integers(0, 5, n)
    is_right = rng.random((n, k)) < similarity**2
    answers = np.where(is_right, own[:, None], 5 + rng.integers(0, 5, (n, k)))
    return seen(similarity, agreement(answers)), is_right


def test_threshold_doubts_less_what_is_more_alike() -> None:
    chosen, doubt = Threshold().choose(seen(np.float32([[0.9], [0.4]]), np.ones((2, 1, 1), bool)))
    assert chosen.tolist() == [0, 0]
    assert doubt.tolist() == pytest.approx([-0.9, -0.4])


def test_consensus_serves_only_what_all_neighbours_agree_on() -> None:
    similarity = np.float32([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]])
    _, doubt = Consensus(3).choose(seen(similarity, agreement(np.array([[4, 4, 4], [4, 4, 5]]))))
    assert doubt[0] == pytest.approx(-0.9)
    assert doubt[1] == np.inf


def test_consensus_refuses_too_few_neighbours() -> None:
    agree = agreement(np.array([[4, 4, 4]]))
    agree[:, 2] = agree[:, :, 2] = False  # the third was not found
    _, doubt = Consensus(3).choose(seen(np.float32([[0.9, 0.8, -1.0]]), agree))
    assert doubt[0] == np.inf


def test_risk_serves_nothing_before_it_has_learned() -> None:
    assert np.isinf(Risk().choose(made(5)[0])[1]).all()


def test_risk_lets_the_majority_outvote_the_nearest() -> None:
    risk = Risk(k=4)
    risk.fit(*made(600, k=4, seed=1))
    similarity = np.float32([[0.90, 0.89, 0.88, 0.88]])
    chosen, _ = risk.choose(seen(similarity, agreement(np.array([[1, 2, 2, 2]]))))
    assert chosen[0] == 1


def test_risk_lets_a_forecast_outvote_the_neighbours() -> None:
    evidence, is_right = made(600, seed=1)
    favour = np.where(is_right, 1.0, -1.0) + np.random.default_rng(2).normal(0, 0.3, is_right.shape)
    risk = Risk()
    risk.fit(seen(evidence.similarity, evidence.agree, favour), is_right)
    agree = agreement(np.array([[1, 1, 1, 1, 1, 1, 2, 2]]))
    similarity = np.linspace(0.9, 0.8, 8, dtype=np.float32)[None]
    for sign in (1, -1):  # for the answer of the first six, then for that of the last two
        chosen, doubt = risk.choose(seen(similarity, agree, np.float32([[sign] * 6 + [-sign] * 2])))
        assert chosen[0] == (0 if sign == 1 else 6)
        assert doubt[0] < 0.5


def test_of_neighbours_with_one_answer_the_nearest_serves() -> None:
    risk = Risk()
    risk.fit(*made(300, seed=1))
    evidence, _ = made(200, seed=2)
    chosen, _ = risk.choose(evidence)
    for agree, number in zip(evidence.agree, chosen, strict=True):
        assert agree[number].argmax() == number


def test_risk_ranks_requests_by_the_chance_that_reuse_changes_them() -> None:
    risk = Risk()
    risk.fit(*made(600, seed=1))
    evidence, is_right = made(600, seed=2)
    chosen, doubt = risk.choose(evidence)
    changes = ~np.take_along_axis(is_right, chosen[:, None], 1)[:, 0]
    assert ((doubt >= 0) & (doubt <= 1)).all()
    assert doubt.mean() == pytest.approx(changes.mean(), abs=0.06)
    by_doubt = changes[np.argsort(doubt)]
    assert by_doubt[:200].mean() < by_doubt[200:400].mean() < by_doubt[400:].mean()


@pytest.mark.parametrize("are_right", [True, False])
def test_risk_learns_from_answers_that_are_all_alike(are_right: bool) -> None:
    evidence, _ = made(50)
    risk = Risk()
    risk.fit(evidence, np.full(evidence.similarity.shape, are_right))
    doubt = risk.choose(evidence)[1]
    assert (doubt < 0.5).all() if are_right else (doubt > 0.5).all()


def test_risk_doubts_without_end_where_neighbours_are_missing() -> None:
    risk = Risk(k=4)
    risk.fit(*made(100, k=4))
    evidence, _ = made(1, k=4)
    evidence.similarity[0, 3] = -1.0
    assert np.isinf(risk.choose(evidence)[1][0])


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_each_request_is_decided_by_itself(seed: int) -> None:
    risk = Risk()
    risk.fit(*made(80, seed=3))
    evidence, _ = made(6, seed=seed)
    for decision in (Threshold(), Consensus(3), risk):
        k = decision.k
        whole = Evidence(evidence.similarity[:, :k], evidence.agree[:, :k, :k], evidence.favour[:, :k])
        together = decision.choose(whole)
        for i in range(6):
            chosen, doubt = decision.choose(Evidence(*(getattr(whole, part)[i : i + 1] for part in Evidence.__slots__)))
            assert chosen[0] == together[0][i]
            assert doubt[0] == pytest.approx(together[1][i], rel=1e-5)


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
        Component.model_validate(given_).build(DECISIONS, "decide")


def test_deepest_layer_within_its_limit() -> None:
    assert deepest_layer(0.2, {1: 0.5, 3: 0.2, 5: 0.1}, [1, 3, 5]) == 3
    assert deepest_layer(0.2, {1: 0.5, 3: 0.2}, [1]) == 1
    assert deepest_layer(0.6, {1: 0.5}, [1]) is None
