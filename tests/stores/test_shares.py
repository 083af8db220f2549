"""Each namespace has a share of the budget; a namespace below its share loses nothing to others."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llmcache import LLMCache
from llmcache.calls.context_flags import DISABLE
from llmcache.memory.policies import LRU
from llmcache.memory.policies.shares import Shares
from tests.contract.judge import check_same
from tests.fixtures import Log, Patch
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, tokens

KINDS = {"bert": BARE["bert"], "gpt2": GENERATORS["gpt2"]}


def ask(cache: LLMCache, name: str, ids: Tensor) -> str | None:
    with cache.namespace(name):
        cache(input_ids=ids)
    return cache.last[0].rung


@pytest.mark.parametrize("kind", KINDS)
def test_one_tenant_cannot_evict_another(kind: str) -> None:
    """A busy tenant evicts its own entries; those of a quiet tenant stay."""
    quiet = [tokens(1, 12, seed) for seed in range(3)]
    with LLMCache.wrap(build(KINDS[kind])) as cache:
        ask(cache, "quiet", quiet[0])
        max_bytes = 20 * cache.stats().held_nbytes
    budget = {"max_entries": 10} if kind == "bert" else {"max_bytes": max_bytes}
    with LLMCache.wrap(build(KINDS[kind]), **budget) as cache:
        for seed in range(100, 130):  # while it is alone, it may fill the budget
            ask(cache, "loud", tokens(1, 12, seed))
        for ids in quiet:
            ask(cache, "quiet", ids)
        for seed in range(130, 160):
            ask(cache, "loud", tokens(1, 12, seed))
        stats = cache.stats()
        assert stats.n_evicted_total >= 40 and stats.held_nbytes <= max_bytes
        assert [ask(cache, "quiet", ids) for ids in quiet] == ["exact"] * 3
        assert ask(cache, "loud", tokens(1, 12, 159)) == "exact"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=80))
def test_who_is_below_its_share_loses_nothing_to_others(puts: list[tuple[str, int]]) -> None:
    shares, held, max_bytes = Shares(LRU), dict[str, tuple[str, int]](), 100
    for number, (name, nbytes) in enumerate(puts):
        while sum(n for _, n in held.values()) + nbytes > max_bytes:
            leaving = shares.victim(name, nbytes)
            owner, n_left = held.pop(leaving)
            n_own = n_left + sum(n for other, n in held.values() if other == owner)
            n_names = len({owner, name, *(other for other, _ in held.values())})
            share = max_bytes / n_names
            assert owner == name or n_own >= share or nbytes > share
            shares.remove(owner, leaving)
        key = f"{number}"
        held[key] = name, nbytes
        shares.add(name, key, nbytes)
        shares.policies[name].on_put(key, nbytes)


def test_a_bank_in_which_nothing_stays_says_so_once(caplog: Log) -> None:
    """If entries leave before any hit, one warning names the settings; a bank with hits causes none."""
    for seeds, n_told in ((range(100), 1), ([0, 1, 0, 1] * 20, 0)):
        caplog.clear()
        with LLMCache.wrap(build(BARE["bert"]), max_entries=3) as cache, caplog.at_level(logging.WARNING):
            for seed in seeds:
                cache(input_ids=tokens(1, 5, seed))
        told = [one.getMessage() for one in caplog.records if "for lack of room" in one.getMessage()]
        assert len(told) == n_told and all("max_bytes" in one and "s3_fifo" in one for one in told)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(BARE["bert"], {}), (CLASSIFIERS["bert"], {"tau": 0.9}), (GENERATORS["gpt2"], {})],
    ids=["bert", "paper", "gpt2"],
)
def test_a_variable_turns_every_cache_off(kind: object, settings: dict[str, float], monkeypatch: Patch) -> None:
    """`LLMCACHE_DISABLE=1`: models are wrapped, and each call is computed and counted as bypassed."""
    monkeypatch.setenv(DISABLE, "1")
    model, ids = build(kind), tokens(2, 9)  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = model(input_ids=ids)
    with LLMCache.wrap(model, allow_unsafe=True, **settings) as cache:
        for _ in range(2):
            check_same(cache(input_ids=ids), expected, exact=True)
        assert cache.stats().bypassed == {"disabled": 4} and cache.stats().n_stored == 0
    monkeypatch.setenv(DISABLE, "0")
    with LLMCache.wrap(model, allow_unsafe=True, **settings) as cache:
        assert [ask(cache, "default", ids) for _ in range(2)] == [None, "paper" if settings else "exact"]
