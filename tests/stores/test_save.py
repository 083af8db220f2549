"""Saving and loading: hits survive a restart; a save that does not fit is refused."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from llmcache import BankFileError, CacheConfig, ConfigError, LLMCache, StoreError, UnfitBankError, __version__
from llmcache.calls import save
from tests.contract.judge import check_same
from tests.fixtures import Patch
from tests.saves import accept, edit_manifest
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded

MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": BARE["bert"],
    "classifier": CLASSIFIERS["bert"],
    "gpt2": BARE["gpt2"],
    "llama": GENERATORS["llama"],
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in MODELS),
        ("bert", {"payload": "sequence", "policy": "s3_fifo", "device": "model"}),
    ],
)
def test_hits_survive_a_restart(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """The first call hits too, in each namespace, with the same padding, even after the files are overwritten."""
    inputs, names = padded([19, 4, 19, 7]), ("default", "other")
    with LLMCache.wrap(build(MODELS[kind]), **settings) as cache:
        for name in names:
            with cache.namespace(name):
                expected = cache(**inputs)
        before = cache.stats()
        cache.save(tmp_path)
    with LLMCache.load(build(MODELS[kind]), tmp_path) as again:
        assert again.config == cache.config
        for path in tmp_path.glob("*.safetensors"):
            path.write_bytes(b"\xff" * path.stat().st_size)
        for name in names:
            with again.namespace(name):
                check_same(again(**inputs)[0], expected[0])
        after = again.stats()
        assert after.n_hits == 8 and (after.n_stored, after.held_nbytes) == (before.n_stored, before.held_nbytes)
        assert again.purge(namespace="other") == before.n_stored // 2


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The save of a bare BERT's cache with one request; copy it."""
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache(**padded([5]))
        cache.save(folder := tmp_path_factory.mktemp("known"))
    return folder


@pytest.fixture
def folder(known: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(known, tmp_path / "folder"))


CURES = "save the cache again|another folder|a folder that cache.save\\(\\) wrote"


def refused(path: Path, match: str, kind: type[BankFileError] = BankFileError) -> None:
    """Assert that loading fails with a one-line error that names a cure, and leaves the model unwrapped."""
    model = build(BARE["bert"])
    with pytest.raises(kind, match=match) as error:
        LLMCache.load(model, path)
    assert "\n" not in str(error.value) and re.search(CURES, str(error.value))
    LLMCache.wrap(model).unwrap()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "changed since": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "missing": lambda path: path.unlink(),
    "missing; the": lambda path: (path.unlink(), path.mkdir()),
    "not readable": lambda path: (path.write_text("{}"), accept(path)),
    "do not fit": lambda path: (save_file({"ids": torch.ones(3, dtype=torch.bfloat16)}, path), accept(path)),
}


@pytest.mark.parametrize("told", DAMAGE)
def test_a_damaged_file_is_refused(folder: Path, told: str) -> None:
    DAMAGE[told](next(folder.glob("bank-*")))
    refused(folder, told)


@pytest.mark.parametrize(
    ("told", "fields"),
    [
        (rf"format 1; this version \({__version__}\) reads format {save.FORMAT}", {"format": 1, "written_by": None}),
        (r"format 99, written by llmcache 2\.0\.1; this", {"format": 99, "written_by": "2.0.1", "something": "new"}),
        ("weights: Field required", {"config": {}, "weights": None}),
        ("special tokens", {"special_ids": [0, 7]}),
        *((f"saved with payload '{one}'.* served by 'sequence'", {"payload": one}) for one in ("mean", "cls")),
        ("known: ", {"config": {"nosuch": 1}}),
        ("or equal to 1", {"config": {"max_bytes": -1}}),
        ("register", {"config": {"policy": "no"}}),
        *(
            ("names files not written by", {"files": {name: "0" * 64}})
            for name in ("../bank-0123456789ab.safetensors", "/etc/passwd", "bank.safetensors", "\x00")
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder: Path, told: str, fields: dict[str, Any]) -> None:
    edit_manifest(folder, **fields)
    refused(folder, told, BankFileError if "files" in fields else UnfitBankError)


def test_saving_again_replaces_and_leaves_no_litter(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"]), tokenizer=SimpleNamespace(all_special_ids=[0, 7])) as cache:
        for length in (5, 6):
            cache.save(tmp_path)
            cache(**padded([length]))
            edit_manifest(tmp_path, format=99)  # as by another version
        cache.save(tmp_path)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == [".llmcache.lock", "bank", "manifest.json"]
    with LLMCache.load(build(BARE["bert"]), tmp_path, tokenizer=SimpleNamespace(all_special_ids=[7, 0])) as cache:
        assert cache.stats().n_stored == 2


@pytest.mark.parametrize("name", ["x" * 256, "a\0b", "file", "file/folder", "link"])
def test_a_path_that_cannot_be_a_folder_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with LLMCache.wrap(build(BARE["bert"])) as cache, pytest.raises(StoreError, match="could not save") as saving:
        cache.save(tmp_path / name)
    assert "\n" not in str(saving.value)
    refused(tmp_path / name, r"manifest|cache\.save")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "data",
    [
        "{}".encode("utf-16"),
        b'{"format": 11, "weights": "\xe9"}',
        b"[" * 100_000,
        b'{"format": ' + b"1" * 5000 + b"}",
        b"",
        b"[]",
        b'{"format": 11}',
        b'{"format": "five"}',
        b'{"name": "an app", "manifest_version": 3}',
    ],
    ids=range(9),
)
def test_a_manifest_that_cannot_be_read_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    refused(tmp_path, r"manifest\.json: ")
    with LLMCache.wrap(build(BARE["bert"])) as cache, pytest.raises(StoreError, match="not written by"):
        cache.save(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == data


def test_settings_may_change_where_they_say_nothing_of_what_is_kept(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"]), max_entries=10) as cache:
        for length in (5, 6, 7):
            cache(**padded([length]))
        cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path, config={"max_entries": 2, "policy": "fifo"}) as cache:
        assert cache.stats().n_stored == 2
    with pytest.raises(ConfigError, match=r"prefix is {'block': 4}, and was {'block': 16}\. Leave the settings out"):
        LLMCache.load(build(BARE["bert"]), tmp_path, config={"prefix": {"block": 4}})


@pytest.mark.parametrize(
    ("saved", "given", "told"),
    [(10, 11, ""), (10, None, ""), (10, 9, "max_entries is 9, and was 10"), (None, 10, "was None")],
)
def test_a_calibration_keeps_the_room_that_it_needs(saved: int | None, given: int | None, told: str) -> None:
    before, now = ({} if n is None else {"max_entries": n} for n in (saved, given))
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        assert save.choose_settings(before, CacheConfig.make(now), True, "folder") == CacheConfig.make(now)


@pytest.mark.slow
def test_a_save_that_is_replaced_while_it_is_read_is_read_anew(tmp_path: Path, monkeypatch: Patch) -> None:
    """The second save happens after the manifest is read, before its files are."""
    cache = LLMCache.wrap(build(BARE["bert"]))
    cache(**padded([5]))
    cache.save(tmp_path)
    saves, read_checked = iter([True, False]), save._read_checked

    def read_late(path: Path, sha: str) -> Any:
        if next(saves):
            cache(**padded([6], seed=cache.stats().n_stored))
            cache.save(tmp_path)
        return read_checked(path, sha)

    monkeypatch.setattr(save, "_read_checked", read_late)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as again:
        assert again.stats().n_stored == 2
    # A folder that cannot be locked and is replaced at each attempt.
    monkeypatch.setattr(os, "access", lambda *of: False)
    monkeypatch.setattr(save, "_read_checked", lambda *of: cache.save(tmp_path) or read_checked(*of))
    refused(tmp_path, "missing; the save is incomplete")
