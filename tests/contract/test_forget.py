"""`forget` drops one wrong answer: its source serves nothing again, from memory or from a store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import LLMCache
from tests.contract.streams import ask, calibrated, classifier, requests
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, tokens

A, B = tokens(1, 6, 1), tokens(1, 6, 2)


def rung(cache: LLMCache, ids: Tensor, **inputs: Any) -> str | None:
    cache(input_ids=ids, **inputs)
    return cache.last[0].rung


def forget(cache: Any, ids: Tensor, **inputs: Any) -> None:
    cache.forget(input_ids=ids, **inputs)


@pytest.fixture
def frozen() -> Iterator[LLMCache]:
    with calibrated(audit=0) as cache:
        yield cache


def hits(cache: LLMCache, ids: Tensor) -> dict[int, str]:
    """Ask each request; return the sources of the approximate hits, by row."""
    found = {}
    for row, one in enumerate(ids):
        cache(input_ids=one[None])
        (last,) = cache.last
        if last.rung == "semantic":
            assert last.source
            found[row] = last.source
    return found


def test_last_names_the_source(frozen: LLMCache) -> None:
    """`last[i].source` names the stored request that served a row; for an exact repeat, its own key."""
    cache = frozen
    ids = requests(20, seed=7)[0]
    found = hits(cache, ids)
    assert found
    for row, source in found.items():
        cache(input_ids=ids[[row]])
        assert cache.last[0].source == source != cache.last[0].key
    with LLMCache.wrap(build(BARE["bert"]), auto_bypass=False) as exact:
        assert (rung(exact, A), exact.last[0].source) == (None, None)
        assert rung(exact, A) == "exact" and exact.last[0].source == exact.last[0].key


@pytest.mark.parametrize("kind", ["bert", "gpt2", "classifier"])
def test_a_repeat_is_forgotten(kind: str) -> None:
    """After `forget` the request is computed and stored anew; others stay."""
    made = {"bert": BARE["bert"], "gpt2": GENERATORS["gpt2"], "classifier": CLASSIFIERS["bert"]}[kind]
    with LLMCache.wrap(build(made), auto_bypass=False) as cache:
        for ids in (A, B):
            assert (rung(cache, ids), rung(cache, ids)) == (None, "exact")
        forget(cache, A)
        assert (rung(cache, A), rung(cache, A), rung(cache, B)) == (None, "exact", "exact")


def test_each_row_of_a_batch_is_forgotten() -> None:
    """`forget` takes a call's arguments, masks included, and forgets every row."""
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with LLMCache.wrap(build(BARE["bert"]), auto_bypass=False) as cache:
        batch = torch.cat([A, B])
        assert rung(cache, B) == rung(cache, batch, attention_mask=mask) is None
        assert rung(cache, batch, attention_mask=mask) == "exact"
        forget(cache, batch, attention_mask=mask)
        cache(input_ids=batch, attention_mask=mask)
        assert [one.rung for one in cache.last] == [None, None]
        assert rung(cache, B) == "exact"


def test_a_namespace_forgets_its_own() -> None:
    """`forget` reaches the current namespace, and no other."""
    with LLMCache.wrap(build(BARE["bert"]), auto_bypass=False) as cache:
        for name in ("a", "b"):
            with cache.namespace(name):
                rung(cache, A)
        with cache.namespace("a"):
            forget(cache, A)
            assert rung(cache, A) is None
        with cache.namespace("b"):
            assert rung(cache, A) == "exact"


def test_what_is_not_there_is_forgotten_at_no_cost() -> None:
    """`forget` of an unknown request changes and computes nothing."""
    model = build(BARE["bert"])
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        rung(cache, B)
        before = cache.stats()
        forget(cache, A)
        after = cache.stats()
        assert (after.n_requests, after.n_stored) == (before.n_requests, before.n_stored)
        assert rung(cache, B) == "exact"


def test_a_wrong_hit_of_tau_does_not_come_again() -> None:
    """A request that `tau` answered from another's states is computed after `forget`."""
    with LLMCache.wrap(classifier(), tau=0.0) as cache:
        cache(input_ids=requests(1, seed=1)[0])
        wrong = requests(1, seed=2)[0]
        cache(input_ids=wrong)
        assert cache.last[0].source not in (None, cache.last[0].key)
        forget(cache, wrong)
        cache(input_ids=wrong)
        assert cache.last[0].source is None


def test_a_frozen_source_serves_nobody_again(frozen: LLMCache) -> None:
    """A forgotten source of a calibration is a tombstone: requests nearest to it are computed; the bound stays."""
    cache, ids = frozen, requests(60, seed=7)[0]
    before, made = hits(cache, ids), cache.calibration
    assert made is not None
    row, gone = next(iter(before.items()))
    forget(cache, ids[[row]])
    after = hits(cache, ids)
    assert gone not in after.values() and row not in after
    assert {other: source for other, source in before.items() if source != gone} == after
    assert cache.calibration is not None and cache.calibration.is_certified
    assert cache.calibration.chosen == made.chosen


def test_a_tombstone_is_saved(frozen: LLMCache, tmp_path: Path) -> None:
    """A forgotten source stays forgotten in a save."""
    ids = requests(60, seed=7)[0]
    row, gone = next(iter(hits(frozen, ids).items()))
    forget(frozen, ids[[row]])
    frozen.save(tmp_path / "saved")
    with LLMCache.load(classifier(), tmp_path / "saved") as cache:
        left = set(hits(cache, ids).values())
        assert left and gone not in left


def test_a_store_forgets_too(tmp_path: Path) -> None:
    """With a store, forgotten entries serve from neither memory nor store, in any cache that shares it."""

    def wrapped() -> LLMCache:
        store = {"name": "disk", "folder": str(tmp_path / "store"), "max_bytes": 2**20}
        return LLMCache.wrap(build(BARE["bert"]), auto_bypass=False, store=store)

    with wrapped() as cache:
        for ids in (A, B):
            rung(cache, ids)
        cache.drain()
        with wrapped() as other:
            assert rung(other, A) == "exact"
            forget(cache, A)
            assert rung(cache, A) is None
            cache.drain()
            forget(cache, A)
        with wrapped() as later:
            assert (rung(later, A), rung(later, B)) == (None, "exact")


def test_until_then_a_purge_forgets(frozen: LLMCache) -> None:
    """Purging its namespace forgets a wrong answer with all others."""
    ids = requests(30, seed=7)[0]
    assert "semantic" in ask(frozen, ids)
    frozen.purge(namespace="default")
    assert ask(frozen, ids) == [None] * len(ids)
