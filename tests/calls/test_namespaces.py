"""A namespace is told by its characters, and a purge leaves nothing of it; `only_if_cached` computes nothing."""

import gc
import types
from typing import Any

import pytest
import torch

from llmcache import ConfigError, LLMCache, NotCachedError
from llmcache.request.rows import Scope
from tests import inside
from tests.calls.helpers import one_layer, rungs, wrapped
from tests.contract.streams import calibrated, classifier
from tests.tiny_models import padded, tokens
from tests.topics import batched, known, requests

ONE = padded([6], seed=1)


@pytest.fixture
def cache() -> LLMCache:
    return wrapped(one_layer)


@pytest.mark.parametrize(("name", "told"), [(b"a", "give a plain str"), ("a\udcff", "is no Unicode text: character 1")])
def test_what_is_no_name_is_refused_with_the_reason(cache: LLMCache, name: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=f"namespace: .*{told}"), cache.namespace(name):
        pass
    with pytest.raises(ConfigError, match=f"namespace: .*{told}"):
        cache.purge(namespace=name)
    with pytest.raises(ConfigError, match=f"namespace: .*{told}"), cache.namespace("a", prefixes_from=name):
        pass


def test_a_scope_is_hashed_by_its_characters() -> None:
    names = ["victim", "attacker", "a', 'b", "\ud800", "\\ud800", "\x00"]
    assert len({Scope(name, "w", "d", "a").key for name in names}) == len(names)
    assert Scope("a", "b", "c", "d").key == b"('a', 'b', 'c', 'd')"  # the format of saved caches


_ENTERED = ("builtins", "collections", "functools", "llmcache")


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


@pytest.mark.slow
def test_a_purge_leaves_no_key_of_the_namespace() -> None:
    """No key of an entry, a comparison, the audit or the calibration stays."""
    asked = requests(150, seed=7)[0]
    audit = {"rate": 1.0, "in_background": False}
    with LLMCache.wrap(classifier(), max_drop=0.05, audit=audit, recalibrate=2000) as cache:
        with cache.namespace("tenant"):
            cache.calibrate(batched(requests(300)[0]))
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


@pytest.mark.parametrize("order", [("purge", "clear"), ("clear", "purge")])
def test_nothing_is_stored_that_was_computed_before_the_latest_purge(
    order: tuple[str, str], cache: LLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = {"purge": lambda: cache.purge(namespace="default"), "clear": cache.clear}
    drop[order[0]]()
    engine = inside.eager(cache)
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda *given: (run(*given), drop[order[1]]())[0])
    cache(**ONE)
    assert cache.stats().n_misses == 1 and len(inside.bank(cache)) == 0


def test_namespaces_that_come_and_go_leave_nothing(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purged namespace leaves no scopes."""
    monkeypatch.setattr("llmcache.calls.call._MOST_SCOPES", 4)
    for number in range(9):
        with cache.namespace(str(number)):
            cache(**ONE)
        assert [cache.purge(namespace=str(number)) for _ in range(2)] == [1, 0]
    (state,) = cache._backend.forward.signatures._states.values()
    assert 0 < len(state.scopes) <= 4


# -- only_if_cached ----------------------------------------------------------------------------------------------------

BOTH = tokens(2, 6)


@pytest.fixture
def knowing(cache: LLMCache) -> LLMCache:
    """A cache that knows the first request."""
    cache(input_ids=BOTH[:1])
    return cache


def tried(cache: LLMCache, ids: torch.Tensor) -> Any:
    with cache.only_if_cached():
        return cache(input_ids=ids)


@pytest.mark.parametrize(("ids", "missing"), [(BOTH[1:], 0), (BOTH, 1)], ids=["one", "of a batch"])
def test_an_unknown_row_is_named_before_a_layer_runs_and_leaves_no_trace(
    knowing: LLMCache, ids: torch.Tensor, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "layer_norm", lambda *_: pytest.fail("something was computed"))
        with pytest.raises(NotCachedError, match=f"row {missing} of this call is not in the cache") as caught:
            tried(knowing, ids)
    assert caught.value.rows == (missing,)
    stats = knowing.stats()
    assert (stats.n_requests, stats.n_misses, stats.errors, knowing.last) == (1, 1, 0, ())
    knowing(input_ids=ids)  # computed as usual
    tried(knowing, ids)
    assert knowing.stats().n_misses == 2


def test_a_call_that_must_bypass_the_cache_raises_too(knowing: LLMCache) -> None:
    with pytest.raises(NotCachedError, match="this call is not") as caught, knowing.disabled():
        tried(knowing, BOTH[:1])
    assert caught.value.rows is None
    assert knowing.stats().bypassed == {}


@pytest.mark.slow
def test_similar_requests_are_served_and_each_request_is_audited_once() -> None:
    with calibrated(audit=0.5, max_drop=0.2) as cache:
        n_computed, asked = 0, requests(60, seed=7)[0]
        for one in asked:
            try:
                tried(cache, one["input_ids"])
            except NotCachedError:
                n_computed += 1
                cache(**one)
        assert cache.stats().n_requests == known(cache).n_requests == len(asked)
        assert cache.stats().hits["semantic"] > 0 < n_computed
