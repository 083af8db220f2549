"""A folder of saves: whatever fails, the old or the new version is whole; foreign files stay untouched."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmcache import StoreError
from llmcache.support import folder
from tests.fixtures import Patch
from tests.saves import Died, failing, names

OURS = 4  # files of a version: two of data, manifest, lock


def put(path: Path, number: int) -> None:
    """Save version `number`."""
    parts = {part: {"number": torch.full((1000,), number)} for part in ("requests", "states")}
    with folder.locked(path):
        folder.replace(path, parts, lambda files: json.dumps({"format": 5, "weights": str(number), "files": files}))


def get(path: Path) -> int:
    """Return the version in the folder; assert that it is whole."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert {name.split("-")[0] for name in manifest["files"]} == {"requests", "states"}
    for name, sha in manifest["files"].items():
        assert folder.sha256(path / name) == sha
        assert set(load_file(path / name)["number"].tolist()) == {int(manifest["weights"])}
    return int(manifest["weights"])


@pytest.fixture
def strangers(tmp_path: Path) -> Callable[[], None]:
    """Writes the user's own files, named much like ours, beside a save; returns a check that they are unchanged."""
    texts = {
        "states-mine.safetensors": "a",
        "states-0123456789ab.safetensors": "b",
        "requests-0123456789ab.safetensors": "c",
        "manifest.tmp": "d",
        "manifest.json.tmp": "e",
        ".tmpabcdef": "f",
        ".llmcache-0123456789ab/manifest.json": "g",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def check() -> None:
        assert {name: (tmp_path / name).read_text() for name in texts} == texts
        assert len(names(tmp_path)) == len(texts) + OURS, names(tmp_path)

    return check


@pytest.mark.parametrize("forever", [False, True], ids=["fails", "dies"])
def test_whatever_step_fails_one_version_is_whole(
    tmp_path: Path, strangers: Callable[[], None], monkeypatch: Patch, forever: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)  # a step that may fail, but takes no time
    put(tmp_path, 0)
    number, seen = 0, set()
    for at in range(1, 100):
        with failing(monkeypatch, at, Died() if forever else OSError("disk full"), forever) as done:
            try:
                put(tmp_path, number + 1)
                has_failed = False
            except (Died, OSError):
                has_failed = True
        if done[0] < at:
            break
        found = get(tmp_path)
        assert found in (number, number + 1)
        seen.add((has_failed, found - number))
        put(tmp_path, number := number + 2)
        assert get(tmp_path) == number
        strangers()
    assert at > 15
    assert seen == ({(True, 0), (True, 1)} if forever else {(True, 0), (False, 1)})


def test_a_save_that_fails_cleans_up_at_once(tmp_path: Path, strangers: Callable[[], None]) -> None:
    put(tmp_path, 1)

    def describe(files: dict[str, str]) -> str:
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"), folder.locked(tmp_path):
        folder.replace(tmp_path, {"requests": {"x": torch.ones(1)}, "states": {}}, describe)
    strangers()
    assert get(tmp_path) == 1


#: Manifests that nobody can read are in `test_save`.
MANIFEST = json.dumps({"format": 4, "weights": "", "files": {"../states-0123456789ab.safetensors": "0" * 64}})
JOURNALS = ["mine", '{"names": []}', '{"mark": "llmcache.journal"}', '{"mark": "llmcache.journal", "names": ["../x"]}']
FOREIGN = [("manifest.json", MANIFEST), *((".llmcache.journal", text) for text in JOURNALS)]


@pytest.mark.parametrize(("name", "text"), FOREIGN, ids=range(len(FOREIGN)))
def test_files_of_somebody_else_are_left_alone(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StoreError, match=rf"{name}: not written by cache\.save.*another folder"):
        put(tmp_path, 1)
    assert names(tmp_path) <= {name, ".llmcache.lock"}
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "link") for name in ("manifest.json", ".llmcache.lock", ".llmcache.journal")),
        ("manifest.json", "dangling"),
        (".llmcache.lock", "folder"),
    ],
)
def test_what_is_no_file_is_left_alone(tmp_path: Path, name: str, kind: str) -> None:
    path, target = tmp_path / "save", tmp_path / "target"
    put(path, 1)
    (path / name).unlink(missing_ok=True)
    if kind == "folder":
        (path / name).mkdir()
    else:
        (path / name).symlink_to(target)
    if kind == "link":
        target.write_text("mine")
    with pytest.raises(StoreError, match=r"not written by cache\.save"):
        put(path, 2)
    assert len(names(path)) == OURS + (name == ".llmcache.journal")
    assert target.exists() == (kind == "link") and (kind != "link" or target.read_text() == "mine")


def test_a_folder_may_be_a_link_and_its_data_files_are_not_followed(tmp_path: Path) -> None:
    real, link, elsewhere = tmp_path / "real", tmp_path / "link", tmp_path / "elsewhere"
    real.mkdir()
    link.symlink_to(real)
    put(link, 1)
    (real / ".llmcache.journal").write_text("")  # cut short before it began
    data = next(real.glob("states-*"))
    data.rename(elsewhere)
    data.symlink_to(elsewhere)
    put(link, 2)
    assert link.is_symlink() and get(real) == 2
    assert data.is_symlink() and set(load_file(elsewhere)["number"].tolist()) == {1}


def test_who_waits_too_long_is_told(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(folder, "_PATIENCE_S", 0.0)
    with folder.locked(tmp_path), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put, tmp_path, 1)
        with pytest.raises(StoreError, match="another save there takes over"):
            waiting.result()
    put(tmp_path, 2)
    assert get(tmp_path) == 2
