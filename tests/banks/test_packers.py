"""Codecs in banks: fitted layer by layer to the states of one set of weights, and forgotten with what they saw."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmcache import BankFileError, LLMCache
from llmcache.banks.bank import Bank
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.compression import PCA
from llmcache.banks.compression.packer import Packer
from llmcache.banks.memory import Memory
from llmcache.policies import LRU
from llmcache.request.rows import Row, Scope
from tests import inside
from tests.saves import accept
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, padded, tokens

WIDTH, LAYERS = 16, (0, 1)
PLAIN, PACKED = 2 * WIDTH * 4, 2 * 3 * 2  # bytes of a state of two rows: float32, and 3 codes in float16


def banks(max_entries: int | None = None, max_bytes: int = 2**20, fit_on: int = 10) -> CacheBanks:
    banks = {layer: Bank(Memory(), LRU(), max_bytes, max_entries) for layer in LAYERS}
    return CacheBanks(banks, lambda: PCA(dim=3, fit_on=fit_on))


def states_of(name: int, weights: str = "w") -> dict[int, dict[str, Tensor]]:
    """Two rows a layer that vary in three directions, which the weights decide."""
    axes = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(ord(weights)))
    rows = ord(weights) + torch.randn(2, 3, generator=torch.Generator().manual_seed(name)) @ axes
    return {0: {"hidden": rows}, 1: {"hidden": 100 * rows.flip(dims=(1,))}}


def key(name: int, weights: str = "w") -> str:
    return f"{weights}{name:063x}"


def put(lib: CacheBanks, name: int, weights: str = "w", namespace: str = "default") -> bool:
    row = Row(0, key(name, weights), name.to_bytes(4, "big"), slice(0, 2), 2)
    return lib.put(Scope(namespace, weights, "torch.float32", "sdpa"), row, states_of(name, weights))


def put_many(lib: CacheBanks, names: range, **more: str) -> None:
    for name in names:
        assert put(lib, name, **more)


def check_states(lib: CacheBanks, name: int, weights: str = "w", error: float = 0.05) -> None:
    """What was put comes back in every layer, but for rounding."""
    for layer, expected in states_of(name, weights).items():
        state = lib.read(key(name, weights), layer, with_kv=False)
        assert state is not None
        torch.testing.assert_close(state.hidden, expected["hidden"], atol=error * 100**layer, rtol=0.0)


def rows_missing(lib: CacheBanks) -> list[int]:
    """How many rows the codec of each layer has yet to see; 0 once it is fitted."""
    return [packer.codec.n_fit for packer in lib.layer_banks.packers["w"].values()]


# -- in banks ----------------------------------------------------------------------------------------------------------


def test_layers_and_weights_that_take_turns_have_codecs_of_their_own_and_what_came_before_is_packed() -> None:
    lib = banks()
    for name in range(7):
        for weights in "wv":
            put(lib, name, weights)
        if name == 3:
            assert lib.nbytes == 4 * 2 * 2 * PLAIN
    assert lib.nbytes == 7 * 2 * 2 * PACKED
    for name in range(7):
        check_states(lib, name, "w")
        check_states(lib, name, "v")
    axes = [packer.codec.state()["axes"] for made in lib.layer_banks.packers.values() for packer in made.values()]
    assert len({tuple(one.flatten().tolist()) for one in axes}) == 4


def test_a_codec_packs_no_states_of_other_weights_and_goes_with_the_last_of_its_own() -> None:
    lib = banks(max_entries=6)
    put(lib, 0, "v")
    put_many(lib, range(5))
    assert lib.nbytes == 2 * (PLAIN + 5 * PACKED)
    check_states(lib, 0, "v", error=0.0)
    put_many(lib, range(5, 11))
    put(lib, 0, "u")
    assert set(lib.layer_banks.packers) == {"w", "u"}
    lib.clear()
    assert rows_missing(lib) == [0, 0]  # what was learned stays until other weights come


def test_packing_again_is_no_use_of_an_entry() -> None:
    lib = banks(fit_on=8)
    put_many(lib, range(3))
    assert lib.read(key(0), 0, with_kv=False)
    put(lib, 3)  # the codec is fitted
    bank, left = lib.layer_banks[0], []
    for _ in range(4):
        left.append(bank._policy.victim())
        bank.remove(left[-1])
    assert left == [key(name) for name in (1, 2, 0, 3)]


@pytest.mark.parametrize("max_entries", [None, 2])
@pytest.mark.parametrize("forget", [lambda lib: lib.purge("tenant"), lambda lib: lib.clear()])
def test_nothing_is_learned_from_what_was_forgotten_on_demand(
    forget: Callable[[CacheBanks], object], max_entries: int | None
) -> None:
    """Also where the bank had let go of it; that alone, which a bank that never holds enough does, forgets nothing."""
    lib = banks(max_entries)
    put_many(lib, range(4), namespace="tenant")
    forget(lib)
    put(lib, 4)
    assert list(lib.layer_banks.packers["w"][0]._waiting) == [key(4)]
    put_many(lib, range(5, 9))
    assert rows_missing(lib) == [0, 0]
    assert lib.nbytes == 2 * (max_entries or 5) * PACKED


def test_rows_of_other_tenants_stay() -> None:
    lib = banks()
    put_many(lib, range(3))
    put(lib, 9, namespace="tenant")
    assert lib.purge("tenant") == 1
    put(lib, 3)
    assert rows_missing(lib) == [10, 10]
    put(lib, 4)
    assert rows_missing(lib) == [0, 0]


def test_entries_too_large_while_plain_are_learned_from_and_fit_afterwards() -> None:
    lib = banks(max_bytes=PLAIN - 1)
    assert [put(lib, name) for name in range(6)] == [False] * 4 + [True] * 2
    assert lib.nbytes == 2 * 2 * PACKED
    check_states(lib, 4)


def test_a_fit_that_fails_is_tried_again_with_later_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = banks(fit_on=4)
    put(lib, 0)
    with monkeypatch.context() as broken:
        broken.setattr(torch.linalg, "svd", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            put(lib, 1)
    put(lib, 2)
    assert rows_missing(lib)[0] == 4
    put(lib, 3)
    assert rows_missing(lib) == [0, 0]


def test_many_threads_fit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    fit = PCA.fit
    monkeypatch.setattr(PCA, "fit", lambda codec, rows: (fits.append(len(rows)), fit(codec, rows)))
    lib = banks(fit_on=19)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: put(lib, name), range(40)))
    assert fits == [19, 19]  # once a layer, on no more than was asked for
    assert lib.nbytes == 40 * 2 * PACKED


# -- in a cache --------------------------------------------------------------------------------------------------------


def wrap(dim: int = 2, fit_on: int = 8, **settings: Any) -> LLMCache:
    """A cache of a BERT with a head, or of another model, that packs states with PCA."""
    model = settings.pop("model", None) or build(CLASSIFIERS["bert"])
    compression = {"name": "pca", "dim": dim, "fit_on": fit_on}
    return LLMCache.wrap(model, **{"tau": 0.999, "compression": compression, **settings})


def load_other_weights(cache: LLMCache, seed: int) -> None:
    cache.model.load_state_dict(build(CLASSIFIERS["bert"], seed=seed).state_dict())


def only_packer(cache: LLMCache) -> Packer:
    """The packer of the last layer, where states of one set of weights were stored."""
    (packers,) = inside.banks(cache).layer_banks.packers.values()
    return packers[3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pca", "autoencoder"])
@pytest.mark.parametrize("payload", ["cls", "sequence"])
def test_answers_before_and_after_the_fit(name: str, payload: str) -> None:
    """All dimensions are kept, so that the answers of `pca` are near the plain ones; the error says how near."""
    cache = wrap(tau=1 - 1e-6, payload=payload, compression={"name": name, "dim": 32, "fit_on": 50})
    early = cache(input_ids=tokens(8, 6)).logits
    torch.testing.assert_close(cache(input_ids=tokens(8, 6)).logits, early)
    for seed in range(1, 40):
        cache(input_ids=tokens(2, 6, seed=seed))
    stats = cache.stats()
    assert stats.hits == {"semantic": 8}
    n_rows = 86 * (6 if payload == "sequence" else 1)
    assert stats.nbytes == n_rows * 32 * 2
    error, distance = stats.reconstruction_error[3], stats.reconstruction_distance[3]
    assert error is not None and distance is not None
    assert (error < 1e-5) == (name == "pca") and error < 1
    assert 0 <= distance < 0.5
    if name == "pca":
        torch.testing.assert_close(cache(input_ids=tokens(8, 6)).logits, early, atol=0.05, rtol=0.05)


def test_layers_are_told_apart_in_the_stats() -> None:
    cache = wrap(dim=4, fit_on=12, layers=[0, 2], payload="sequence", model=build(BARE["bert"]))
    cache(input_ids=tokens(2, 6))
    assert cache.stats().reconstruction_error == {0: None, 2: None}
    cache(input_ids=tokens(2, 6, seed=1))
    low, high = cache.stats().reconstruction_error.values()
    assert low is not None and high is not None and low != high


def test_kv_of_a_decoder_is_whole_beside_packed_states() -> None:
    cache = wrap(dim=31, fit_on=36, allow_unsafe=True, model=build(TOKEN_HEADS["causal"]))
    plain = cache(input_ids=tokens(6, 6), use_cache=True)
    cache(input_ids=tokens(1, 6, seed=1), use_cache=True)
    again = cache(input_ids=tokens(6, 6), use_cache=True)
    assert cache.stats().hits == {"semantic": 6}
    for layer, other in zip(plain.past_key_values.layers, again.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)


def test_padding_reaches_no_codec() -> None:
    cache = wrap(fit_on=100, model=build(BARE["bert"]))
    cache(**padded([6, 3]))
    waiting = only_packer(cache)._waiting
    assert sorted(len(rows) for _, rows in waiting.values()) == [3, 6]


def test_other_weights_are_not_answered_through_the_earlier_codec() -> None:
    """Two axes of one model's states leave next to nothing of another's. What is lost is told of the latest weights."""
    cache = wrap(tau=0.9999)
    early = tokens(9, 6)
    cache(input_ids=early)
    packed = cache(input_ids=early).logits
    assert cache.stats().reconstruction_distance[3] is not None
    load_other_weights(cache, seed=1)
    ids = tokens(2, 6, seed=1)
    computed = cache(input_ids=ids).logits
    torch.testing.assert_close(cache(input_ids=ids).logits, computed)  # plain, as their own codec is not fitted yet
    assert cache.stats().reconstruction_distance == {3: None}
    assert cache.stats().hits == {"semantic": 9 + 2}
    load_other_weights(cache, seed=0)
    torch.testing.assert_close(cache(input_ids=early).logits, packed)
    assert cache.stats().hits == {"semantic": 9 + 2 + 9}


# -- saved and loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_before", [4, 8])
def test_a_saved_codec_goes_on(tmp_path: Path, n_before: int) -> None:
    """Saved before the fit, it is fitted after loading, on what was saved and what follows."""
    with wrap(dim=4, fit_on=6) as cache:
        cache(input_ids=tokens(n_before, 6))
        state = only_packer(cache).codec.state()
        cache.save(tmp_path)
    with LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path) as again:
        codec = only_packer(again).codec
        assert codec.n_fit == (6 if n_before == 4 else 0)
        assert all(torch.equal(part, codec.state()[name]) for name, part in state.items())
        again(input_ids=tokens(2, 6, seed=1))
        assert codec.n_fit == 0
        assert again.stats().nbytes == (n_before + 2) * 4 * 2


def test_a_codec_of_earlier_weights_is_not_saved(tmp_path: Path) -> None:
    ids = tokens(2, 6, seed=1)
    with wrap(tau=0.9999) as cache:
        cache(input_ids=tokens(8, 6))
        load_other_weights(cache, seed=1)
        computed = cache(input_ids=ids).logits
        cache.save(tmp_path)
    with LLMCache.load(build(CLASSIFIERS["bert"], seed=1), tmp_path) as again:
        torch.testing.assert_close(again(input_ids=ids).logits, computed)
        again(input_ids=tokens(7, 6, seed=2))
        assert again.stats().nbytes == 9 * 2 * 2  # its own codec was fitted meanwhile


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_codec_that_does_not_fit_the_entries_is_refused(tmp_path: Path, damage: str) -> None:
    """Hashes tell damage; this is what is left to tell when they agree."""
    with wrap(dim=4, fit_on=6) as cache:
        cache(input_ids=tokens(8, 6))
        cache.save(tmp_path)
    path = next(tmp_path.glob("states-*"))
    parts = load_file(path)
    if damage == "cut":
        parts["3/codec/axes"] = parts["3/codec/axes"][:, :2].contiguous()
    else:
        del parts["3/codec/centre"]
    save_file(parts, path)
    accept(path)
    with pytest.raises(BankFileError, match="do not fit"):
        LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path)
