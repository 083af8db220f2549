"""Codecs of states of different weights and tenants: kept apart, and forgotten with those they belong to."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import LLMCache
from llmcache.banks.bank import Bank
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.compression import PCA, Half
from llmcache.banks.compression.packer import MEASURED_EVERY, Loss, Packer
from llmcache.banks.stores.memory import MemoryStore
from llmcache.policies import LRU
from llmcache.request.rows import Row, Scope
from tests.tiny_models import CLASSIFIERS, build, tokens

WIDTH = 16
PLAIN, PACKED = 2 * WIDTH * 4, 2 * 3 * 2  # bytes of an entry of two rows: float32, and 3 codes in float16


def banks(max_entries: int | None = None, max_bytes: int = 2**20) -> CacheBanks:
    return CacheBanks({0: Bank(MemoryStore(), LRU(), max_bytes, max_entries)}, lambda: PCA(dim=3, fit_on=10))


def rows_of(name: int, weights: str = "w") -> Tensor:
    """Two rows that vary in three directions, which the weights decide."""
    axes = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(ord(weights)))
    return ord(weights) + torch.randn(2, 3, generator=torch.Generator().manual_seed(name)) @ axes


def key(name: int, weights: str = "w") -> str:
    return f"{weights}{name:063x}"


def put(lib: CacheBanks, name: int, weights: str = "w", namespace: str = "default") -> bool:
    row = Row(0, key(name, weights), name.to_bytes(4, "big"), slice(0, 2), 2)
    return lib.put(Scope(namespace, weights, "torch.float32", "sdpa"), row, {0: {"hidden": rows_of(name, weights)}})


def hidden(lib: CacheBanks, name: int, weights: str = "w") -> Tensor:
    state = lib.read(key(name, weights), 0, with_kv=False)
    assert state is not None
    return state.hidden


# -- weights -----------------------------------------------------------------------------------------------------------


def test_states_of_weights_that_take_turns_all_come_back() -> None:
    lib = banks()
    for name in range(7):
        for weights in "wv":
            put(lib, name, weights)
    assert lib.nbytes == 2 * 7 * PACKED
    for name in range(7):
        for weights in "wv":
            torch.testing.assert_close(hidden(lib, name, weights), rows_of(name, weights), atol=0.05, rtol=0.0)


def test_a_codec_packs_no_states_of_other_weights() -> None:
    lib = banks()
    put(lib, 0, "v")
    for name in range(5):
        put(lib, name)
    assert lib.nbytes == PLAIN + 5 * PACKED
    assert torch.equal(hidden(lib, 0, "v"), rows_of(0, "v"))


def test_codecs_of_weights_that_hold_nothing_are_dropped() -> None:
    lib = banks(max_entries=2)
    put(lib, 0, "v")
    for name in range(5):
        put(lib, name)
    put(lib, 0, "u")
    assert set(lib.layer_banks.packers) == {"w", "u"}
    lib.clear()
    assert lib.layer_banks.packers["w"][0].codec.n_fit == 0  # what was learned stays until other weights come


def wrap(**settings: Any) -> LLMCache:
    compression = {"name": "pca", "dim": 2, "fit_on": 8}
    return LLMCache.wrap(build(CLASSIFIERS["bert"]), tau=0.9999, compression=compression, **settings)


def load_other_weights(cache: LLMCache, seed: int) -> None:
    cache.model.load_state_dict(build(CLASSIFIERS["bert"], seed=seed).state_dict())


def test_other_weights_are_not_answered_through_the_earlier_codec() -> None:
    """Two axes of one model's states leave next to nothing of another's."""
    cache = wrap()
    early = tokens(8, 6)
    cache(input_ids=early)
    packed = cache(input_ids=early).logits
    load_other_weights(cache, seed=1)
    ids = tokens(2, 6, seed=1)
    computed = cache(input_ids=ids).logits
    torch.testing.assert_close(cache(input_ids=ids).logits, computed)  # plain, as their own codec is not fitted yet
    assert cache.stats().hits == {"semantic": 8 + 2}
    load_other_weights(cache, seed=0)
    torch.testing.assert_close(cache(input_ids=early).logits, packed)
    assert cache.stats().hits == {"semantic": 8 + 2 + 8}


def test_what_is_lost_is_told_of_the_weights_that_stored_last() -> None:
    cache = wrap()
    cache(input_ids=tokens(9, 6))
    assert cache.stats().reconstruction_distance[3] is not None
    load_other_weights(cache, seed=1)
    cache(input_ids=tokens(1, 6))
    assert cache.stats().reconstruction_distance == {3: None}


def test_a_codec_of_earlier_weights_is_not_saved(tmp_path: Path) -> None:
    ids = tokens(2, 6, seed=1)
    with wrap() as cache:
        cache(input_ids=tokens(8, 6))
        load_other_weights(cache, seed=1)
        computed = cache(input_ids=ids).logits
        cache.save(tmp_path)
    with LLMCache.load(build(CLASSIFIERS["bert"], seed=1), tmp_path) as again:
        torch.testing.assert_close(again(input_ids=ids).logits, computed)
        again(input_ids=tokens(7, 6, seed=2))
        assert again.stats().nbytes == 9 * 2 * 2  # its own codec was fitted meanwhile


# -- what a codec is shown ---------------------------------------------------------------------------------------------


def test_rows_of_a_purged_tenant_are_forgotten_also_where_the_bank_had_let_go() -> None:
    lib = banks(max_entries=2)
    for name in range(4):
        put(lib, name, namespace="tenant")
    lib.purge("tenant")
    put(lib, 4)
    assert lib.layer_banks.packers["w"][0].codec.n_fit == 10
    assert list(lib.layer_banks.packers["w"][0]._waiting) == [key(4)]


def test_clearing_forgets_rows_also_where_the_bank_had_let_go() -> None:
    lib = banks(max_entries=2)
    for name in range(4):
        put(lib, name)
    lib.clear()
    assert lib.layer_banks.packers["w"][0]._waiting == {}


def test_rows_of_other_tenants_stay() -> None:
    lib = banks()
    for name in range(4):
        put(lib, name)
    put(lib, 9, namespace="tenant")  # fitted
    assert lib.purge("tenant") == 1
    other = banks()
    for name in range(4):
        put(other, name)
    other.purge("tenant")
    put(other, 4)
    assert other.layer_banks.packers["w"][0].codec.n_fit == 0


def test_entries_too_large_while_plain_are_learned_from_and_fit_afterwards() -> None:
    lib = banks(max_bytes=PLAIN - 1)
    assert [put(lib, name) for name in range(6)] == [False] * 4 + [True] * 2
    assert lib.nbytes == 2 * PACKED
    torch.testing.assert_close(hidden(lib, 4), rows_of(4), atol=0.05, rtol=0.0)


# -- what is measured --------------------------------------------------------------------------------------------------


def test_a_loss_that_cannot_be_measured_costs_no_entry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_tries = []
    monkeypatch.setattr(Loss, "add", lambda *_: (n_tries.append(1), 1 / 0))
    packer = Packer(Half())
    with caplog.at_level(logging.WARNING, logger="llmcache"):
        for name in range(2 * MEASURED_EVERY):
            packer.pack({"hidden": rows_of(name)})
    assert len(n_tries) == 2
    assert len(caplog.records) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_model_may_move_to_another_device() -> None:
    """Before the fit and after it; what is measured goes on."""
    packer = Packer(PCA(dim=3, fit_on=10))
    for name in range(5 + 2 * MEASURED_EVERY):
        states = rows_of(name).to(("cpu", "cuda")[name % 2])
        packer.learn(str(name), "", packer.pack({"hidden": states}))
        assert packer.there_and_back(states).device == states.device
    assert packer.loss.relative_error is not None and packer.loss.relative_error < 1e-3
