"""No hit crosses a namespace, in either direction, by any rung."""

import gc
import types
from enum import StrEnum

import numpy as np
import pytest

from llmcache import ConfigError, LLMCache
from llmcache.request.rows import Scope
from tests.calls.helpers import rungs, wrapped
from tests.contract.streams import classifier
from tests.tiny_models import CLASSIFIERS, padded
from tests.topics import batched, requests

ONE = padded([6], seed=1)


@pytest.fixture
def cache() -> LLMCache:
    return wrapped(CLASSIFIERS["bert"])


def test_names_are_told_apart(cache: LLMCache) -> None:
    for name in ("a", "a ", "A", "", "default", "1", "'1'", "a|b", "ä", "a\u0308"):
        with cache.namespace(name):
            cache(**ONE)
    assert cache.stats().n_hits == 0


class Masked(str):
    """A name that imitates another in repr, equality and hash."""

    def __repr__(self) -> str:
        return "'victim'"

    def __eq__(self, _: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("victim")


class Tenant(StrEnum):
    VICTIM = "victim"


def test_a_name_that_is_no_plain_text_is_refused_and_purges_nothing(cache: LLMCache) -> None:
    with cache.namespace("victim"):
        cache(**ONE)
    plain, text = "give a plain str", "is no Unicode text: character [01]"
    for name, why in (
        *((name, plain) for name in (Masked("attacker"), Tenant.VICTIM, np.str_("victim"), b"victim", 1)),
        *((name, text) for name in ("\ud800", "a\udcff", "\ud83d\ude00")),
    ):
        with pytest.raises(ConfigError, match=f"namespace: .*{why}"), cache.namespace(name):  # type: ignore[arg-type]
            cache(**ONE)
        with pytest.raises(ConfigError, match=f"namespace: .*{why}"):
            cache.purge(namespace=name)  # type: ignore[arg-type]
    assert (cache.stats().n_requests, cache.stats().n_stored, cache.stats().n_hits) == (1, 1, 0)


def test_a_scope_is_hashed_by_its_characters() -> None:
    """A scope gets a plain str only; methods of a subclass would not be called."""
    names = ["victim", "attacker", Masked("attacker"), "a', 'b", "\ud800", "\\ud800", "\x00"]
    keys = [Scope(name, "w", "d", "a").key for name in names]
    assert len(set(keys)) == len(names) - 1 and keys[1] == keys[2]
    assert Scope("a", "b", "c", "d").key == b"('a', 'b', 'c', 'd')"  # the format of saved caches


def test_purge_forgets_one_namespace_whole(cache: LLMCache) -> None:
    both = padded([6, 5], seed=4)
    for name in ("a", "b"):
        with cache.namespace(name):
            cache(**{key: value[:1] for key, value in both.items()})
    before = cache.stats()
    assert [cache.purge(namespace=name) for name in ("a", "a", "never used")] == [1, 0, 0]
    after = cache.stats()
    assert (after.n_stored, after.nbytes) == (1, before.nbytes // 2)
    for name, n_hits in (("a", 0), ("b", 1)):
        with cache.namespace(name):
            cache(**both)
        assert cache.stats().n_hits == n_hits


@pytest.mark.parametrize("settings", [{}, {"tau": 0.99}])
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


def held_within(root: object, wanted: set[str]) -> set[str]:
    """Return which of these strings `root` holds, directly or within objects of llmcache and containers."""
    found: set[str] = set()
    seen, waiting = {id(root)}, [root]
    while waiting:
        for other in gc.get_referents(waiting.pop()):
            kind = type(other)
            if id(other) in seen or kind is type or kind.__module__.split(".")[0] not in _ENTERED:
                continue
            seen.add(id(other))
            if kind is str and other in wanted:
                found.add(other)
            elif kind not in (types.FunctionType, types.ModuleType):
                waiting.append(other)
    return found


_ENTERED = ("builtins", "collections", "functools", "llmcache")


@pytest.mark.slow
def test_a_purge_leaves_no_key_of_the_namespace() -> None:
    """No key of an entry, a comparison, the audit or the calibration stays."""
    asked = requests(300, seed=7)[0]
    with LLMCache.wrap(
        classifier(),
        max_drop=0.05,
        audit={"rate": 1.0, "in_background": False},
        recalibrate=2000,
    ) as cache:
        with cache.namespace("tenant"):
            cache.calibrate(batched(requests(500)[0]))
            keys = {source.key for source in cache.calibrated.fitter.sources}
            for few in batched([*asked, *asked[:40]], size=5):
                cache(**few)
                keys |= {outcome.key for outcome in cache.last}
        cache.drain()
        with cache.namespace("other"):
            for few in batched(asked[:20], size=5):
                cache(**few)
            kept = cache.last[0].key
        keys.discard("")  # of bypassed calls
        assert held_within(cache, keys)
        cache.purge(namespace="tenant")
        assert held_within(cache, keys) == set()
        assert held_within(cache, {kept})
        with cache.namespace("other"):
            cache(**asked[0])
        assert rungs(cache) == ["exact"]


def test_namespaces_that_come_and_go_leave_nothing(cache: LLMCache) -> None:
    """A purged namespace leaves no scopes: the cache keeps at most 256."""
    for number in range(300):
        with cache.namespace(str(number)):
            cache(**ONE)
        cache.purge(namespace=str(number))
    states = cache._way.forward._forms._states
    assert all(len(one.scopes) <= 256 for one in states.values())
