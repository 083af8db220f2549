"""The disk store: budget, damaged files, killed and concurrent processes, refused folders, a full disk."""

import os
import resource
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache import ConfigError, StoreError
from llmcache.memory.stores import STORES, Put, disk
from llmcache.memory.stores.base import FORMAT
from llmcache.memory.stores.disk import LARGE_BYTES, DiskStore
from llmcache.support.registry import Component
from llmcache.testing import check_store
from tests.fixtures import Patch
from tests.forks import in_child, needs_fork
from tests.stores import values
from tests.stores.values import check_readers, get, held, key

SMALL, LARGE = 1_000, LARGE_BYTES + 1
put, value = partial(values.put, size=LARGE), partial(values.value, size=LARGE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    store = DiskStore(str(folder))
    yield store
    store.close()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "values").iterdir())


def opened(folder: Path, **options: Any) -> Any:
    """Open the store as a setting does."""
    return Component(name="disk", folder=str(folder), **options).build(STORES)


def test_it_keeps_the_rules(folder: Path) -> None:
    check_store(lambda: DiskStore(str(folder)))
    assert files(folder) == []


@pytest.mark.parametrize("dropped_by", ["purge", "forget"])
def test_nothing_from_before_a_purge_is_served_after_it(folder: Path, dropped_by: str) -> None:
    check_readers(lambda: DiskStore(str(folder)), dropped_by, 10)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_was_used_longest_ago_leaves_over_the_budget(folder: Path, size: int) -> None:
    store = DiskStore(str(folder), max_bytes=4 * size)
    put(store, "a", "b", size=size)
    put(store, "c", "d", size=size)
    get(store, "b")
    put(store, "e", size=size)
    assert held(store, *"abcde") == [*"bcde"]
    put(store, "f", "g", size=size)  # of the keys just read, the first count as used last
    assert held(store, *"abcdefg") == [*"bcfg"]
    put(store, "larger", size=4 * size + 1)
    assert held(store, "larger") == []
    assert (store.stats().nbytes, store.stats().n_evicted) == (4 * size, 3)
    assert len(files(folder)) == 4 * (size == LARGE)
    store.close()


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
def test_files_are_their_owners_alone(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    for _ in range(2):  # the second time, over an index that an earlier version made readable
        store = DiskStore(str(folder))
        put(store, "a", "b")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
        assert {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", ".lock"} < {*modes}
        assert {*modes.values()} == {0o600}
        store.close()
        (folder / "index.sqlite").chmod(0o644)


# -- a folder that a stranger prepared ---------------------------------------------------------------------------------


def edit_index(folder: Path, statement: str, *values: object) -> None:
    """Change the index as anyone who may write to the folder can."""
    connection = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
    connection.execute(statement, values)
    connection.close()


NAMES = ["../../victim", "{}/victim", "A" * 32, "0" * 33, "0" * 32 + "\n", b"../../victim", 7]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_row_that_names_another_file_is_neither_read_nor_removed(tmp_path: Path, folder: Path, name: object) -> None:
    name = name.format(tmp_path) if isinstance(name, str) else name
    store = DiskStore(str(folder))
    put(store, "a", "b", "c")
    victim = folder / "values" / (name.decode() if isinstance(name, bytes) else f"{name}")
    victim.write_bytes(value("victim"))
    edit_index(folder, "UPDATE held SET file = ? WHERE key = ?", name, key("a").digest)
    assert held(store, "a", "b") == ["b"] and store.absent([key("a")]) == [key("a")]
    store.forget([key("a")])
    edit_index(folder, "UPDATE held SET file = ?, number = 0 WHERE key = ?", name, key("b").digest)
    store.close()
    store = DiskStore(str(folder))  # drops rows of earlier numbers, and files without a row
    assert held(store, "b", "c") == ["c"] and victim.read_bytes() == value("victim")
    put(store, "b")
    assert held(store, "b") == ["b"]
    store.close()


def test_links_and_files_of_others_among_the_values_are_left_alone(tmp_path: Path, folder: Path) -> None:
    store = DiskStore(str(folder))
    put(store, "a")
    (path,) = files(folder)
    others = [tmp_path / "target", folder / "values" / "notes.txt", folder / "values" / "thesis.part"]
    for other in others:
        other.write_bytes(value("a"))
        os.utime(other, (0, 0))
    path.unlink()
    path.symlink_to(others[0])
    assert held(store, "a") == []
    put(store, "a")
    assert held(store, "a") == ["a"]
    store.close()
    DiskStore(str(folder)).close()
    assert all(other.read_bytes() == value("a") for other in others)


@pytest.mark.parametrize("name", ["values", "index.sqlite", "index.sqlite-wal", ".lock"])
def test_a_link_in_the_place_of_a_part_is_refused(tmp_path: Path, folder: Path, name: str) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / ("0" * 32)).write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "target" / ("" if name == "values" else "0" * 32))
    with pytest.raises(ConfigError, match=rf"a link \({name}\).*folder of its own"):
        opened(folder)
    assert (tmp_path / "target" / ("0" * 32)).read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
@pytest.mark.parametrize(("part", "mode"), [("", 0o775), ("", 0o757), ("values", 0o1777), ("values", 0o2770)])
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, part: str, mode: int) -> None:
    DiskStore(str(folder)).close()
    (folder / part).chmod(mode)
    with pytest.raises(ConfigError, match=rf"{folder / part}: others may write.*chmod go-w") as refusal:
        opened(folder)
    assert "\n" not in str(refusal.value)
    (folder / part).chmod(0o755)
    opened(folder).close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("part", ["", "values"])
def test_a_folder_of_another_user_is_refused(folder: Path, part: str) -> None:
    DiskStore(str(folder)).close()
    os.chown(folder / part, 12_345, -1)
    with pytest.raises(ConfigError, match=rf"{folder / part}: belongs to another user.*chown"):
        opened(folder)


def test_a_file_that_is_gone_or_cut_short_holds_no_value_and_may_be_put_again(store: DiskStore, folder: Path) -> None:
    put(store, "a", "b", "c")
    gone, short, emptied = files(folder)
    gone.unlink()
    os.truncate(short, LARGE // 2)
    os.truncate(emptied, 0)
    found = get(store, "a", "b", "c")
    assert sorted((len(one) for one in found if one is not None), reverse=True) == [LARGE // 2, 0]  # seals refuse both
    assert store.absent([key(name) for name in "abc"]) == [key(name) for name in "abc"]
    put(store, "a", "b", "c")
    assert get(store, *"abc") == [value(name) for name in "abc"]
    assert (store.stats().n_values, len(files(folder))) == (3, 3)


def test_who_opens_it_removes_what_killed_processes_left(store: DiskStore, folder: Path) -> None:
    put(store, "a")
    orphan, new, old = (folder / "values" / name for name in ("0" * 32, "1" * 32 + ".part", "2" * 32 + ".part"))
    for path in (orphan, new, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    DiskStore(str(folder)).close()
    assert not orphan.exists() and not old.exists()
    assert new.exists()  # another process may still write it
    assert held(store, "a") == ["a"]
    edit_index(folder, "UPDATE totals SET nbytes = ?", 1 << 60)  # wrong totals keep no process from opening it
    DiskStore(str(folder)).close()


def test_nothing_of_what_was_purged_is_left_in_the_folder_and_what_was_read_outlives_it(
    store: DiskStore, folder: Path
) -> None:
    marks = [f"private {i} ".encode() * n for i, n in enumerate((50, 5_000))]
    (number,), since = store.numbers(["a"]), store.purges(None).cursor
    store.put_many([Put(key(i), mark, number, since) for i, mark in enumerate(marks)])
    assert any(b"private 0" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    read = store.get_many([key(0), key(1)], time.monotonic() + 60)
    assert store.purge("a") == 2
    store.close()
    assert not any(b"private" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert [one is not None and bytes(one) for one in read] == marks


@needs_fork
def test_a_process_that_is_forked_while_a_write_does_not_end_has_no_store(store: DiskStore) -> None:
    put(store, "a")
    begun, may_end = threading.Event(), threading.Event()

    def write() -> None:
        with store._index.writing():
            begun.set()
            may_end.wait(20)

    def refused() -> str:
        with pytest.raises(StoreError) as caught:
            held(store, "a")
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write)
        begun.wait(20)
        told = in_child(refused)
        may_end.set()
    assert "in use while the process was forked" in told
    put(store, "b")
    assert held(store, "a", "b") == ["a", "b"]


#: By the refusal: what makes of a path, or of a store there, a folder that is refused.
REFUSED_PATHS: dict[str, Callable[[Path], object]] = {
    "cannot be used": lambda path: path.write_text(""),
    r"something else \(thesis\)": lambda path: (path / "thesis").mkdir(parents=True),
    "cannot be opened: the store's index: unable to": lambda path: (path / "index.sqlite").mkdir(parents=True),
}
REFUSED_STORES = {
    "another application": lambda path: edit_index(path, "PRAGMA application_id = 7"),
    f"in format 2, .*reads {FORMAT}": lambda path: edit_index(path, "PRAGMA user_version = 2"),
}


@pytest.mark.parametrize("told", [*REFUSED_PATHS, *REFUSED_STORES, r"on a network \(nfs4\)"])
def test_a_folder_that_is_no_store_is_refused_with_the_cure(folder: Path, told: str, monkeypatch: Patch) -> None:
    if told in REFUSED_PATHS:
        REFUSED_PATHS[told](folder)
    elif told in REFUSED_STORES:
        DiskStore(str(folder)).close()
        REFUSED_STORES[told](folder)
    else:
        monkeypatch.setattr(disk, "_file_system", lambda folder: "nfs4")
    with pytest.raises(ConfigError, match=told):
        opened(folder)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_bytes": "1GB"}, {"size": 1}])
def test_wrong_options_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="store: disk"):
        opened(folder, **options)


def fill(folder: Path) -> list[object]:
    """Put values until files, then the index, reach a limit; return what failed and what is held, then and after."""
    seen: list[object] = []
    store = DiskStore(str(folder))
    put(store, "a")
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    for size in (300_000, 30_000):  # a file, and what goes to the index until that is full
        try:
            for i in range(30):
                put(store, f"{size}.{i}", size=size)
        except StoreError:
            seen.append(size)
    seen += [held(store, "a", "300000.0"), [path.suffix for path in files(folder)]]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    put(store, "b")
    return [*seen, held(store, "a", "b")]


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_is_told_and_what_is_held_stays(folder: Path) -> None:
    assert in_child(fill, folder) == [300_000, 30_000, ["a"], [""], ["a", "b"]]


def test_a_thousand_values_need_no_file_descriptors(store: DiskStore) -> None:
    put(store, *range(300))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        found = store.get_many([key(i) for i in range(300)], time.monotonic() + 60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(one is not None and torch.frombuffer(one, dtype=torch.uint8).numel() == LARGE for one in found)
