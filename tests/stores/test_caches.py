"""Caches on a store: entries survive a restart, processes share them, purges reach all, failures cost only speed."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.measures.over_http.servers import free_port
from llmcache import ConfigError, LLMCache
from llmcache.memory.stores.disk import DiskStore
from tests.contract.judge import check_same
from tests.fixtures import Log, Patch
from tests.prefix.prompts import BLOCK, branch
from tests.redis_server import RedisServer, redis_server, wait_until
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, tokens

MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": CLASSIFIERS["bert"],
    "classifying gpt2": CLASSIFIERS["gpt2"],
    "gpt2": GENERATORS["gpt2"],
    "llama": GENERATORS["llama"],
}
Start = Callable[..., LLMCache]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Simulates a restart: wraps a new model with the same weights, on the same folder."""
    started = []

    def act(family: str = "bert", **settings: Any) -> LLMCache:
        store = {"name": "disk", "folder": str(folder), "least_tokens": 0}
        settings = {"store": store, "prefix": {"block": BLOCK}, **settings}
        started.append(LLMCache.wrap(build(MODELS[family]), **settings))
        return started[-1]

    yield act
    for cache in started:
        cache.unwrap()


def served(cache: LLMCache, ids: Tensor, **inputs: Any) -> list[Any]:
    """Return each row's rung, or the length of its served prefix; assert that the answer is right."""
    found = cache(input_ids=ids, **inputs)
    outcomes = [one.n_prefix or one.rung for one in cache.last]
    with cache.disabled():
        check_same(found[0], cache(input_ids=ids, **inputs)[0])
    return outcomes


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "payload"), [*((name, "auto") for name in MODELS), ("bert", "sequence")])
def test_a_restart_serves_repeats(start: Start, family: str, payload: str) -> None:
    """Even the first call of a process hits, each row by itself, with the same padding."""
    ids, inputs = tokens(3, 9), {}
    if "bert" in family:
        inputs["attention_mask"] = torch.tensor([[1] * 5 + [0] * 4, [1] * 9, [1] * 9])
    first = start(family, payload=payload)
    assert served(first, ids, **inputs) == [None] * 3
    first.drain()
    again = start(family, payload=payload)
    assert served(again, ids, **inputs) == ["exact"] * 3
    if inputs:
        others, ones = torch.cat([ids[1:], tokens(1, 9, 7)]), torch.ones_like(ids)
        assert served(again, others, attention_mask=ones) == ["exact", "exact", None]
    assert first.stats().errors == again.stats().errors == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_restart_serves_beginnings(start: Start, family: str) -> None:
    ids = tokens(1, 17)
    longer = torch.cat([ids, tokens(1, 7, seed=2)], dim=1)
    start(family)(input_ids=ids)
    for prompt, n_known in ((ids, "exact"), (branch(ids, 14, 20), 12), (longer, 16), (branch(longer, 24, 30), 24)):
        cache = start(family)
        cache.drain()
        assert served(cache, prompt) == [n_known]  # whole blocks
        cache.unwrap()


def test_prefixes_that_another_namespace_shares_come_from_the_store(start: Start) -> None:
    stem = tokens(1, 24)
    first = start("llama")
    with first.namespace("public"):
        first(input_ids=stem)
    first.drain()
    cache = start("llama")
    with cache.namespace("a"):
        assert served(cache, branch(stem, 18, 26, 1)) == [None]
    with cache.namespace("b", prefixes_from="public"):
        assert served(cache, branch(stem, 18, 26, 2)) == [16]
    first.purge(namespace="public")
    with cache.namespace("c", prefixes_from="public"):
        assert served(cache, branch(stem, 18, 26, 3)) == [None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_a_cache_starts_before_its_server(caplog: Log) -> None:
    pytest.importorskip("redis")
    store = {"name": "redis", "url": f"redis://:secret@127.0.0.1:{free_port()}", "timeout_ms": 1_000.0}
    with LLMCache.wrap(build(MODELS["bert"]), store=store) as cache:
        assert served(cache, tokens(1, 9)) == [None] and served(cache, tokens(1, 9)) == ["exact"]
        assert "is computed until it answers" in caplog.text and "secret" not in caplog.text


# -- purges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", "secret"])
def test_a_value_that_is_copied_back_after_a_purge_is_a_miss(
    secret: str, server: RedisServer, monkeypatch: Patch, caplog: Log
) -> None:
    """The seal covers the number of the namespace. Without a secret the log says once what that means."""
    monkeypatch.setenv("LLMCACHE_STORE_SECRET", secret)
    server.do("FLUSHALL")

    def on_redis() -> LLMCache:
        store = {"name": "redis", "url": server.url, "timeout_ms": 5_000.0, "least_tokens": 0}
        return LLMCache.wrap(build(MODELS["bert"]), store=store)

    with on_redis() as one, on_redis() as other:
        told = [line for line in caplog.messages if "LLMCACHE_STORE_SECRET" in line and "not signed" in line]
        assert len(told) == (0 if secret else 2)  # one for each store
        served(one, tokens(1, 12))
        one.drain()
        (old,) = server.names("llmcache:*:*:*:*:*")
        value = server.do("GET", old)
        one.purge(namespace="default")
        served(one, tokens(1, 12))
        one.drain()
        (new,) = server.names("llmcache:*:*:*:*:*")
        assert new != old
        server.do("SET", new, value)
        assert served(other, tokens(1, 12)) == [None]
        stats = other.stats().store
        assert stats is not None and stats.n_mismatched == {"other_key": 1}


@pytest.mark.parametrize(("family", "shares"), [("bert", None), ("llama", None), ("llama", "public")])
def test_what_was_read_before_a_purge_is_kept_nowhere(
    start: Start, monkeypatch: Patch, family: str, shares: str | None
) -> None:
    """If a purge comes while a call reads the store, only that call may still be served."""
    cache, other, ids = start(family), start(family), tokens(1, 20)
    name = shares or "default"
    with other.namespace(name):
        other(input_ids=ids)
    other.drain()
    read = DiskStore.get_many

    def read_and_purge(store: DiskStore, *args: Any) -> Any:
        found = read(store, *args)
        monkeypatch.setattr(DiskStore, "get_many", read)
        other.purge(namespace=name)
        return found

    monkeypatch.setattr(DiskStore, "get_many", read_and_purge)
    with cache.namespace("mine" if shares else name, prefixes_from=shares):
        served(cache, ids)
    cache.drain()
    with cache.namespace("yours" if shares else name, prefixes_from=shares):
        assert served(cache, ids) == [None]
    again = start(family)
    with again.namespace(name):
        assert served(again, ids) == ([None] if shares else ["exact"])  # computed after the purge


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_a_store_that_fails_costs_speed_alone(start: Start, monkeypatch: Patch, caplog: Log) -> None:
    """Errors are counted; calls work during the failure and after it."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("not today")

    cache = start()
    with monkeypatch.context() as patch:
        for name in ("get_many", "purges", "put_many", "numbers"):
            patch.setattr(DiskStore, name, fail)
        with caplog.at_level(logging.WARNING):
            assert [served(cache, tokens(1, 9, seed)) for seed in (1, 1, 2)] == [[None], ["exact"], [None]]
        assert cache.stats().errors > 0
    wait_until(lambda: cache.stats().store.is_answering)  # type: ignore[union-attr]
    assert served(cache, tokens(1, 9, 3)) == [None] and served(cache, tokens(1, 9, 3)) == ["exact"]


def test_a_policy_that_lets_entries_expire_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="come back from the store"):
        start(policy={"name": "ttl", "ttl_s": 60.0})
