"""Replays: each equals a live run, and its bounds are those of an exhaustive search."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.streams.traffic import BYTES, Asked
from experiments.methods.cached import serve_from
from experiments.replay.eviction import WTinyLFU, most_hits, replay_blocks, replay_entries
from experiments.replay.rehearsal import Frozen, Rehearsal, empty, grow
from experiments.replay.replay import Units, choose_threshold, serve
from experiments.replay.student import Student
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache import POLICIES, ConfigError
from llmcache.lab import RiskTarget, split
from tests.experiments.helpers import LEARN, TASK, N
from tests.tiny_prompts import TRACE

CLAIM = RiskTarget(0.2, 0.05, "changed", "frozen", 0)


@pytest.fixture(scope="module")
def rehearsal() -> Rehearsal:
    """A rehearsal on a stream with repeats, also of requests after the learned ones."""
    task = TASK | {"name": "stream", "traffic": {"n": N, "skew": 0.5}}
    return Rehearsal(build(make_task(task), Folders(), 0), {"answer": "class"})


@pytest.mark.parametrize("sources", ["growing", "frozen"])
def test_a_replay_of_calibrated_reuse_equals_serving(rehearsal: Rehearsal, sources: Any) -> None:
    empty(rehearsal.cache, rehearsal.observed)
    learned, later = rehearsal.observed[:LEARN], rehearsal.observed[LEARN:]
    reuse = rehearsal.calibrated
    found = reuse.calibrate(learned, RiskTarget(0.2, 0.05, "changed", sources, 0))
    assert found.chosen is not None
    answers, outcomes = zip(*serve_from(rehearsal.cache, rehearsal.workload, LEARN, ""), strict=True)
    if sources == "growing":
        served, keys = grow(reuse, learned, later, found.chosen.limit)
    else:
        held = {source.key for source in reuse.fitter.sources}
        kept = [case for case in learned if case.row.key in held]
        reuse.fitter.set_sources(kept)
        served, keys = Frozen(reuse, kept, later).serve(found.chosen.limit)
    assert served.tolist() == [outcome.rung or "computed" for outcome in outcomes]
    assert {"semantic", "computed", "exact"} <= set(served)
    assert rehearsal.answers_from(LEARN, keys) == [*answers] != rehearsal.answers[LEARN:]


def test_the_students_answers_are_examples_and_the_likelier_wrong_the_riskier(rehearsal: Rehearsal) -> None:
    student = Student(rehearsal.calibrated)
    learned, later = rehearsal.observed[:LEARN], rehearsal.observed[LEARN:]
    limits = student.learn(learned)
    assert (np.diff(limits) > 0).all() and limits[0] >= 0 and limits[-1] <= 0.5
    answers = {case.row.key: case.answer for case in learned}
    found = student.look_up(later, set())
    assert len({answers[one.key].tobytes() for one in found}) == len({one.key for one in found}) > 2
    changed = np.array([(case.answer != answers[one.key]).any() for case, one in zip(later, found, strict=True)])
    order = np.argsort([one.risk for one in found])
    assert changed[order[: N // 8]].mean() < changed[order[-N // 8 :]].mean()
    chosen = student.calibrate(learned, CLAIM).chosen
    assert chosen is not None and chosen.bound <= CLAIM.max_drop


def test_requests_of_several_rows_are_refused() -> None:
    task = make_task({"name": "openbookqa", "model": "untrained", "data": "made", "limit": 5})
    with pytest.raises(ConfigError, match="row by row"):
        Rehearsal(build(task, Folders(), 0), {})


def test_a_threshold_keeps_its_claim_and_later_requests_are_served_alone() -> None:
    """Points on a circle in six overlapping groups; the group is the answer."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 6, 900)
    angle = group * np.pi / 3 + rng.normal(0, 0.3, 900)
    units = Units(np.arange(900), np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32))
    claim = RiskTarget(0.05, 0.05, "changed", "frozen", 0)
    compared: list[int] = []

    def is_changed(one: int, other: int) -> bool:
        compared.extend((one, other))
        return bool(group[one] != group[other])

    setting, stored = choose_threshold(units, 600, claim, is_changed)
    learned, tested = split(600, claim)
    assert stored.tolist() == learned and max(compared) < 600 and set(compared[::2]) == set(tested)
    assert setting is not None and setting.bound <= 0.05 and setting.hit_rate > 0
    frozen, growing = (serve(units, 600, setting, stored, grows) for grows in (False, True))
    for again in (frozen, growing):
        near = again.served == "near"
        assert not near[:600].any() and near.any() and (again.similarity[near] >= -setting.limit - 1e-6).all()
    assert set(frozen.source[frozen.served == "near"]) <= set(stored)
    assert (growing.served == "near").sum() >= (frozen.served == "near").sum()
    strict = RiskTarget(0.02, 0.05, "changed", "frozen", 0)
    assert choose_threshold(units, 600, strict, lambda one, other: True)[0] is None
    assert (serve(units, 600, None, stored, grows=False).served == "computed").all()


def of(keys: Sequence[str]) -> list[Sequence[Asked]]:
    """Return one request per key."""
    return [[Asked(key)] for key in keys]


@cache
def most(keys: str, max_entries: int) -> int:
    """Return the most possible hits, by exhaustive search."""

    def hits(at: int, held: frozenset[str]) -> int:
        if at == len(keys):
            return 0
        if keys[at] in held:
            return 1 + hits(at + 1, held)
        room = [held | {keys[at]}] if len(held) < max_entries else [held - {one} | {keys[at]} for one in held]
        return max(hits(at + 1, later) for later in [held, *room])

    return hits(0, frozenset())


@given(st.text("abcd", max_size=9), st.integers(1, 3))
def test_the_bound_is_the_most_that_is_possible(keys: str, max_entries: int) -> None:
    assert most_hits(of(keys), max_entries).hits == most(keys, max_entries)
    for policy in (POLICIES["lru"], POLICIES["gdsf"], WTinyLFU):
        assert replay_entries(of(keys), policy, max_entries * BYTES).hits <= most(keys, max_entries)


def test_a_hit_is_a_use_of_chains_the_held_beginning_is_found_and_a_newcomer_needs_uses() -> None:
    assert replay_entries(of("abaca"), POLICIES["lru"], 2 * BYTES).hits == 2  # c evicts b, as a was used
    requests = [[Asked(str(block)) for block in blocks] for _, blocks in TRACE]
    found = replay_blocks(requests, POLICIES["lru"], 100 * BYTES)
    assert (found.n, found.hits) == (28, 16) == (found.nbytes // BYTES, found.hit_nbytes // BYTES)  # 16 came before
    assert most_hits(requests, 100).hits == 16 > replay_blocks(requests, POLICIES["lru"], 2 * BYTES).hits
    keys = [*"abcdefgh" * 3, *(f"once {i}" for i in range(50)), *"abcdefgh"]
    assert replay_entries(of(keys), WTinyLFU, 10 * BYTES).hits == 3 * 8
