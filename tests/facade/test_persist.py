"""Saving and loading: hits survive a restart, and nothing risky is ever served."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llmcache import BankFileError, LLMCache, StoreError, __version__, folder, persist
from llmcache.banks.stores.memory import SMALL_BYTES
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
        assert cache.stats().held_nbytes > SMALL_BYTES
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
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {
        "manifest.json",
        "requests",
        "states",
        ".llmcache.lock",
    }
    assert len(list(tmp_path.iterdir())) == 4
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


def edit_manifest(path: Path, **fields: object) -> None:
    """Replace fields of a manifest; None leaves one out."""
    manifest = path / "manifest.json"
    found = json.loads(manifest.read_text()) | fields
    manifest.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def test_another_format_is_refused_and_says_who_wrote_it(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache.save(tmp_path)
    edit_manifest(tmp_path, format=1, written_by=None)
    told = rf"format 1; this version \({__version__}\) reads formats 4 and 5 and 6 and 7 and 8"
    with pytest.raises(BankFileError, match=told):
        LLMCache.load(build(BARE["bert"]), tmp_path)
    edit_manifest(tmp_path, format=9, written_by="2.0.1", something="new")
    with pytest.raises(BankFileError, match=r"format 9, written by llmcache 2\.0\.1; this version"):
        LLMCache.load(build(BARE["bert"]), tmp_path)


def test_a_save_of_the_former_format_is_served(tmp_path: Path) -> None:
    model = build(BARE["bert"])
    with LLMCache.wrap(model) as cache:
        plain = states(cache(**padded([5])))
        cache.save(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["written_by"] == __version__
    edit_manifest(tmp_path, format=4, written_by=None, payload=None)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as cache:
        np.testing.assert_array_equal(states(cache(**padded([5]))), plain)
        assert cache.stats().hits == {"exact": 1}
        cache.save(tmp_path)  # replaces it
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("number", [4, 5, 6])
def test_entries_of_another_payload_are_refused(tmp_path: Path, number: int) -> None:
    """One vector in the place of all tokens would be put on each of them."""
    for saved, now in (("mean", "sequence"), ("sequence", "mean"), ("cls", "mean")):
        with LLMCache.wrap(build(BARE["bert"]), payload=saved) as cache:
            cache(**padded([5, 8]))
            cache.save(tmp_path)
        config = json.loads((tmp_path / "manifest.json").read_text())["config"]
        fields = {"written_by": None, "payload": None} if number == 4 else {}
        edit_manifest(tmp_path, format=number, config=config | {"payload": now}, **fields)
        if (number, saved) == (4, "cls"):
            continue  # one vector each: nothing tells them apart
        with pytest.raises(BankFileError, match=rf"saved with .*payload.* served by '{now}'"):
            LLMCache.load(build(BARE["bert"]), tmp_path)


@pytest.mark.parametrize("name", ["../states-0123456789ab.safetensors", "/etc/passwd", "states.safetensors", "\x00"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache.save(tmp_path)
    files = json.loads((tmp_path / "manifest.json").read_text())["files"]
    edit_manifest(tmp_path, files={name: next(iter(files.values()))})
    with pytest.raises(BankFileError, match="names other files"):
        LLMCache.load(build(BARE["bert"]), tmp_path)


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
    with pytest.raises(BankFileError) as loading:
        LLMCache.load(build(BARE["bert"]), tmp_path / name)
    assert "\n" not in f"{saving.value}{loading.value}"
    assert (tmp_path / "file").read_text() == "mine"


UNREADABLE = {
    "UTF-16": "{}".encode("utf-16"),
    "Latin-1": b'{"format": 5, "weights": "\xe9"}',
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "a long number": b'{"format": ' + b"1" * 5000 + b"}",
    "no JSON": b"\x00\x01",
    "a number": b"4",
    "no fields": b'{"format": 5}',
    "a format that is none": b'{"format": "five"}',
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_a_manifest_that_cannot_be_read_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(BankFileError, match=r"manifest\.json: ") as error:
        LLMCache.load(build(BARE["bert"]), tmp_path)
    assert "\n" not in str(error.value)
    with LLMCache.wrap(build(BARE["bert"])) as cache, pytest.raises(StoreError, match="not written by"):
        cache.save(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == data


@pytest.mark.parametrize("kind", ["folder", "no safetensors", "other tensors"])
def test_a_data_file_of_another_kind_is_one_line(tmp_path: Path, kind: str) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache(**padded([5]))
        cache.save(tmp_path)
    path = next(tmp_path.glob("requests-*"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "no safetensors":
        path.write_text("{}")
    else:
        save_file({"ids": torch.ones(3, dtype=torch.bfloat16)}, path)
    if kind != "folder":
        files = json.loads((tmp_path / "manifest.json").read_text())["files"]
        edit_manifest(tmp_path, files=files | {path.name: folder.sha256(path)})
    with pytest.raises(BankFileError, match=r"missing|not readable|do not fit") as error:
        LLMCache.load(build(BARE["bert"]), tmp_path)
    assert "\n" not in str(error.value)


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
    with pytest.raises(BankFileError, match="replaced 10 times while it was being read"):
        LLMCache.load(build(BARE["bert"]), tmp_path)


@pytest.mark.slow
def test_processes_that_save_at_once_or_are_killed_leave_a_whole_save(tmp_path: Path) -> None:
    """In a process of its own, which forks: three that save and one that loads, then some that are killed."""
    script = Path(__file__).with_name("saving.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    n_loads, n_killed, n_left = map(int, done.stdout.split())
    assert n_loads >= 5 and n_killed == 10
    assert n_left >= 1  # some were killed while they were writing, or this shows nothing
    assert len(list(tmp_path.iterdir())) == 4


def test_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BankFileError, match=r"cache\.save"):
        LLMCache.load(build(BARE["bert"]), tmp_path / "none")


def test_a_save_that_fails_leaves_the_earlier_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BARE["bert"])
    with LLMCache.wrap(model) as cache:
        plain = states(cache(**padded([5])))
        cache.save(tmp_path)
        cache(**padded([6]))

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("os.replace", fail)
        with pytest.raises(StoreError, match="disk full"):
            cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path) as again:
        assert again.stats().n_stored == 1
        np.testing.assert_array_equal(states(again(**padded([5]))), plain)
        assert again.stats().hits == {"exact": 1}
