"""Fixtures: caches calibrated with both drafters, an int8 copy of the trunk and another model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcache import LLMCache
from llmcache.reuse.calibration import training
from tests.calibration.drafting import BOTH, student, wrap
from tests.contract.streams import batched, classifier, requests


@pytest.fixture(scope="session", params=["int8", "model"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which drafter."""
    return str(request.param)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests keep graphs."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def saved(kind: str, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was calibrated with sources and a draft in use."""
    folder = tmp_path_factory.mktemp(kind)
    draft = student() if kind == "model" else kind
    with pytest.MonkeyPatch.context() as patch, wrap(home, draft=draft) as cache:
        patch.setattr(training, "choose_shares", lambda *given: BOTH)
        assert cache.calibrate(batched(requests(400)[0])).is_certified
        cache.save(folder)
    return folder


@pytest.fixture
def drafting(kind: str) -> Any:
    """The other model that drafts; None for the copy."""
    return student() if kind == "model" else None


@pytest.fixture
def drafted(saved: Path, drafting: Any) -> Iterator[LLMCache]:
    """The saved cache, loaded."""
    with LLMCache.load(classifier(), saved, **({} if drafting is None else {"draft": drafting})) as cache:
        yield cache
