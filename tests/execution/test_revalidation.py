"""Policy `divergence` in a cache: what is checked, what it answers, and what becomes of the entry."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import LLMCache
from tests import inside
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, padded, tokens


def wrap(check_rate: float = 1.0, limit: float = 2.0, **settings: Any) -> LLMCache:
    policy = {"name": "divergence", "check_rate": check_rate, "limit": limit}
    return LLMCache.wrap(build(CLASSIFIERS["bert"]), policy=policy, **{"tau": -1.0, "exact": False, **settings})


def plain(cache: LLMCache, ids: Tensor) -> Tensor:
    with cache.disabled():
        return cache(input_ids=ids).logits


def averages(cache: LLMCache, layer: int = 3) -> list[float]:
    """Divergence of the entries of a bank, as its policy has it."""
    ranking = inside.banks(cache).layer_banks[layer]._policy._ranking
    return [-average for average, _ in ranking._ranks.values()]


@pytest.mark.parametrize("payload", ["cls", "sequence"])
@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_a_checked_row_gets_its_own_answer_and_is_counted_apart(mode: str, payload: str) -> None:
    cache = wrap(payload=payload, mode=mode, exact=None if mode == "paper" else False)
    cache(input_ids=tokens(1, 6, seed=1))
    ids = tokens(1, 6, seed=2)
    answer = cache(input_ids=ids).logits
    stats = cache.stats()
    torch.testing.assert_close(answer, plain(cache, ids))
    assert (stats.n_requests, stats.n_hits, stats.n_misses, stats.n_revalidated) == (2, 0, 1, 1)
    assert stats.n_stored == 1
    assert stats.n_layers_skipped == 0


@pytest.mark.parametrize("payload", ["cls", "last", "mean", "sequence"])
def test_what_is_compared_is_the_state_that_would_have_been_reused(payload: str) -> None:
    model = build(BARE["bert"])
    policy = {"name": "divergence", "check_rate": 1.0, "limit": 2.0, "weight": 1.0}
    cache = LLMCache.wrap(model, tau=-1.0, exact=False, payload=payload, allow_unsafe=True, policy=policy)
    stored, fresh = (model(tokens(1, 6, seed=seed)).last_hidden_state[0].detach() for seed in (1, 2))
    cache(input_ids=tokens(1, 6, seed=1))
    cache(input_ids=tokens(1, 6, seed=2))
    kept = {
        "cls": lambda x: x[:1],
        "last": lambda x: x[-1:],
        "mean": lambda x: x.mean(dim=0, keepdim=True),
        "sequence": lambda x: x,
    }[payload]
    cosine = torch.nn.functional.cosine_similarity(kept(stored), kept(fresh)).mean()
    assert averages(cache) == [pytest.approx(1 - float(cosine), abs=1e-5)]
    cache(input_ids=tokens(1, 6, seed=1))  # the very request: nothing diverges
    assert averages(cache) == [pytest.approx(0.0, abs=1e-6)]


def test_over_the_limit_an_entry_leaves_at_once_and_the_next_request_is_stored() -> None:
    cache = wrap(limit=1e-6)
    cache(input_ids=tokens(1, 6, seed=1))
    assert cache.stats().n_stored == 1
    cache(input_ids=tokens(1, 6, seed=2))
    stats = cache.stats()
    assert (stats.n_stored, stats.n_entries, stats.n_revalidated) == (0, {3: 0}, 1)
    cache(input_ids=tokens(1, 6, seed=2))
    assert (cache.stats().n_misses, cache.stats().n_stored) == (2, 1)


def test_exact_repeats_are_never_checked() -> None:
    cache = wrap(exact=True)
    for _ in range(5):
        cache(input_ids=tokens(2, 6))
    stats = cache.stats()
    assert (stats.hits, stats.n_revalidated) == ({"exact": 8}, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_other_policies_check_nothing(policy: str) -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]), tau=-1.0, exact=False, policy=policy)
    for seed in range(30):
        cache(input_ids=tokens(1, 6, seed=seed))
    assert (cache.stats().n_hits, cache.stats().n_revalidated) == (29, 0)


@pytest.mark.parametrize("payload", ["cls", "sequence"])
@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_rows_of_a_batch_are_checked_one_by_one(mode: str, payload: str) -> None:
    """Of one batch, some rows are served, some checked, one is a miss; none changes another's answer."""
    cache = wrap(check_rate=0.5, payload=payload, mode=mode, exact=None if mode == "paper" else False, tau=0.999)
    known = padded([6, 6, 4, 5, 6, 4, 5, 3], seed=7)
    cache(**known)
    batch = padded([6, 6, 4, 5, 6, 4, 5, 3, 6], seed=7)
    with cache.disabled():
        expected = cache(**batch).logits
    before = cache.stats()
    torch.testing.assert_close(cache(**batch).logits, expected, atol=1e-4, rtol=1e-4)
    after = cache.stats()
    n_hits, n_checked = after.n_hits, after.n_revalidated
    assert n_hits > 0 and n_checked > 0 and n_hits + n_checked == 8
    assert after.n_misses == before.n_misses + 1
    assert after.n_stored == 9
    assert after.n_requests == before.n_requests + 9


def test_each_layer_of_the_paper_keeps_its_own_account() -> None:
    """The first layer that would be reused is checked; after that the row is computed, and compared nowhere else."""
    cache = wrap(mode="paper", exact=None, payload="sequence", tau={1: -1.0, 3: -1.0}, layers=[1, 3])
    cache(input_ids=tokens(1, 6, seed=1))
    cache(input_ids=tokens(1, 6, seed=2))
    assert averages(cache, layer=1)[0] > 0.0
    assert averages(cache, layer=3) == [0.0]
    assert cache.stats().n_revalidated == 1


def test_a_row_that_stands_on_anothers_state_is_not_checked_above_it() -> None:
    cache = wrap(check_rate=0.0, mode="paper", exact=None, payload="sequence", layers=[1, 3])
    cache(input_ids=tokens(1, 6, seed=1))
    inside.banks(cache).layer_banks[3]._policy.check_rate = 1.0
    cache(input_ids=tokens(1, 6, seed=2))
    stats = cache.stats()
    assert (stats.hits, stats.n_revalidated) == ({"paper": 1}, 0)
    assert averages(cache, layer=3) == [0.0]


def test_kv_of_a_checked_row_is_its_own() -> None:
    model = build(TOKEN_HEADS["causal"])
    policy = {"name": "divergence", "check_rate": 1.0, "limit": 2.0}
    cache = LLMCache.wrap(model, tau=-1.0, exact=False, allow_unsafe=True, policy=policy)
    cache(input_ids=tokens(1, 6, seed=1), use_cache=True)
    ids = tokens(2, 6, seed=2)
    output = cache(input_ids=ids, use_cache=True)
    with cache.disabled():
        expected = cache(input_ids=ids, use_cache=True)
    assert cache.stats().n_revalidated == 2
    for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
    torch.testing.assert_close(output.logits, expected.logits)


def test_full_banks_let_the_most_divergent_go() -> None:
    cache = wrap(check_rate=0.0, tau=0.9999, max_entries=2)
    cache(input_ids=tokens(1, 6, seed=1))
    cache(input_ids=tokens(1, 6, seed=2))
    banks = inside.banks(cache)
    recent = banks.layer_banks[3].keys()[1]
    banks.check(recent, 3, torch.ones(1, 32), torch.randn(1, 32))
    cache(input_ids=tokens(1, 6, seed=3))
    assert recent not in banks.layer_banks[3]
    assert len(banks) == 2


def test_a_state_that_could_not_be_kept_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wrap()
    cache(input_ids=tokens(1, 6, seed=1))
    ids = tokens(1, 6, seed=2)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(inside.payload(cache), "take", fail)
        torch.testing.assert_close(cache(input_ids=ids).logits, plain(cache, ids))
    assert (cache.stats().errors, cache.stats().n_revalidated) == (1, 1)
    assert averages(cache) == [0.0]


@pytest.mark.parametrize(
    ("compression", "which"),  # what is stored is finite with the others
    [("none", "stored"), ("none", "fresh"), ("fp16", "fresh"), ({"name": "pca", "dim": 2, "fit_on": 3}, "fresh")],
)
def test_a_state_that_is_not_finite_is_like_nothing(
    compression: Any, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an entry without a number in it would pass for perfectly faithful."""
    cache = wrap(limit=0.99, compression=compression)
    take = inside.payload(cache).take

    def take_infinite(hidden: Tensor, valid: Any) -> Tensor:
        return take(hidden, valid) / 0

    def ask(seed: int, is_broken: bool) -> None:
        with monkeypatch.context() as broken:
            if is_broken:
                broken.setattr(inside.payload(cache), "take", take_infinite)
            cache(input_ids=tokens(1, 6, seed=seed))

    ask(1, is_broken=which == "stored")
    ask(2, is_broken=which == "fresh")
    stats = cache.stats()
    assert (stats.n_revalidated, stats.n_entries, stats.errors) == (1, {3: 0}, 0)


def test_what_compression_loses_is_no_divergence() -> None:
    policy = {"name": "divergence", "check_rate": 1.0, "limit": 2.0, "weight": 1.0}
    compression = {"name": "pca", "dim": 2, "fit_on": 8}
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]), tau=0.9999, policy=policy, compression=compression)
    cache(input_ids=tokens(9, 6))
    lost = cache.stats().reconstruction_distance[3]
    assert lost is not None and lost > 0.01
    cache(input_ids=tokens(9, 6))
    assert cache.stats().n_revalidated == 9
    assert averages(cache) == pytest.approx([0.0] * 9, abs=1e-5)


@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_what_must_leave_serves_from_no_lower_layer_either(mode: str) -> None:
    """Where one search serves all layers, a lower one gives the same answer; the paper judges each layer by itself."""
    cache = wrap(limit=1e-6, mode=mode, exact=None if mode == "paper" else False, payload="sequence", layers=[1, 3])
    cache(input_ids=tokens(1, 6, seed=1))
    cache(input_ids=tokens(1, 6, seed=2))
    stats = cache.stats()
    if mode == "semantic":
        assert (stats.n_stored, stats.n_entries, stats.n_expelled) == (0, {1: 0, 3: 0}, {1: 0, 3: 1})
        cache(input_ids=tokens(1, 6, seed=2))
        assert cache.stats().n_misses == 2
    else:
        assert (stats.n_stored, stats.n_entries, stats.n_expelled) == (1, {1: 0, 3: 1}, {1: 1, 3: 0})
