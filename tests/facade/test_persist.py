"""Saving and loading: hits survive a restart, and nothing risky is ever served."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llmcache import BankFileError, LLMCache, StoreError, __version__, persist
from llmcache.banks.memory import SMALL_BYTES
from llmcache.matching import fingerprint_index
from llmcache.index import AutoIndex
from tests.saves import accept, edit_manifest, read_manifest
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens

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
    {"device": "model", "index": "hnsw"},
]


@pytest.mark.slow
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


@pytest.mark.parametrize(("at_once", "expected"), [(2, [2, 2, 1]), (4096, [5])])
def test_requests_enter_the_index_together_when_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, expected: list[int]
) -> None:
    inputs = padded([9, 4, 9, 7, 5])
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), tau=0.999, exact=False) as cache:
        cache(**inputs)
        cache.save(tmp_path)
    added: list[int] = []
    add = AutoIndex.add
    monkeypatch.setattr(fingerprint_index, "_AT_ONCE", at_once)
    monkeypatch.setattr(AutoIndex, "add", lambda index, ids, x: (added.append(len(ids)), add(index, ids, x))[1])
    with LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path) as again:
        assert added == expected
        again(**inputs)
        assert again.stats().hits == {"semantic": 5}


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
        assert cache.stats().held_nbytes > SMALL_BYTES
        for path in tmp_path.glob("*.safetensors"):
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
        torch.testing.assert_close(cache(**inputs, use_cache=True).last_hidden_state, plain)
        assert cache.stats().hits == {"exact": 1}


def save(path: Path, **settings: Any) -> None:
    """Save a cache of one request, `padded([5])`, of a bare BERT."""
    with LLMCache.wrap(build(BARE["bert"]), **settings) as cache:
        cache(**padded([5]))
        cache.save(path)


def refused(path: Path, match: str) -> None:
    """A save is not loaded, the error is one line, and the model is left as it was."""
    model = build(BARE["bert"])
    with pytest.raises(BankFileError, match=match) as error:
        LLMCache.load(model, path)
    assert "\n" not in str(error.value)
    LLMCache.wrap(model).unwrap()


def test_an_empty_cache_can_be_saved(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"]), tau=0.9) as cache:
        cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as cache:
        assert cache.stats().n_stored == 0


def test_saving_again_replaces_and_leaves_no_litter(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        for length in (5, 6):
            cache(**padded([length]))
            cache.save(tmp_path)
    kinds = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert kinds == [".llmcache.lock", "manifest.json", "requests", "states"]
    with LLMCache.load(build(BARE["bert"]), tmp_path) as cache:
        assert cache.stats().n_stored == 2


@pytest.mark.parametrize("make", [CLASSIFIERS["bert"], GENERATORS["gpt2"], lambda: build(BARE["bert"], seed=1)])
def test_another_model_is_refused_for_its_weights(tmp_path: Path, make: Callable[[], torch.nn.Module]) -> None:
    with LLMCache.wrap(make()) as cache:
        cache.save(tmp_path)
    refused(tmp_path, "other weights")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, tokenizer=SimpleNamespace(all_special_ids=[0, 7]))
    refused(tmp_path, "special tokens")
    LLMCache.load(build(BARE["bert"]), tmp_path, tokenizer=SimpleNamespace(all_special_ids=[7, 0])).unwrap()


def test_entries_of_earlier_weights_are_not_saved(tmp_path: Path) -> None:
    model = build(BARE["bert"])
    with LLMCache.wrap(model) as cache:
        cache(**padded([5]))
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.add_(1.0)
        cache(**padded([6]))
        cache.save(tmp_path)
    with LLMCache.load(copy.deepcopy(model), tmp_path) as again:
        assert again.stats().n_stored == 1


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flip": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "gone": lambda path: path.unlink(),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "no safetensors": lambda path: (path.write_text("{}"), accept(path)),
    "other tensors": lambda path: (save_file({"ids": torch.ones(3, dtype=torch.bfloat16)}, path), accept(path)),
}
TOLD = {"no safetensors": "not readable", "other tensors": "do not fit"}


@pytest.mark.parametrize(
    ("part", "damage"), [*(("requests", name) for name in DAMAGE), *(("states", name) for name in list(DAMAGE)[:-1])]
)
def test_a_damaged_file_is_refused(tmp_path: Path, part: str, damage: str) -> None:
    save(tmp_path)
    DAMAGE[damage](next(tmp_path.glob(f"{part}-*")))
    refused(tmp_path, TOLD.get(damage, "missing|cut short"))


def test_another_format_is_refused_and_says_who_wrote_it(tmp_path: Path) -> None:
    save(tmp_path)
    edit_manifest(tmp_path, format=1, written_by=None)
    refused(tmp_path, rf"format 1; this version \({__version__}\) reads format 10: save the cache again")
    edit_manifest(tmp_path, format=8, written_by="0.1.0")
    refused(tmp_path, r"format 8, written by llmcache 0\.1\.0; .*save the cache again")
    edit_manifest(tmp_path, format=11, written_by="2.0.1", something="new")
    refused(tmp_path, r"format 11, written by llmcache 2\.0\.1; this version")


def test_a_save_of_another_format_is_replaced_by_the_next(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        plain = states(cache(**padded([5])))
        cache.save(tmp_path)
        assert read_manifest(tmp_path)["written_by"] == __version__
        edit_manifest(tmp_path, format=4, written_by=None, payload=None)
        cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as cache:
        np.testing.assert_array_equal(states(cache(**padded([5]))), plain)
        assert cache.stats().hits == {"exact": 1}
    assert len(list(tmp_path.iterdir())) == 4


def test_entries_of_another_payload_are_refused(tmp_path: Path) -> None:
    """One vector in the place of all tokens would be put on each of them."""
    for saved, now in (("mean", "sequence"), ("sequence", "mean"), ("cls", "mean")):
        save(tmp_path, payload=saved)
        edit_manifest(tmp_path, config=read_manifest(tmp_path)["config"] | {"payload": now})
        refused(tmp_path, rf"saved with payload '{saved}'.* served by '{now}'")


@pytest.mark.parametrize("name", ["../states-0123456789ab.safetensors", "/etc/passwd", "states.safetensors", "\x00"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    files = read_manifest(tmp_path)["files"]
    edit_manifest(tmp_path, files={name: next(iter(files.values()))})
    refused(tmp_path, "names other files")


BAD_PATHS = {
    "too long": "x" * 256,
    "too long within": "y/" + "x" * 256 + "/z",
    "with NUL": "a\0b",
    "a file": "file",
    "within a file": "file/folder",
    "a link to nothing": "link",
}


@pytest.mark.parametrize("name", BAD_PATHS.values(), ids=BAD_PATHS)
def test_a_path_that_cannot_be_a_folder_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with LLMCache.wrap(build(BARE["bert"])) as cache, pytest.raises(StoreError, match="could not save") as saving:
        cache.save(tmp_path / name)
    assert "\n" not in str(saving.value)
    refused(tmp_path / name, r"manifest|cache\.save")
    refused(tmp_path / "nothing", r"cache\.save")
    assert (tmp_path / "file").read_text() == "mine"


UNREADABLE = {
    "UTF-16": "{}".encode("utf-16"),
    "Latin-1": b'{"format": 5, "weights": "\xe9"}',
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "a long number": b'{"format": ' + b"1" * 5000 + b"}",
    "empty": b"",
    "cut": b"{",
    "a list": b"[]",
    "no JSON": b"\x00\x01",
    "a number": b"4",
    "no fields": b'{"format": 5}',
    "no fields of an old format": b'{"format": 1}',
    "no fields of a later format": b'{"format": 99}',
    "a format that is none": b'{"format": "five"}',
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_a_manifest_that_cannot_be_read_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    refused(tmp_path, r"manifest\.json: ")
    with LLMCache.wrap(build(BARE["bert"])) as cache, pytest.raises(StoreError, match="not written by"):
        cache.save(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == data


@pytest.mark.slow
def test_a_save_that_is_replaced_while_it_is_read_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other save comes between the manifest and the files that it names."""
    cache = LLMCache.wrap(build(BARE["bert"]))
    cache(**padded([5]))
    cache.save(tmp_path)
    saves = iter([True, True, False])
    read_checked = persist._read_checked

    def read_late(path: Path, sha: str) -> object:
        if path.name.startswith("states") and next(saves):
            cache(**padded([6], seed=cache.stats().n_stored))
            cache.save(tmp_path)
        return read_checked(path, sha)

    monkeypatch.setattr(persist, "_read_checked", read_late)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as again:
        assert again.stats().n_stored == 3
    monkeypatch.setattr(persist, "_read_checked", lambda *_: cache.save(tmp_path) or read_checked(*_))
    refused(tmp_path, "replaced 10 times while it was being read")


@pytest.mark.slow
def test_processes_that_save_at_once_or_are_killed_leave_a_whole_save(tmp_path: Path) -> None:
    """In a process of its own, which forks: three that save and one that loads, then some that are killed."""
    script = Path(__file__).with_name("saving.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    n_killed, n_left = map(int, done.stdout.split())
    assert n_killed == 10
    assert n_left >= 1  # some were killed while they were writing, or this shows nothing
    assert len(list(tmp_path.iterdir())) == 4
