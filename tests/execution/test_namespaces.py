"""No hit crosses a namespace, in either direction, by any rung."""

import gc
import types
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch

from llmcache import ConfigError, LLMCache
from llmcache.request.rows import Scope
from tests import inside
from tests.execution.calls import assert_close, pair, run, rungs, wrapped
from tests.tiny_models import CLASSIFIERS, padded
from tests.topics import batched, classifier, requests

ONE, TWO = padded([6], seed=1), padded([6], seed=2)


@pytest.fixture
def cache() -> LLMCache:
    return wrapped(CLASSIFIERS["bert"])


@pytest.mark.parametrize("first", ["tenant-a", "tenant-b", "default"])
@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_no_hit_across(first: str, mode: str) -> None:
    cache, alone = pair(CLASSIFIERS["bert"], tau=-1.0, mode=mode)  # similar to anything
    with cache.namespace(first):
        cache(**ONE)
    for other in {"tenant-a", "tenant-b", "default"} - {first}:
        with cache.namespace(other):
            assert torch.equal(cache(**ONE).logits, run(alone, **ONE))  # the very same request
            cache.purge(namespace=other)
            assert torch.equal(cache(**TWO).logits, run(alone, **TWO))  # one that would be similar enough
            assert cache.stats().n_hits == 0
    with cache.namespace(first):
        assert_close(cache(**TWO).logits, run(alone, **ONE))  # here it is
        assert cache.stats().n_hits == 1


def test_namespaces_nest_and_end_with_their_block(cache: LLMCache) -> None:
    with cache.namespace("a") as same:
        assert same is cache
        with cache.namespace("b"):
            cache(**ONE)
        cache(**ONE)
    with pytest.raises(KeyError), cache.namespace("c"):
        raise KeyError
    cache(**ONE)
    assert cache.stats().n_misses == 3
    with cache.namespace("default"):
        cache(**ONE)
    assert cache.stats().hits == {"exact": 1}
    assert [cache.purge(namespace=name) for name in ("a", "b", "c", "default")] == [1, 1, 0, 1]


@pytest.mark.parametrize(
    "pair", [("a", "a "), ("a", "A"), ("", "default"), ("1", "'1'"), ("a|b", "a"), ("ä", "a\u0308")]
)
def test_names_are_told_apart(cache: LLMCache, pair: tuple[str, str]) -> None:
    for name in pair:
        with cache.namespace(name):
            cache(**ONE)
    assert cache.stats().n_hits == 0


class Masked(str):
    """A name that passes for another one in every way that its class can decide."""

    def __repr__(self) -> str:
        return "'victim'"

    def __eq__(self, _: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("victim")


class Tenant(StrEnum):
    """Plain by intention; refused all the same, with what to do."""

    VICTIM = "victim"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *(
            (name, "give a plain str")
            for name in (Masked("attacker"), Tenant.VICTIM, np.str_("victim"), b"victim", 1, None)
        ),
        *((name, "is no Unicode text: character [01]") for name in ("\ud800", "a\udcff", "\ud83d\ude00")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_name_that_is_no_plain_text_is_refused(cache: LLMCache, name: Any, why: str) -> None:
    with cache.namespace("victim"):
        cache(**ONE)
    with pytest.raises(ConfigError, match=f"namespace: .*{why}"), cache.namespace(name):
        cache(**ONE)
    with pytest.raises(ConfigError, match=f"namespace: .*{why}"):
        cache.purge(namespace=name)
    assert (cache.stats().n_requests, cache.stats().n_stored, cache.stats().n_hits) == (1, 1, 0)


def test_a_scope_is_hashed_by_its_characters() -> None:
    """Nothing within gets another class; if it ever does, its methods are not asked."""
    names = ["victim", "attacker", Masked("attacker"), "a', 'b", "\ud800", "\\ud800", "\x00"]
    keys = [Scope(name, "w", "d", "a").key for name in names]
    assert len(set(keys)) == len(names) - 1 and keys[1] == keys[2]
    assert Scope("a", "b", "c", "d").key == b"('a', 'b', 'c', 'd')"  # as saved caches have it


def test_purge_forgets_one_namespace_whole() -> None:
    cache = wrapped(CLASSIFIERS["bert"], tau=-1.0)
    both = padded([6, 5], seed=4)
    for name in ("a", "b"):
        with cache.namespace(name):
            cache(**{key: value[:1] for key, value in both.items()})
    before = cache.stats()
    assert [cache.purge(namespace=name) for name in ("a", "a", "never used")] == [1, 0, 0]
    after = cache.stats()
    assert (after.n_stored, after.nbytes) == (1, before.nbytes // 2)
    for name, n_hits in (("a", 0), ("b", 2)):
        with cache.namespace(name):
            cache(**both)
        assert cache.stats().n_hits == n_hits


@pytest.mark.parametrize("settings", [{}, {"tau": 0.9}, {"tau": 0.9, "mode": "paper"}])
def test_clear_forgets_all_and_keeps_counters(settings: dict[str, object]) -> None:
    cache = wrapped(CLASSIFIERS["bert"], **settings)
    with cache.namespace("a"):
        cache(**ONE)
    for _ in range(2):
        cache(**ONE)
    cache.clear()
    cache.clear()
    stats = cache.stats()
    assert (stats.n_stored, stats.nbytes, stats.n_hits, stats.n_misses) == (0, 0, 1, 2)
    assert set(stats.n_entries.values()) == {0}
    for _ in range(2):
        cache(**ONE)
    assert cache.stats().n_hits == 2


def held_within(root: object, wanted: set[str]) -> dict[str, str]:
    """Which of these strings the cache's own objects and containers hold, from one of them on, and where."""
    found: dict[str, str] = {}
    seen, waiting = {id(root)}, [(root, "")]
    while waiting:
        one, path = waiting.pop()
        for other in gc.get_referents(one):
            kind = type(other)
            if id(other) in seen or kind is type or kind.__module__.split(".")[0] not in _ENTERED:
                continue
            seen.add(id(other))
            where = f"{path}/{type(one).__name__}"
            if kind is str and other in wanted:
                found[other] = where
            elif kind not in (types.FunctionType, types.ModuleType):
                waiting.append((other, where))
    return found


_ENTERED = ("builtins", "collections", "functools", "llmcache")


@pytest.mark.slow
def test_a_purge_leaves_no_key_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of what was stored, nor of what was compared, noted, audited or learned from."""
    monkeypatch.setattr("llmcache.execution.length_costs.LengthCosts.is_cheap", True)
    asked = requests(300, seed=7)[0]
    keys = set()
    with LLMCache.wrap(classifier(), max_drop=0.05, audit=1.0, recalibrate=2000, audit_in_background=False) as cache:
        with cache.namespace("tenant"):
            cache.calibrate(batched(requests(500)[0]))
            keys |= {record.key for record in inside.records(cache)}
            for few in batched([*asked, *asked[:40]], size=5):
                cache(**few)
                keys |= {outcome.key for outcome in cache.last}
        cache.drain()
        with cache.namespace("other"):
            for few in batched(asked[:20], size=5):
                cache(**few)
            kept = cache.last[0].key
        keys.discard("")  # of bypassed calls
        assert held_within(inside.components(cache), keys)
        cache.purge(namespace="tenant")
        assert held_within(inside.components(cache), keys) == {}
        assert kept in held_within(inside.components(cache), {kept})
        with cache.namespace("other"):
            cache(**asked[0])
        assert rungs(cache) == ["exact"]
