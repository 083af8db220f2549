"""A part that breaks costs speed: the answer is right, the failure counted and logged once, later calls are fine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache, StoreError
from tests import inside
from tests.tiny_models import CLASSIFIERS, build, padded, tokens


class Breakable:
    """Passes everything on to an object; chosen methods raise while it is broken."""

    def __init__(self, inner: Any, *methods: str) -> None:
        self.inner = inner
        self.methods = methods
        self.is_broken = True

    def check(self, method: str) -> None:
        if self.is_broken and method in self.methods:
            raise StoreError(f"{method} is broken")

    def __getattr__(self, name: str) -> Any:
        self.check(name)
        return getattr(self.inner, name)

    def __getitem__(self, key: str) -> Any:
        self.check("__getitem__")
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.check("__setitem__")
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        self.check("__delitem__")
        del self.inner[key]

    def __len__(self) -> int:
        return len(self.inner)


def break_store(*methods: str) -> Callable[[LLMCache], Breakable]:
    def act(cache: LLMCache) -> Breakable:
        bank = inside.banks(cache).layer_banks[3]
        bank._store = Breakable(bank._store, *methods)  # type: ignore[assignment]
        return bank._store  # type: ignore[return-value]

    return act


def break_policy(*methods: str) -> Callable[[LLMCache], Breakable]:
    def act(cache: LLMCache) -> Breakable:
        bank = inside.banks(cache).layer_banks[3]
        bank._policy = Breakable(bank._policy, *methods)
        return bank._policy

    return act


def break_fingerprint(*methods: str) -> Callable[[LLMCache], Breakable]:
    def act(cache: LLMCache) -> Breakable:
        broken = Breakable(inside.fingerprint(cache), *methods)
        inside.banks(cache)._index.fingerprint = broken
        inside.replace(cache, fingerprint=broken)
        return broken

    return act


def break_index(*methods: str) -> Callable[[LLMCache], Breakable]:
    def act(cache: LLMCache) -> Breakable:
        shelf = inside.partition(cache)
        shelf._index = Breakable(shelf._index, *methods)
        return shelf._index

    return act


BREAKS: dict[str, Callable[[LLMCache], Breakable]] = {
    "store reads": break_store("__getitem__"),
    "store writes": break_store("__setitem__"),
    "store deletes": break_store("__delitem__"),
    "index searches": break_index("search"),
    "index adds": break_index("add"),
    "index removes": break_index("remove"),
    "fingerprint features": break_fingerprint("features"),
    "fingerprint projects": break_fingerprint("project", "project_with_forecast"),
    "fingerprint asks": break_fingerprint("n_fit"),
    "policy puts": break_policy("on_put"),
    "policy hits": break_policy("on_hit"),
    "policy removes": break_policy("on_remove"),
    "policy chooses": break_policy("victim"),
    "policy expires": break_policy("expired"),
}


def is_right(cache: LLMCache, model: nn.Module, ids: torch.Tensor) -> bool:
    """Exact hits and misses only: tau is 1 here, so every answer is the plain one."""
    answer = cache(input_ids=ids).logits
    with cache.disabled():
        return torch.allclose(answer, cache(input_ids=ids).logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("part", BREAKS)
def test_a_broken_part_costs_speed_only(part: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model, tau=1.0, index="flat", max_entries=4)
    assert is_right(cache, model, tokens(4, 5))
    broken = BREAKS[part](cache)
    for seed in (0, 1, 0, 2, 3):
        assert is_right(cache, model, tokens(2, 5, seed=seed))
    stats = cache.stats()
    assert stats.errors > 0
    warnings = [record for record in caplog.records if "failed to" in record.getMessage()]
    kinds = {(record.getMessage(), record.exc_info and record.exc_info[0]) for record in warnings}
    assert 1 <= len(kinds) == len(warnings) < stats.errors
    assert all(record.exc_info for record in warnings)
    assert stats.n_requests == 4 + 5 * 2 + 14  # each counted once; the second summand is the disabled calls

    broken.is_broken = False
    for seed in (10, 11, 12, 13):
        for _ in range(2):
            assert is_right(cache, model, tokens(2, 5, seed=seed))
    healed = cache.stats()
    assert healed.errors == stats.errors
    assert healed.n_hits == stats.n_hits + 4 * 2
    assert healed.n_stored == healed.n_entries[3] <= 4
    shelves = inside.banks(cache)._index.values()
    assert sum(len(shelf) for shelf in shelves) == healed.n_stored


@pytest.mark.parametrize("method", ["should_check", "on_check"])
def test_a_check_that_breaks_costs_the_check_only(method: str) -> None:
    model = build(CLASSIFIERS["bert"])
    policy = {"name": "divergence", "check_rate": 1.0}
    cache = LLMCache.wrap(model, tau=-1.0, exact=False, policy=policy)
    stored = cache(input_ids=tokens(1, 5)).logits
    break_policy(method)(cache)
    ids = tokens(1, 5, seed=1)
    answer = cache(input_ids=ids).logits
    with cache.disabled():
        plain = cache(input_ids=ids).logits
    torch.testing.assert_close(answer, stored if method == "should_check" else plain)
    stats = cache.stats()
    assert (stats.errors, stats.n_hits, stats.n_revalidated) == (1, *((1, 0) if method == "should_check" else (0, 1)))


def test_a_store_that_fails_while_it_evicts_keeps_no_ghosts() -> None:
    """Entries evicted for one that could not be stored must leave the index too, or they hide real neighbours."""
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model, tau=0.9999, index="flat", max_entries=2)
    cache(input_ids=tokens(2, 5, seed=1))
    broken = break_store("__setitem__")(cache)
    cache(input_ids=tokens(2, 5, seed=2))
    broken.is_broken = False
    stats = cache.stats()
    assert stats.n_stored == stats.n_entries[3]


def test_a_model_error_is_the_models() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model, tau=0.9)
    with pytest.raises(IndexError):
        cache(input_ids=torch.full((1, 4), 10_000))
    assert cache.stats().n_stored == 0
    assert is_right(cache, model, tokens(1, 5))


def test_half_a_request_is_never_found() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model, payload="sequence", layers=[0, 3])
    broken = break_store("__setitem__")(cache)  # of the upper bank only
    cache(input_ids=tokens(2, 5))
    broken.is_broken = False
    assert cache.stats().n_stored == 0
    assert set(cache.stats().n_entries.values()) == {0}
    assert is_right(cache, model, tokens(2, 5))


@pytest.mark.parametrize(
    ("step", "error", "bypassed"),
    [
        ("llmcache.models.payloads.Cls.take", MemoryError("no room"), {}),
        ("llmcache.execution.flow.find_reason", AttributeError("a tuple has no get_seq_length"), {"error": 2}),
    ],
    ids=["keeping a state", "looking at arguments"],
)
def test_a_step_that_breaks_costs_speed_only(
    step: str, error: Exception, bypassed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 4])
    with torch.inference_mode():
        plain = model(**inputs).logits
    cache = LLMCache.wrap(model)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(step, fail)
        assert torch.equal(cache(**inputs).logits, plain)
    stats = cache.stats()
    assert (stats.errors, stats.n_stored, stats.bypassed) == (1, 0, bypassed)
    cache(**inputs)
    cache(**inputs)
    assert cache.stats().hits == {"exact": 2}
