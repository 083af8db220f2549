"""Risks of unusual evidence; sources and their search. `contract/decisions.json` holds usual risks."""

from collections.abc import Sequence
from math import inf

import numpy as np
import torch

from llmcache.memory.bank import Entry
from llmcache.memory.index import FlatIndex
from llmcache.request.rows import Row, Scope
from llmcache.reuse.decide import Evidence, K, Risk
from llmcache.reuse.sources import Source, Sources


def seen(similarity: Sequence[float], answers: Sequence[int], closeness: Sequence[float] | None = None) -> Evidence:
    """Evidence of neighbours with these answers, without a forecast unless one is given."""
    agree = [[one == other for other in answers] for one in answers]
    return Evidence(similarity, agree, [0.0] * len(answers) if closeness is None else closeness)


def made(n: int) -> tuple[list[Evidence], list[list[bool]]]:
    """Make evidence, and whether neighbours are right: the likelier, the more similar they are."""
    rng = np.random.default_rng(0)
    similarity = -np.sort(-rng.uniform(0.2, 1.0, (n, K)), axis=1)
    own = rng.integers(0, 5, n)
    is_right = rng.random((n, K)) < similarity**2
    answers = np.where(is_right, own[:, None], 5 + rng.integers(0, 5, (n, K)))
    cases = zip(similarity.tolist(), answers.tolist(), strict=True)
    return [seen(*case) for case in cases], is_right.tolist()


def test_it_needs_enough_neighbours_and_learns_from_answers_that_are_all_alike() -> None:
    risk, (evidence, is_right) = Risk(), made(600)
    assert risk.choose(evidence[0])[1] == inf  # before it has learned
    risk.fit(evidence, is_right)
    assert risk.choose(seen([0.9] * (K - 1), [1] * (K - 1)))[1] == inf
    for far in (-1e6, 1e6):  # extreme odds do not overflow
        assert 0 <= risk.choose(seen([0.9] * K, [1] * K, [far] * K))[1] <= 1
    for are_right in (True, False):
        risk.fit(evidence[:50], [[are_right] * K] * 50)
        risks = [risk.choose(one)[1] for one in evidence[:50]]
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
