"""What banks store and evict: fingerprints, indexes, codecs, policies, revalidation, saving, settings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llmcache import ConfigError, LLMCache
from tests.paper.reference import assert_close, plain, run, served, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, padded, states, tokens

ONE, TWO = tokens(1, 6, seed=1), tokens(1, 6, seed=2)


def changed(ids: Tensor, n: int) -> Tensor:
    """The same request with its last tokens changed."""
    other = ids.clone()
    other[0, -n:] = 5 + (other[0, -n:] + 17) % 91
    return other


# -- fingerprints and indexes ------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "mean": {},
    "per layer": {"fingerprint": {"name": "mean", "per_layer": True}},
    "simhash": {"fingerprint": {"name": "simhash", "bits": 4096}, "tau": 0.885},
    "simhash per layer": {"fingerprint": {"name": "simhash", "bits": 4096, "per_layer": True}, "tau": 0.885},
    "minhash": {"fingerprint": "minhash", "tau": 0.5},
    "attention": {"fingerprint": "attention"},
    "attention ahead": {"fingerprint": "attention", "layers": "last"},
    "hnsw": {"index": "hnsw"},
    "flat": {"index": {"name": "flat"}},
    "auto, inverted": {"index": {"name": "auto", "switch": 4}},
}


@pytest.mark.parametrize("name", WAYS)
def test_near_requests_hit_and_far_ones_do_not(name: str) -> None:
    cache = wrapped("bert", **{"tau": 0.983, **WAYS[name]})
    stored = tokens(12, 12)
    cache(input_ids=stored)
    near = torch.cat([changed(row[None], 1) for row in stored[:6]])
    assert_close(cache(input_ids=near).logits, plain(cache, input_ids=stored[:6]))
    cache(input_ids=near)
    assert served(cache) == [True] * 6
    far = torch.cat([changed(row[None], 11) for row in stored[:6]])
    assert_close(cache(input_ids=far).logits, plain(cache, input_ids=far))
    assert cache.stats().errors == 0


@pytest.mark.parametrize("layers", ["all", "last"])
def test_a_fingerprint_that_is_fitted_finds_also_what_came_before(layers: str) -> None:
    cache = wrapped("bert", tau=0.95, layers=layers, fingerprint={"name": "pca", "dim": 8, "fit_on": 6})
    asked = [tokens(2, 6, seed=seed) for seed in range(3)]
    for number, ids in enumerate((*asked[:2], *asked[:2], asked[2], *asked)):
        cache(input_ids=ids)
        assert served(cache) == [number > 4] * 2  # fitted with the sixth request that was stored
    assert cache.stats().errors == 0


# -- codecs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize(
    ("compression", "error", "share"),
    [
        ("none", 0.0, 1.0),
        ("fp16", 1e-2, 0.5),
        ("int8", 0.1, 0.3),
        ({"name": "pca", "dim": 31, "fit_on": 33}, 2.0, 0.5),
        ({"name": "autoencoder", "dim": 8, "fit_on": 33, "epochs": 2}, np.inf, 0.2),
    ],
    ids=lambda one: str(one)[:20],
)
def test_what_codecs_keep_and_lose(compression: Any, error: float, share: float, layers: str) -> None:
    cache = wrapped("bert", tau=0.9999, layers=layers, payload="sequence", compression=compression)
    first, later = tokens(8, 6), tokens(24, 6, seed=3)
    for ids in (first, later):  # the first are packed once the codec is fitted
        assert_close(cache(input_ids=ids).logits, plain(cache, input_ids=ids))
    stats, n_banks = cache.stats(), 4 if layers == "all" else 1
    assert stats.nbytes <= share * n_banks * 32 * 6 * 32 * 4 and stats.errors == 0
    for ids in (first, later):
        found = cache(input_ids=ids).logits
        assert served(cache) == [True] * len(ids)
        assert float((found - plain(cache, input_ids=ids)).abs().max()) <= error
    lost = [one for one in stats.reconstruction_error.values() if one is not None]
    assert len(lost) == (0 if compression == "none" else n_banks) and all(one > 0 for one in lost)


def test_codecs_pack_kv_and_those_that_are_fitted_leave_it() -> None:
    for compression, atol in (("fp16", 1e-2), ({"name": "pca", "dim": 31, "fit_on": 40}, 1e-4)):
        cache = wrapped(TOKEN_HEADS["causal"], tau=0.9999, allow_unsafe=True, compression=compression)
        ids = tokens(8, 6)
        expected = cache(input_ids=ids, use_cache=True).past_key_values
        found = cache(input_ids=ids, use_cache=True).past_key_values
        assert served(cache) == [True] * 8
        for ours, theirs in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=atol, rtol=1e-2)


def test_other_weights_have_a_codec_of_their_own() -> None:
    cache = wrapped("bert", tau=0.9999, layers="last", compression={"name": "pca", "dim": 4, "fit_on": 8})
    cache(input_ids=tokens(8, 6))
    cache(input_ids=tokens(3, 6, seed=5))
    before = cache.stats().nbytes
    with torch.no_grad():
        cache.model.bert.embeddings.word_embeddings.weight.mul_(2)
    cache(input_ids=tokens(3, 6, seed=5))
    assert cache.stats().nbytes == before + 3 * 32 * 4  # plain until it is fitted
    assert cache.stats().errors == 0


def test_entries_too_large_while_plain_are_learned_from_and_fit_afterwards() -> None:
    cache = wrapped("bert", tau=0.9999, layers="last", payload="sequence", max_bytes=6 * 32 * 2,
                    compression={"name": "pca", "dim": 4, "fit_on": 12})  # fmt: skip
    for seed in (1, 2, 2):
        cache(input_ids=tokens(1, 6, seed=seed))
    assert (cache.stats().n_too_large, cache.stats().n_stored, served(cache)) == (1, 1, [True])


def test_nothing_is_learned_from_what_was_purged() -> None:
    for settings in (
        {"compression": {"name": "pca", "dim": 2, "fit_on": 4}},
        {"fingerprint": {"name": "pca", "fit_on": 4}},
    ):
        cache = wrapped("bert", tau=0.9999, layers="last", **settings)
        with cache.namespace("tenant"):
            cache(input_ids=tokens(3, 6))
        cache.purge(namespace="tenant")
        cache(input_ids=tokens(1, 6, seed=9))
        cache(input_ids=tokens(1, 6, seed=9))
        assert served(cache) == ["compression" in settings]
        assert cache.stats().nbytes == 32 * 4  # not packed


# -- policies ----------------------------------------------------------------------------------------------------------


def test_ttl_lets_entries_go_at_their_age() -> None:
    now = [0.0]
    cache = wrapped("bert", tau=-1.0, policy={"name": "ttl", "ttl_s": 10.0, "now": lambda: now[0]})
    for second, hit in ((0, False), (9, True), (11, False)):
        now[0] = second
        cache(input_ids=ONE)
        assert served(cache) == [hit]
    assert cache.stats().n_expelled == dict.fromkeys(range(4), 1)


def checked(rate: float = 1.0, limit: float = 2.0, make: Any = "bert", **settings: Any) -> LLMCache:
    """Return a cache that serves any request to any other, and revalidates hits."""
    policy = {"name": "divergence", "check_rate": rate, "limit": limit, "weight": 1.0}
    return wrapped(make, **{"tau": -1.0, "policy": policy, **settings})


@pytest.mark.parametrize("settings", [{}, {"layers": "last"}, {"layers": [1]}], ids=str)
def test_a_checked_row_gets_its_own_answer_and_is_counted_apart(settings: dict[str, Any]) -> None:
    cache = checked(**settings)
    cache(input_ids=ONE)
    assert_close(cache(input_ids=TWO).logits, plain(cache, input_ids=TWO))
    stats = cache.stats()
    assert (stats.n_requests, stats.n_hits, stats.n_misses, stats.n_revalidated) == (3, 0, 1, 1)
    assert (stats.n_stored, stats.n_layers_skipped, stats.bypassed) == (1, 0, {"disabled": 1})


@pytest.mark.parametrize("compression", ["none", {"name": "pca", "dim": 2, "fit_on": 6}], ids=str)
def test_an_entry_leaves_by_how_far_the_fresh_state_is_from_its_own(compression: Any) -> None:
    """The distance is 1 - cosine, after compression of both. Repeats are not checked: they would show nothing."""
    first, second = (run(build(BARE["bert"]), input_ids=ids)[0] for ids in (ONE, TWO))
    distance = 1 - float(torch.nn.functional.cosine_similarity(first, second).mean())
    limits = {0.9 * distance: 1, 1.1 * distance: 0} if compression == "none" else {1e-5: 1}
    for limit, n_expelled in limits.items():
        cache = checked(limit=limit, make=BARE["bert"], layers="last", payload="sequence", compression=compression)
        for _ in range(2):
            cache(input_ids=ONE)
        assert cache.stats().n_expelled == {3: 0}
        assert cache.stats().n_hits == 1
        cache(input_ids=TWO)
        assert cache.stats().n_expelled == {3: n_expelled} and cache.stats().n_revalidated == 1


def test_each_layer_keeps_its_own_account() -> None:
    """Only the first layer that would be reused is checked; then the row is computed without further checks."""
    cache = checked(limit=1e-6, tau={1: -1.0, 3: -1.0})
    cache(input_ids=ONE)
    cache(input_ids=TWO)
    stats = cache.stats()
    assert (stats.n_entries, stats.n_expelled) == ({1: 0, 3: 1}, {1: 1, 3: 0})


def test_rows_of_a_batch_are_checked_one_by_one() -> None:
    cache = checked(rate=0.5, tau=0.983)
    stored = tokens(12, 12)
    cache(input_ids=stored)
    near = torch.cat([*(changed(row[None], 1) for row in stored[:8]), changed(stored[8:9], 11)])
    found, own, earlier = cache(input_ids=near).logits, plain(cache, input_ids=near), plain(cache, input_ids=stored)
    stats = cache.stats()
    assert stats.n_hits + stats.n_revalidated == 8 and stats.n_hits > 0 < stats.n_revalidated
    assert (stats.n_misses, stats.n_stored) == (13, 13)
    for row in range(9):
        expected = (own[row], earlier[row]) if row < 8 else (own[row],)
        assert any(torch.allclose(found[row], one, atol=1e-4) for one in expected)


# -- saving ------------------------------------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {
    "all": {},
    "last": {"layers": "last"},
    "kv": {"make": TOKEN_HEADS["causal"], "allow_unsafe": True},
    "int8": {"compression": "int8"},
    "fitted codec": {"compression": {"name": "pca", "dim": 4, "fit_on": 5}},
    "fitted fingerprint": {"fingerprint": {"name": "pca", "dim": 4, "fit_on": 3}},
    "fingerprint that waits": {"fingerprint": {"name": "pca", "dim": 4, "fit_on": 5}},
    "minhash": {"fingerprint": "minhash", "tau": 0.9},
    "model's device": {"device": "model", "index": "hnsw"},
}


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_serves_another_cache(name: str, tmp_path: Path) -> None:
    settings = {"tau": 0.9999, **SAVED[name]}
    make = settings.pop("make", CLASSIFIERS["bert"])
    first, second, inputs = build(make), build(make), padded([6, 4, 6, 5])
    with LLMCache.wrap(first, **settings) as cache:
        computed = run(first, **inputs)
        cache.save(tmp_path / "saved")
        again = run(first, **inputs)
    with LLMCache.load(second, tmp_path / "saved") as cache:
        if name == "fingerprint that waits":
            run(second, **padded([6], seed=30))
        found = run(second, **inputs)
        assert [outcome.rung for outcome in cache.last] == ["paper"] * 4
        torch.testing.assert_close(found, computed if name == "fingerprint that waits" else again)
        assert cache.stats().errors == 0


# -- settings ----------------------------------------------------------------------------------------------------------


NOT_WITH_TAU: dict[str, Any] = dict.fromkeys(("exact", "prefix", "gate", "auto_bypass", "share_calibration"), True)
NOT_WITH_TAU |= {"store": "disk", "fingerprint": "learned", "learn": 9, "audit": 0.1, "recalibrate": 5, "max_drop": 0.1}


@pytest.mark.parametrize("name", NOT_WITH_TAU)
def test_what_tau_does_not_do_is_refused_with_its_cure(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*leave .*out") as raised:
        wrapped("bert", tau=0.9, **{name: NOT_WITH_TAU[name]})
    assert "\n" not in str(raised.value)


def test_what_a_calibrated_cache_does_is_refused() -> None:
    cache = wrapped("bert", tau=0.9)
    for act in (lambda: cache.calibrate([]), lambda: cache.observe([]), cache.compile):
        with pytest.raises(ConfigError, match=r"tau=0\.9"):
            act()
    assert cache.calibration is None and cache.drain() == 0 and "paper" in repr(cache)


def test_settings_that_say_off_are_taken() -> None:
    cache = wrapped("bert", tau=-1.0, exact=False, prefix=False, auto_bypass=False, audit=0.0, store="memory")
    for ids in (ONE, ONE, TWO):
        states(cache(input_ids=ids))
    assert cache.stats().hits == {"paper": 2}
    cache.restart_stats()
    assert (cache.stats().n_requests, cache.stats().hits_by_layer, cache.stats().n_stored) == (0, {}, 1)
    cache.clear()
    assert (cache.stats().n_stored, cache.stats().nbytes, cache.stats().index_nbytes) == (0, 0, 0)
