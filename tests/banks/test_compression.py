"""Codecs that are fitted: what they learn and when, what they lose, and that nothing else is touched."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmcache import BankFileError, LLMCache, folder
from llmcache.banks.bank import Bank
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.compression import CODECS, PCA, Autoencoder, Half, Int8, Plain
from llmcache.banks.compression.packer import MEASURED_EVERY, Loss, Packer
from llmcache.banks.stores.memory import MemoryStore
from llmcache.policies import LRU
from llmcache.request.rows import Row, Scope
from tests import inside
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, padded, tokens

LEARNED = ["pca", "autoencoder"]
WIDTH = 16


def low_rank(n: int, rank: int = 3, width: int = WIDTH, seed: int = 0) -> Tensor:
    """Rows that vary in few directions, around a centre that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.randn(rank, width, generator=torch.Generator().manual_seed(99))
    return 5.0 + torch.randn(n, rank, generator=generator) @ axes


def there_and_back(codec: PCA | Autoencoder, x: Tensor) -> Tensor:
    return codec.decode("hidden", codec.encode("hidden", x), x.dtype)


def relative_error(x: Tensor, back: Tensor) -> float:
    """The definition, straight away."""
    return float((x - back).square().sum() / (x - x.mean(dim=0)).square().sum())


# -- what is learned ---------------------------------------------------------------------------------------------------


def test_pca_gives_back_what_varies_in_few_directions() -> None:
    codec = PCA(dim=3, fit_on=40)
    codec.fit(low_rank(40))
    x = low_rank(100, seed=1)
    assert codec.encode("hidden", x)["hidden.code"].shape == (100, 3)
    assert relative_error(x, there_and_back(codec, x)) < 1e-6


def test_pca_is_the_best_linear_map_of_its_size() -> None:
    from sklearn.decomposition import PCA as Reference

    x = torch.randn(60, WIDTH) @ torch.randn(WIDTH, WIDTH)
    codec = PCA(dim=5, fit_on=60)
    codec.fit(x)
    reference = Reference(n_components=5, svd_solver="full").fit(x.numpy())
    best = torch.from_numpy(reference.inverse_transform(reference.transform(x.numpy())))
    torch.testing.assert_close(there_and_back(codec, x), best, atol=0.02, rtol=0.0)  # codes are float16


def test_an_autoencoder_learns_far_more_than_the_mean() -> None:
    codec = Autoencoder(dim=6, fit_on=200)
    codec.fit(low_rank(200))
    x = low_rank(100, seed=1)
    assert relative_error(x, there_and_back(codec, x)) < 0.15
    hardly = Autoencoder(dim=6, fit_on=200, epochs=1)
    hardly.fit(low_rank(200))
    assert relative_error(x, there_and_back(hardly, x)) > 0.5


def test_an_autoencoder_is_seeded() -> None:
    codecs = [Autoencoder(dim=2, fit_on=20, epochs=3, seed=seed) for seed in (0, 0, 1)]
    for codec in codecs:
        codec.fit(low_rank(20))
    first, same, other = (codec.state()["into"] for codec in codecs)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", LEARNED)
def test_rows_that_never_vary_come_back(name: str) -> None:
    codec = CODECS[name](dim=2, fit_on=20)
    codec.fit(torch.full((20, WIDTH), 3.0))
    x = torch.full((2, WIDTH), 3.0)
    torch.testing.assert_close(codec.decode("hidden", codec.encode("hidden", x), x.dtype), x, atol=0.2, rtol=0.0)


@pytest.mark.parametrize("name", LEARNED)
def test_no_more_is_kept_than_there_is(name: str) -> None:
    codec = CODECS[name](dim=64, fit_on=100)
    codec.fit(low_rank(100))
    assert codec.encode("hidden", low_rank(2))["hidden.code"].shape == (2, WIDTH)


@pytest.mark.parametrize("name", LEARNED)
def test_kv_stays_plain(name: str) -> None:
    codec = CODECS[name](dim=2, fit_on=20)
    codec.fit(low_rank(20))
    kv = torch.randn(2, 4, 3, WIDTH)
    assert codec.encode("keys", kv).keys() == {"keys"}
    assert torch.equal(codec.decode("keys", codec.encode("keys", kv), kv.dtype), kv)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_mode_changes_nothing(name: str, mode: Callable[[], object]) -> None:
    """Inference tensors cannot be trained on, and autocast would halve the digits, each without a word."""
    plain, packer = (Packer(CODECS[name](dim=3, fit_on=20)) for _ in range(2))
    rows, x = low_rank(20), low_rank(4, seed=1)
    plain.learn("a", "", plain.pack({"hidden": rows}))
    with mode():
        assert packer.learn("a", "", packer.pack({"hidden": rows * 1.0}))
        entry = packer.pack({"hidden": x})
        back = packer.unpack("hidden", entry, torch.float32)
    expected = plain.pack({"hidden": x})
    assert torch.equal(entry.tensors["hidden.code"], expected.tensors["hidden.code"])
    assert torch.equal(back, plain.unpack("hidden", expected, torch.float32))
    assert not any(part.is_inference() or part.requires_grad for part in packer.codec.state().values())


@pytest.mark.parametrize("name", LEARNED)
def test_the_callers_randomness_is_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    codec = CODECS[name](dim=2, fit_on=20)
    codec.fit(low_rank(20))
    codec.encode("hidden", low_rank(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("damage", ["missing", "shape", "dimensions", "rank"])
def test_a_state_that_does_not_fit_is_refused(name: str, damage: str) -> None:
    codec = CODECS[name](dim=2, fit_on=20)
    codec.fit(low_rank(20))
    state = codec.state()
    last = list(state)[-1]
    if damage == "missing":
        del state[last]
    elif damage == "shape":
        state[last] = state[last][:-1]
    elif damage == "rank":
        state[last] = state[last][None]
    fresh = CODECS[name](dim=3 if damage == "dimensions" else 2, fit_on=20)
    with pytest.raises((KeyError, ValueError), match=f"{last}|dim=3"):
        fresh.restore(state)
    assert fresh.n_fit == 20


# -- what is measured --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), shift=st.sampled_from([0.0, 1e7]))
def test_the_running_error_is_that_of_all_rows_at_once(sizes: list[int], shift: float) -> None:
    x = torch.randn(sum(sizes), 4, dtype=torch.float64) + shift
    back = x + 0.1 * torch.randn_like(x)
    loss = Loss()
    for part, returned in zip(x.split(sizes), back.split(sizes), strict=True):
        loss.add(part, returned)
    if len(x) == 1:
        assert loss.relative_error is None
    else:
        assert loss.relative_error == pytest.approx(relative_error(x, back), rel=1e-6)
    cosine = torch.nn.functional.cosine_similarity(x, back).mean()
    assert loss.cosine_distance == pytest.approx(1 - float(cosine), abs=1e-9)


def test_rows_that_are_all_the_same_have_no_relative_error() -> None:
    loss = Loss()
    x = torch.full((7, 3), 0.1)
    loss.add(x, x + 1)
    assert loss.relative_error is None


def test_rows_without_a_number_are_not_measured() -> None:
    loss = Loss()
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]])
    loss.add(x, x)
    assert (loss.relative_error, loss.cosine_distance) == (None, None)
    loss.add(
        torch.tensor([[1.0, 2.0], [3.0, torch.nan], [5.0, 2.0]]), torch.tensor([[1.0, 2.0], [0.0, 0.0], [5.0, 4.0]])
    )
    assert loss.relative_error == pytest.approx(4 / 8)


@pytest.mark.parametrize(("codec", "is_measured"), [(Plain(), False), (Half(), True), (Int8(), True)])
def test_every_lossy_codec_is_measured(codec: Plain, is_measured: bool) -> None:
    packer = Packer(codec)
    packer.pack({"hidden": low_rank(5)})
    error = packer.loss.relative_error
    assert 0 < error < 1e-3 if is_measured and error is not None else error is None


def test_what_is_fitted_on_is_not_measured_and_later_one_entry_in_sixteen_is() -> None:
    packer = Packer(PCA(dim=2, fit_on=20))
    counted: list[int] = []
    packer.loss.add = lambda x, unpacked: counted.append(len(x))  # type: ignore[method-assign]
    for number in range(10):
        packer.learn(str(number), "", packer.pack({"hidden": low_rank(2, seed=number)}))
    assert counted == []
    for _ in range(2 * MEASURED_EVERY + 1):
        packer.pack({"hidden": low_rank(2)})
    assert counted == [2, 2, 2]


# -- in the library ----------------------------------------------------------------------------------------------------


def banks(codec: Callable[[], object], max_entries: int | None = None) -> CacheBanks:
    banks = {layer: Bank(MemoryStore(), LRU(), 2**20, max_entries) for layer in (0, 1)}
    return CacheBanks(banks, codec, None, None)  # type: ignore[arg-type]


def put(lib: CacheBanks, name: int, n_rows: int = 2, namespace: str = "default") -> None:
    row = Row(0, f"{name:064x}", name.to_bytes(4, "big"), slice(0, n_rows), n_rows)
    rows = low_rank(n_rows, seed=name)
    scope = Scope(namespace, "w", "torch.float32", "sdpa")
    assert lib.put(scope, row, {0: {"hidden": rows}, 1: {"hidden": 100 * rows.flip(dims=(1,))}})


def key(name: int) -> str:
    return f"{name:064x}"


def hidden(lib: CacheBanks, name: int, layer: int) -> Tensor:
    state = lib.read(key(name), layer, with_kv=False)
    assert state is not None
    return state.hidden


def test_each_layer_is_fitted_for_itself_and_what_was_stored_before_is_packed() -> None:
    lib = banks(lambda: PCA(dim=3, fit_on=10))
    for name in range(4):
        put(lib, name)
    assert lib.nbytes == 4 * 2 * 2 * WIDTH * 4
    put(lib, 4)
    put(lib, 5)
    assert lib.nbytes == 6 * 2 * 2 * 3 * 2  # entries, layers, rows, codes, bytes of float16
    for name in range(6):
        rows = low_rank(2, seed=name)
        torch.testing.assert_close(hidden(lib, name, 0), rows, atol=0.01, rtol=0.0)
        torch.testing.assert_close(hidden(lib, name, 1), 100 * rows.flip(dims=(1,)), atol=1.0, rtol=0.0)
    assert not torch.equal(*(packer.codec.state()["axes"] for packer in lib.layer_banks.packers["w"].values()))


def test_packing_again_is_no_use_of_an_entry() -> None:
    lib = banks(lambda: PCA(dim=3, fit_on=8))
    for name in (0, 1, 2):
        put(lib, name)
    hidden(lib, 0, layer=0)
    put(lib, 3)  # the codec is fitted
    bank, left = lib.layer_banks[0], []
    for _ in range(4):
        left.append(bank._policy.victim())
        bank.remove(left[-1])
    assert left == [key(name) for name in (1, 2, 0, 3)]


def test_entries_that_left_meanwhile_still_count() -> None:
    """A bank that never holds enough at once must be packed all the same."""
    lib = banks(lambda: PCA(dim=3, fit_on=10), max_entries=2)
    for name in range(5):
        put(lib, name)
    assert lib.layer_banks.packers["w"][0].codec.n_fit == 0
    assert lib.nbytes == 2 * 2 * 2 * 3 * 2


@pytest.mark.parametrize("forget", [lambda lib: lib.purge("tenant"), lambda lib: lib.clear()])
def test_nothing_is_learned_from_what_was_forgotten_on_demand(forget: Callable[[CacheBanks], object]) -> None:
    lib = banks(lambda: PCA(dim=3, fit_on=10))
    for name in range(4):
        put(lib, name, namespace="tenant")
    forget(lib)
    put(lib, 4)
    assert lib.layer_banks.packers["w"][0].codec.n_fit == 10
    for name in range(5, 9):
        put(lib, name)
    assert lib.layer_banks.packers["w"][0].codec.n_fit == 0


def test_a_fit_that_fails_is_tried_again_with_later_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = banks(lambda: PCA(dim=3, fit_on=4))
    put(lib, 0)
    with monkeypatch.context() as broken:
        broken.setattr(torch.linalg, "svd", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            put(lib, 1)
    put(lib, 2)
    assert lib.layer_banks.packers["w"][0].codec.n_fit == 4
    put(lib, 3)
    assert [packer.codec.n_fit for packer in lib.layer_banks.packers["w"].values()] == [0, 0]


def test_many_threads_fit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    fit = PCA.fit
    monkeypatch.setattr(PCA, "fit", lambda codec, rows: (fits.append(len(rows)), fit(codec, rows)))
    lib = banks(lambda: PCA(dim=3, fit_on=19))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: put(lib, name), range(40)))
    assert fits == [19, 19]  # once a layer, on no more than was asked for
    assert lib.nbytes == 40 * 2 * 2 * 3 * 2


# -- in a cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("payload", ["cls", "sequence"])
def test_answers_before_and_after_the_fit(name: str, payload: str) -> None:
    """All dimensions are kept, so that the answers of `pca` are near the plain ones; the error says how near."""
    model = build(CLASSIFIERS["bert"])
    compression = {"name": name, "dim": 32, "fit_on": 50}
    cache = LLMCache.wrap(model, tau=1 - 1e-6, payload=payload, compression=compression)
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
    compression = {"name": "pca", "dim": 4, "fit_on": 12}
    cache = LLMCache.wrap(build(BARE["bert"]), tau=0.999, layers=[0, 2], payload="sequence", compression=compression)
    cache(input_ids=tokens(2, 6))
    assert cache.stats().reconstruction_error == {0: None, 2: None}
    cache(input_ids=tokens(2, 6, seed=1))
    low, high = cache.stats().reconstruction_error.values()
    assert low is not None and high is not None and low != high


def test_kv_of_a_decoder_is_whole_beside_packed_states() -> None:
    model = build(TOKEN_HEADS["causal"])
    settings = {"tau": 0.999, "allow_unsafe": True, "compression": {"name": "pca", "dim": 31, "fit_on": 36}}
    cache = LLMCache.wrap(model, **settings)
    plain = cache(input_ids=tokens(6, 6), use_cache=True)
    cache(input_ids=tokens(1, 6, seed=1), use_cache=True)
    again = cache(input_ids=tokens(6, 6), use_cache=True)
    assert cache.stats().hits == {"semantic": 6}
    for layer, other in zip(plain.past_key_values.layers, again.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)


# -- saved and loaded --------------------------------------------------------------------------------------------------

SETTINGS = {"tau": 0.999, "compression": {"name": "pca", "dim": 4, "fit_on": 6}}


def only_packer(cache: LLMCache) -> Packer:
    """The packer of the last layer, where states of one set of weights were stored."""
    (packers,) = inside.banks(cache).layer_banks.packers.values()
    return packers[3]


@pytest.mark.parametrize("n_before", [4, 8])
def test_a_saved_codec_goes_on(tmp_path: Path, n_before: int) -> None:
    """Saved before the fit, it is fitted after loading, on what was saved and what follows."""
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), **SETTINGS) as cache:
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


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_codec_that_does_not_fit_the_entries_is_refused(tmp_path: Path, damage: str) -> None:
    """Hashes tell damage; this is what is left to tell when they agree."""
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), **SETTINGS) as cache:
        cache(input_ids=tokens(8, 6))
        cache.save(tmp_path)
    path = next(tmp_path.glob("states-*"))
    parts = load_file(path)
    axes = parts.pop("3/codec/axes")
    if damage == "cut":
        parts["3/codec/axes"] = axes[:, :2].contiguous()
    else:
        del parts["3/codec/centre"]
    save_file(parts, path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"][path.name] = folder.sha256(path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BankFileError, match="do not fit"):
        LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path)


def test_padding_reaches_no_codec() -> None:
    cache = LLMCache.wrap(build(BARE["bert"]), tau=0.999, compression={"name": "pca", "dim": 2, "fit_on": 100})
    cache(**padded([6, 3]))
    waiting = only_packer(cache)._waiting
    assert sorted(len(rows) for _, rows in waiting.values()) == [3, 6]


def test_a_lossless_codec_may_keep_kv_as_anything() -> None:
    """Its dtype is then that of the states."""

    class Bytes(Plain):
        def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
            return {name: x.detach().contiguous().view(torch.uint8)}

        def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
            return tensors[name].view(dtype)

    packer, x = Packer(Bytes()), torch.randn(2, 4)
    entry = packer.pack({"hidden": x, "keys": x})
    assert torch.equal(packer.unpack_kv("keys", entry, x.dtype), x)
