"""Policy `divergence` in a cache: what is checked, what it answers, and what becomes of the entry."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import LLMCache
from tests import inside
from tests.execution.calls import Make, assert_close, plain, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, padded, tokens

FIRST, SECOND = tokens(1, 6, seed=1), tokens(1, 6, seed=2)


def checked(
    check_rate: float = 1.0, limit: float = 2.0, make: Make = CLASSIFIERS["bert"], weight: float = 0.5, **settings: Any
) -> LLMCache:
    """A cache that serves anything similar to anything, and checks it."""
    policy = {"name": "divergence", "check_rate": check_rate, "limit": limit, "weight": weight}
    exact = None if settings.get("mode") == "paper" else False
    return wrapped(make, policy=policy, **{"tau": -1.0, "exact": exact, **settings})


def averages(cache: LLMCache, layer: int = 3) -> list[float]:
    """Divergence of the entries of a bank, as its policy has it."""
    ranking = inside.banks(cache).layer_banks[layer]._policy._ranking
    return [-average for average, _ in ranking._ranks.values()]


in_both_modes = pytest.mark.parametrize("mode", ["semantic", "paper"])
by_payload = pytest.mark.parametrize("payload", ["cls", "sequence"])


@by_payload
@in_both_modes
def test_a_checked_row_gets_its_own_answer_and_is_counted_apart(mode: str, payload: str) -> None:
    cache = checked(payload=payload, mode=mode)
    cache(input_ids=FIRST)
    answer = cache(input_ids=SECOND).logits
    stats = cache.stats()
    assert_close(answer, plain(cache, input_ids=SECOND))
    assert (stats.n_requests, stats.n_hits, stats.n_misses, stats.n_revalidated) == (2, 0, 1, 1)
    assert (stats.n_stored, stats.n_layers_skipped) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "keep"),
    [
        ("cls", lambda x: x[:1]),
        ("last", lambda x: x[-1:]),
        ("mean", lambda x: x.mean(dim=0, keepdim=True)),
        ("sequence", lambda x: x),
    ],
)
def test_what_is_compared_is_the_state_that_would_have_been_reused(payload: str, keep: Any) -> None:
    cache = checked(make=BARE["bert"], payload=payload, allow_unsafe=True, weight=1.0)
    stored, fresh = (keep(build(BARE["bert"])(ids).last_hidden_state[0].detach()) for ids in (FIRST, SECOND))
    cache(input_ids=FIRST)
    cache(input_ids=SECOND)
    cosine = torch.nn.functional.cosine_similarity(stored, fresh).mean()
    assert averages(cache) == [pytest.approx(1 - float(cosine), abs=1e-5)]
    cache(input_ids=FIRST)  # the very request: nothing diverges
    assert averages(cache) == [pytest.approx(0.0, abs=1e-6)]


def test_over_the_limit_an_entry_leaves_at_once_and_the_next_request_is_stored() -> None:
    cache = checked(limit=1e-6)
    cache(input_ids=FIRST)
    assert cache.stats().n_stored == 1
    cache(input_ids=SECOND)
    stats = cache.stats()
    assert (stats.n_stored, stats.n_entries, stats.n_revalidated) == (0, {3: 0}, 1)
    cache(input_ids=SECOND)
    assert (cache.stats().n_misses, cache.stats().n_stored) == (2, 1)


@in_both_modes
def test_what_must_leave_serves_from_no_lower_layer_either(mode: str) -> None:
    """Where one search serves all layers, a lower one gives the same answer; the paper judges each layer by itself."""
    cache = checked(limit=1e-6, mode=mode, payload="sequence", layers=[1, 3])
    cache(input_ids=FIRST)
    cache(input_ids=SECOND)
    stats = cache.stats()
    if mode == "semantic":
        assert (stats.n_stored, stats.n_entries, stats.n_expelled) == (0, {1: 0, 3: 0}, {1: 0, 3: 1})
        cache(input_ids=SECOND)
        assert cache.stats().n_misses == 2
    else:
        assert (stats.n_stored, stats.n_entries, stats.n_expelled) == (1, {1: 0, 3: 1}, {1: 1, 3: 0})


def test_exact_repeats_are_never_checked() -> None:
    cache = checked(exact=True)
    for _ in range(5):
        cache(input_ids=tokens(2, 6))
    assert (cache.stats().hits, cache.stats().n_revalidated) == ({"exact": 8}, 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_other_policies_check_nothing(policy: str) -> None:
    cache = wrapped(CLASSIFIERS["bert"], tau=-1.0, exact=False, policy=policy)
    for seed in range(30):
        cache(input_ids=tokens(1, 6, seed=seed))
    assert (cache.stats().n_hits, cache.stats().n_revalidated) == (29, 0)


@by_payload
@in_both_modes
def test_rows_of_a_batch_are_checked_one_by_one(mode: str, payload: str) -> None:
    """Of one batch, some rows are served, some checked, one is a miss; none changes another's answer."""
    cache = checked(check_rate=0.5, payload=payload, mode=mode, tau=0.999)
    lengths = [6, 6, 4, 5, 6, 4, 5, 3]
    cache(**padded(lengths, seed=7))
    batch = padded([*lengths, 6], seed=7)
    expected, before = plain(cache, **batch), cache.stats()
    torch.testing.assert_close(cache(**batch).logits, expected, atol=1e-4, rtol=1e-4)
    after = cache.stats()
    n_hits, n_checked = after.n_hits, after.n_revalidated
    assert n_hits > 0 and n_checked > 0 and n_hits + n_checked == 8
    assert after.n_misses == before.n_misses + 1
    assert after.n_stored == 9
    assert after.n_requests == before.n_requests + 9


def test_each_layer_of_the_paper_keeps_its_own_account() -> None:
    """The first layer that would be reused is checked; after that the row is computed, and compared nowhere else."""
    cache = checked(mode="paper", payload="sequence", tau={1: -1.0, 3: -1.0}, layers=[1, 3])
    cache(input_ids=FIRST)
    cache(input_ids=SECOND)
    assert averages(cache, layer=1)[0] > 0.0
    assert averages(cache, layer=3) == [0.0]
    assert cache.stats().n_revalidated == 1


def test_a_row_that_stands_on_anothers_state_is_not_checked_above_it() -> None:
    cache = checked(check_rate=0.0, mode="paper", payload="sequence", layers=[1, 3])
    cache(input_ids=FIRST)
    inside.banks(cache).layer_banks[3]._policy.check_rate = 1.0
    cache(input_ids=SECOND)
    assert (cache.stats().hits, cache.stats().n_revalidated) == ({"paper": 1}, 0)
    assert averages(cache, layer=3) == [0.0]


def test_kv_of_a_checked_row_is_its_own() -> None:
    cache = checked(make=TOKEN_HEADS["causal"], allow_unsafe=True)
    cache(input_ids=FIRST, use_cache=True)
    ids = tokens(2, 6, seed=2)
    output = cache(input_ids=ids, use_cache=True)
    with cache.disabled():
        expected = cache(input_ids=ids, use_cache=True)
    assert cache.stats().n_revalidated == 2
    for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert_close(ours.keys, theirs.keys)
    assert_close(output.logits, expected.logits)


def test_full_banks_let_the_most_divergent_go() -> None:
    cache = checked(check_rate=0.0, tau=0.9999, max_entries=2)
    cache(input_ids=FIRST)
    cache(input_ids=SECOND)
    banks = inside.banks(cache)
    recent = banks.layer_banks[3].keys()[1]
    banks.check(recent, 3, torch.ones(1, 32), torch.randn(1, 32))
    cache(input_ids=tokens(1, 6, seed=3))
    assert recent not in banks.layer_banks[3]
    assert len(banks) == 2


def test_a_state_that_could_not_be_kept_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = checked()
    cache(input_ids=FIRST)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(inside.payload(cache), "take", fail)
        assert_close(cache(input_ids=SECOND).logits, plain(cache, input_ids=SECOND))
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
    cache = checked(limit=0.99, compression=compression)
    take = inside.payload(cache).take

    def take_infinite(hidden: Tensor, valid: Any) -> Tensor:
        return take(hidden, valid) / 0

    for ids, role in ((FIRST, "stored"), (SECOND, "fresh")):
        with monkeypatch.context() as broken:
            if role == which:
                broken.setattr(inside.payload(cache), "take", take_infinite)
            cache(input_ids=ids)
    stats = cache.stats()
    assert (stats.n_revalidated, stats.n_entries, stats.errors) == (1, {3: 0}, 0)


def test_what_compression_loses_is_no_divergence() -> None:
    cache = checked(tau=0.9999, exact=None, weight=1.0, compression={"name": "pca", "dim": 2, "fit_on": 8})
    cache(input_ids=tokens(9, 6))
    lost = cache.stats().reconstruction_distance[3]
    assert lost is not None and lost > 0.01
    cache(input_ids=tokens(9, 6))
    assert cache.stats().n_revalidated == 9
    assert averages(cache) == pytest.approx([0.0] * 9, abs=1e-5)
