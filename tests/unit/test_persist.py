"""Saving and loading: hits survive a restart, and nothing doubtful is ever served."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmcache import BankFileError, LLMCache, StoreError, persist
from llmcache.stores.memory import SMALL_BYTES
from tests.models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens

SETTINGS = [
    {},
    {"tau": 0.999},
    {"tau": 0.999, "compression": "int8"},
    {"tau": 0.999, "compression": {"name": "pca", "dim": 4, "fit_on": 5}},
    {"tau": 0.999, "compression": {"name": "pca", "dim": 4, "fit_on": 500}},
    {"tau": 0.999, "compression": {"name": "autoencoder", "dim": 4, "fit_on": 5, "epochs": 2}},
    {"tau": 0.999, "policy": {"name": "staleness", "half_life_s": 60}},
    {"tau": 0.999, "policy": {"name": "divergence", "check_rate": 0}},
    {"tau": 0.9, "fingerprint": "simhash"},
    {"tau": 0.6, "fingerprint": "minhash"},
    {"tau": 0.9, "fingerprint": {"name": "pca", "dim": 4, "fit_on": 2}},
    {"tau": 0.9, "mode": "paper"},
    {"layers": [1, 3], "payload": "sequence"},
    {"device": "model", "index": {"name": "hnsw", "buffer": 1}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_hits_survive_a_restart(tmp_path: Path, settings: dict[str, object]) -> None:
    model = build(CLASSIFIERS["bert"])
    inputs = padded([9, 4, 9, 7])
    with LLMCache.wrap(model, **settings) as cache:
        cache(**inputs)
        with cache.namespace("other"):
            cache(**inputs)
        warm = cache(**inputs).logits
        before = cache.stats()
        cache.save(tmp_path)
    with LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path) as again:
        assert again.config == cache.config
        torch.testing.assert_close(again(**inputs).logits, warm, atol=1e-6, rtol=1e-6)
        after = again.stats()
        assert after.n_hits == before.n_hits == 4
        assert (after.n_entries, after.nbytes) == (before.n_entries, before.nbytes)
        assert again.purge(namespace="other") == 4


def test_kv_survives_a_restart(tmp_path: Path) -> None:
    inputs = padded([7, 4], left=True)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = build(GENERATORS["llama"])
    plain = model.generate(**inputs, **settings)
    with LLMCache.wrap(model) as cache:
        model.generate(**inputs, **settings)
        cache.save(tmp_path)
    again = build(GENERATORS["llama"])
    with LLMCache.load(again, tmp_path) as cache:
        assert torch.equal(again.generate(**inputs, **settings), plain)
        assert cache.stats().hits == {"exact": 2}


def test_what_was_loaded_does_not_lie_in_the_file(tmp_path: Path) -> None:
    model = build(BARE["gpt2"])
    inputs = {"input_ids": tokens(1, 60)}
    with LLMCache.wrap(model) as cache:
        plain = cache(**inputs, use_cache=True).last_hidden_state
        cache.save(tmp_path)
    with LLMCache.load(build(BARE["gpt2"]), tmp_path) as cache:
        assert cache.stats().nbytes > SMALL_BYTES
        for path in tmp_path.glob("*.safetensors"):
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
        torch.testing.assert_close(cache(**inputs, use_cache=True).last_hidden_state, plain)
        assert cache.stats().hits == {"exact": 1}


def test_an_empty_cache_can_be_saved(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"]), tau=0.9) as cache:
        cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as cache:
        assert cache.stats().n_stored == 0


def test_saving_again_replaces_and_leaves_no_litter(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache(**padded([5]))
        cache.save(tmp_path)
        cache(**padded([6], seed=9))
        cache.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    with LLMCache.load(build(BARE["bert"]), tmp_path) as cache:
        assert cache.stats().n_stored == 2


def test_other_weights_are_refused_and_the_model_is_left_alone(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache(**padded([5]))
        cache.save(tmp_path)
    other = build(BARE["bert"], seed=1)
    with pytest.raises(BankFileError, match="other weights"):
        LLMCache.load(other, tmp_path)
    LLMCache.wrap(other).unwrap()


def test_another_architecture_is_refused_for_its_weights(tmp_path: Path) -> None:
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), tau=0.9) as cache:
        cache.save(tmp_path)
    with pytest.raises(BankFileError, match="other weights"):
        LLMCache.load(build(GENERATORS["gpt2"]), tmp_path)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"]), tokenizer=SimpleNamespace(all_special_ids=[0, 7])) as cache:
        cache.save(tmp_path)
    with pytest.raises(BankFileError, match="special tokens"):
        LLMCache.load(build(BARE["bert"]), tmp_path)
    LLMCache.load(build(BARE["bert"]), tmp_path, tokenizer=SimpleNamespace(all_special_ids=[7, 0])).unwrap()


def test_entries_of_earlier_weights_are_not_saved(tmp_path: Path) -> None:
    model = build(BARE["bert"])
    with LLMCache.wrap(model) as cache:
        cache(**padded([5]))
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.add_(1.0)
        cache(**padded([6]))
        cache.save(tmp_path)
        with LLMCache.load(build_like(model), tmp_path) as again:
            assert again.stats().n_stored == 1


def build_like(model: torch.nn.Module) -> torch.nn.Module:
    copy = build(BARE["bert"])
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("part", ["states", "requests"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_file_is_refused(tmp_path: Path, part: str, damage: str) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache(**padded([5, 8]))
        cache.save(tmp_path)
    path = next(tmp_path.glob(f"{part}-*"))
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.unlink()
    with pytest.raises(BankFileError, match=r"missing|cut short"):
        LLMCache.load(build(BARE["bert"]), tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_bad_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BankFileError, match="manifest"):
        LLMCache.load(build(BARE["bert"]), tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache.save(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(BankFileError, match="format 1"):
        LLMCache.load(build(BARE["bert"]), tmp_path)


def test_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BankFileError, match=r"cache\.save"):
        LLMCache.load(build(BARE["bert"]), tmp_path / "none")


def test_a_save_that_fails_leaves_the_earlier_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BARE["bert"])
    with LLMCache.wrap(model) as cache:
        plain = states(cache(**padded([5])))
        cache.save(tmp_path)
        cache(**padded([6]))

        def fail(path: Path, text: str) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(persist, "_replace", fail)
        with pytest.raises(StoreError, match="disk full"):
            cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as again:
        assert again.stats().n_stored == 1
        np.testing.assert_array_equal(states(again(**padded([5]))), plain)
        assert again.stats().hits == {"exact": 1}
