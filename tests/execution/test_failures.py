"""A part that breaks costs speed: the answer is right, the failure counted and logged once, later calls are fine."""

from typing import Any

import pytest
import torch

from llmcache import LLMCache, StoreError
from tests import inside
from tests.execution.calls import agree, assert_close, pair, plain, wrapped
from tests.tiny_models import CLASSIFIERS, padded, tokens

BERT = CLASSIFIERS["bert"]


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


def break_part(cache: LLMCache, part: str, *methods: str) -> Breakable:
    """Put a broken part in the place of a cache's: of its upper bank, of its index, or its fingerprint."""
    banks = inside.banks(cache)
    if part == "fingerprint":
        broken = Breakable(inside.fingerprint(cache), *methods)
        banks._index.fingerprint = broken
        inside.replace(cache, fingerprint=broken)
        return broken
    owner: Any = inside.partition(cache) if part == "index" else banks.layer_banks[3]
    broken = Breakable(getattr(owner, f"_{part}"), *methods)
    setattr(owner, f"_{part}", broken)
    return broken


BREAKS = {
    "store reads": ("memory", "__getitem__"),
    "store writes": ("memory", "__setitem__"),
    "store deletes": ("memory", "__delitem__"),
    "index searches": ("index", "search"),
    "index adds": ("index", "add"),
    "index removes": ("index", "remove"),
    "fingerprint features": ("fingerprint", "features"),
    "fingerprint projects": ("fingerprint", "project", "project_with_forecast"),
    "fingerprint asks": ("fingerprint", "n_fit"),
    "policy puts": ("policy", "on_put"),
    "policy is told a cost": ("policy", "on_cost"),
    "policy hits": ("policy", "on_hit"),
    "policy removes": ("policy", "on_remove"),
    "policy chooses": ("policy", "victim"),
    "policy expires": ("policy", "expired"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_part_costs_speed_only(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Exact hits and misses only: tau is 1, so every answer is the plain one."""
    policy = "gdsf" if "cost" in what else "lru"  # only a policy that heeds costs is told of them
    cache, alone = pair(BERT, tau=1.0, index="flat", max_entries=4, policy=policy)
    agree(cache, alone, input_ids=tokens(4, 5))
    broken = break_part(cache, *BREAKS[what])
    for seed in (0, 1, 0, 2, 3):
        agree(cache, alone, input_ids=tokens(2, 5, seed=seed))
    stats = cache.stats()
    assert stats.errors > 0
    warnings = [record for record in caplog.records if "failed to" in record.getMessage()]
    kinds = {(record.getMessage(), record.exc_info and record.exc_info[0]) for record in warnings}
    assert 1 <= len(kinds) == len(warnings) < stats.errors
    assert stats.n_requests == 4 + 5 * 2  # each counted once

    broken.is_broken = False
    for seed in (10, 11, 12, 13):
        for _ in range(2):
            agree(cache, alone, input_ids=tokens(2, 5, seed=seed))
    healed = cache.stats()
    assert healed.errors == stats.errors
    assert healed.n_hits == stats.n_hits + 4 * 2
    assert healed.n_stored == healed.n_entries[3] <= 4
    shelves = inside.banks(cache)._index.values()
    assert sum(len(shelf) for shelf in shelves) == healed.n_stored


@pytest.mark.parametrize("method", ["should_check", "on_check"])
def test_a_check_that_breaks_costs_the_check_only(method: str) -> None:
    cache = wrapped(BERT, tau=-1.0, exact=False, policy={"name": "divergence", "check_rate": 1.0})
    stored = cache(input_ids=tokens(1, 5)).logits
    break_part(cache, "policy", method)
    ids = tokens(1, 5, seed=1)
    answer = cache(input_ids=ids).logits
    is_served = method == "should_check"
    assert_close(answer, stored if is_served else plain(cache, input_ids=ids))
    stats = cache.stats()
    assert (stats.errors, stats.n_hits, stats.n_revalidated) == (1, int(is_served), int(not is_served))


def test_a_store_that_fails_while_it_evicts_keeps_no_ghosts() -> None:
    """Entries evicted for one that could not be stored must leave the index too, or they hide real neighbours."""
    cache = wrapped(BERT, tau=0.9999, index="flat", max_entries=2)
    cache(input_ids=tokens(2, 5, seed=1))
    broken = break_part(cache, "memory", "__setitem__")
    cache(input_ids=tokens(2, 5, seed=2))
    broken.is_broken = False
    assert cache.stats().n_stored == cache.stats().n_entries[3]


def test_half_a_request_is_never_found() -> None:
    cache, alone = pair(BERT, payload="sequence", layers=[0, 3])
    broken = break_part(cache, "memory", "__setitem__")  # of the upper bank only
    cache(input_ids=tokens(2, 5))
    broken.is_broken = False
    assert cache.stats().n_stored == 0
    assert set(cache.stats().n_entries.values()) == {0}
    agree(cache, alone, input_ids=tokens(2, 5))


def test_a_model_error_is_the_models() -> None:
    cache, alone = pair(BERT, tau=0.9)
    with pytest.raises(IndexError):
        cache(input_ids=torch.full((1, 4), 10_000))
    assert cache.stats().n_stored == 0
    agree(cache, alone, input_ids=tokens(1, 5))


@pytest.mark.parametrize(
    ("step", "error", "bypassed"),
    [
        ("llmcache.models.payloads.Cls.take", MemoryError("no room"), {}),
        ("llmcache.execution.bypass_check.find_reason", AttributeError("a tuple has no get_seq_length"), {"error": 2}),
    ],
    ids=["keeping a state", "looking at arguments"],
)
def test_a_step_that_breaks_costs_speed_only(
    step: str, error: Exception, bypassed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, alone = pair(BERT)
    inputs = padded([6, 4])

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(step, fail)
        agree(cache, alone, **inputs)
    stats = cache.stats()
    assert (stats.errors, stats.n_stored, stats.bypassed) == (1, 0, bypassed)
    for _ in range(2):
        cache(**inputs)
    assert cache.stats().hits == {"exact": 2}
