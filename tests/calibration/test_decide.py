"""The choice of a source and its risk, from similarities and agreement; then sources and their search."""

from collections.abc import Sequence
from math import inf

import numpy as np
import pytest
import torch

from llmcache.memory.bank import Entry
from llmcache.memory.index import FlatIndex
from llmcache.request.rows import Row, Scope
from llmcache.reuse.decide import Evidence, K, Risk
from llmcache.reuse.sources import Source, Sources


def seen(similarity: Sequence[float], answers: Sequence[int], favour: Sequence[float] | None = None) -> Evidence:
    """Evidence of neighbours with these answers, without a forecast unless one is given."""
    agree = [[one == other for other in answers] for one in answers]
    return Evidence(similarity, agree, [0.0] * len(answers) if favour is None else favour)


def made(n: int, seed: int = 0) -> tuple[list[Evidence], list[list[bool]]]:
    """Make evidence, and whether neighbours are right: the likelier, the more similar they are."""
    rng = np.random.default_rng(seed)
    similarity = -np.sort(-rng.uniform(0.2, 1.0, (n, K)), axis=1)
    own = rng.integers(0, 5, n)
    is_right = rng.random((n, K)) < similarity**2
    answers = np.where(is_right, own[:, None], 5 + rng.integers(0, 5, (n, K)))
    cases = zip(similarity.tolist(), answers.tolist(), strict=True)
    return [seen(*case) for case in cases], is_right.tolist()


def taught() -> Risk:
    risk = Risk()
    risk.fit(*made(600, seed=1))
    return risk


def test_nothing_is_served_before_it_has_learned_nor_from_too_few() -> None:
    assert {Risk().choose(evidence)[1] for evidence in made(5)[0]} == {inf}
    assert taught().choose(seen([0.9] * (K - 1), [1] * (K - 1)))[1] == inf


@pytest.mark.parametrize(
    ("answers", "favour", "chosen"),
    [([1, 2, 2, 2, 2, 2, 2, 2], 0.0, 1), ([1] * 6 + [2, 2], 1.0, 0), ([1] * 6 + [2, 2], -1.0, 6)],
    ids=["the majority outvotes the nearest", "a forecast agrees", "a forecast outvotes the neighbours"],
)
def test_who_serves(answers: list[int], favour: float, chosen: int) -> None:
    evidence, is_right = made(600, seed=1)
    noise = np.random.default_rng(2).normal(0, 0.3, (600, K))
    told = (np.where(is_right, 1.0, -1.0) + noise).tolist() if favour else [[0.0] * K] * 600
    risk = Risk()
    risk.fit([one._replace(favour=row) for one, row in zip(evidence, told, strict=True)], is_right)
    similarity = np.linspace(0.9, 0.85, K).tolist()
    assert risk.choose(seen(similarity, answers, [favour] * 6 + [-favour] * 2))[0] == chosen


def test_risks_are_the_chance_that_an_answer_changes() -> None:
    risk, (evidence, is_right) = taught(), made(600, seed=2)
    chosen = [risk.choose(one) for one in evidence]
    assert all(one.agree[number].index(True) == number for one, (number, _) in zip(evidence, chosen, strict=True))
    risks = np.array([one for _, one in chosen])
    changes = np.array([not right[number] for right, (number, _) in zip(is_right, chosen, strict=True)])
    assert risks.mean() == pytest.approx(changes.mean(), abs=0.06)
    by_risk = changes[np.argsort(risks)]
    assert by_risk[:200].mean() < by_risk[200:400].mean() < by_risk[400:].mean()
    again = Risk()
    again.restore(risk.state())
    assert [again.choose(one) for one in evidence] == chosen
    for far in (-1e6, 1e6):  # extreme odds do not overflow
        assert 0 <= risk.choose(seen([0.9] * K, [1] * K, [far] * K))[1] <= 1


@pytest.mark.parametrize("are_right", [True, False])
def test_it_learns_from_answers_that_are_all_alike(are_right: bool) -> None:
    evidence, risk = made(50)[0], Risk()
    risk.fit(evidence, [[are_right] * K] * 50)
    risks = [risk.choose(one)[1] for one in evidence]
    assert max(risks) < 0.5 if are_right else min(risks) > 0.5


# -- sources -----------------------------------------------------------------------------------------------------------


def source(key: str, namespace: str = "default", length: int = 0) -> Source:
    entry = Entry(key, Scope(namespace, "w", "", "sdpa"), (torch.ones(1, 2),))
    return Source(entry, b"", np.zeros(1, np.float32), length)


def row(length: int) -> Row:
    return Row(0, "", b"", slice(0, length), length)


def found(sources: Sources, x: np.ndarray, namespace: str = "default", length: int = 0) -> list[str]:
    (near,) = sources.search(Scope(namespace, "w", "", "sdpa"), [row(length)], x[None], 3)
    return [one.key for one in near.sources]


def test_sources_are_found_in_their_scope_and_length_until_they_leave() -> None:
    sources, x = Sources(FlatIndex, by_length=True), np.eye(4, dtype=np.float32)
    sources.add([source("a", length=3), source("b", length=4), source("c", "tenant", 3)], x[:3])
    sources.add([source("d", length=3)], x[3:])
    assert found(sources, x[0], length=3) == ["a", "d"] and found(sources, x[0], length=4) == ["b"]
    assert found(sources, x[0], "tenant", 3) == ["c"] and found(sources, x[0], "other", 3) == []
    np.testing.assert_allclose(sources.vectors([source("d"), source("a")]), x[[3, 0]])
    sources.remove("a")
    sources.remove("unknown")
    assert found(sources, x[0], length=3) == ["d"] and "a" not in sources
    sources.add([source("e", length=3)], x[:1])  # takes the slot that is free
    sources.quarantine("e", "default")
    (near,) = sources.search(source("e").entry.scope, [row(3)], x[:1], 1)
    assert near.sources[0].key == "e" and not sources.may_serve("e")
    sources.forget("tenant")
    assert len(sources) == 3 and sources.quarantined == {"e": "default"}
    sources.forget()
    assert len(sources) == 0 and not sources.quarantined
