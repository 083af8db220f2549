"""Caches on one store share a calibration: they publish it, take it up, decide alike, and end it together."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmcache import LLMCache
from llmcache.reuse.calibration import sharing
from tests.contract.streams import batched, classifier, requests

STREAM = requests(60, seed=31)[0]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets reads be late on a busy machine."""
    monkeypatch.setattr(sharing, "_CHECK_TIMEOUT_S", 30.0)


def wrap(folder: Path, **settings: Any) -> LLMCache:
    given = {"max_drop": 0.05, "auto_bypass": False, "audit": 0, "share_calibration": True, **settings}
    return LLMCache.wrap(classifier(), store={"name": "disk", "folder": str(folder)}, **given)


def begun(cache: LLMCache) -> LLMCache:
    """Ask one request, so that the cache takes up the published calibration."""
    cache(input_ids=requests(1, seed=77)[0])
    cache.drain()
    return cache


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the calibration of a closed cache."""
    folder = tmp_path_factory.mktemp("published") / "store"
    with wrap(folder) as cache:
        cache.calibrate(batched(requests(300)[0]))
        cache.drain()
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A copy of the published store."""
    return shutil.copytree(published, tmp_path / "store")


def told(cache: LLMCache) -> list[tuple[str | None, float | None, str | None]]:
    """Ask the stream; return rung, risk and source of each request."""
    found = []
    for row in STREAM:
        cache(input_ids=row[None])
        found.append((cache.last[0].rung, cache.last[0].risk, cache.last[0].source))
    return found


def test_what_one_has_calibrated_all_of_its_settings_decide_alike(folder: Path) -> None:
    """A cache takes up the calibration that another one published, even if it was set to learn its own."""
    with begun(wrap(folder)) as first, begun(wrap(folder)) as second, begun(wrap(folder, learn=200)) as third:
        assert first.calibration == second.calibration == third.calibration is not None
        decided = told(first)
        assert {"semantic", None} == {rung for rung, *_ in decided}
        for other in (second, third):
            for one, again in zip(decided, told(other), strict=True):
                assert one == again or (one[0] is None and again[0] == "exact")  # stored by the first
        for settings in ({"max_drop": 0.2}, {"answer": "embedding"}):  # another risk target or kind of answer
            with begun(wrap(folder, **settings)) as other:
                assert other.calibration is None


def test_what_replaces_or_ends_it_does_so_for_all(folder: Path) -> None:
    """A newer calibration takes its place; drift ends approximate reuse; after a purge no cache takes it up."""
    with begun(wrap(folder)) as first, begun(wrap(folder)) as second:
        made = first.calibrate(batched(requests(320, seed=5)[0]))
        first.drain()
        second.drain()
        assert second.calibration == made
        assert first.calibrated is not None
        first.calibrated.drifted(made)
        begun(first)
        begun(second)
        assert second.calibration is not None and second.calibration.has_drifted
        first.purge(namespace="default")
        second(input_ids=STREAM[:1])
        with begun(wrap(folder)) as later:
            assert first.calibration is second.calibration is later.calibration is None
