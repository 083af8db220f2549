"""Fixtures of the experiments' tests; marks all of them slow: `make test-fast` leaves them out."""

import gc
from pathlib import Path

import pytest

from experiments.support.files import Folders
from tests.experiments.helpers import Commands, save_gpt2, save_tiny
from tests.tiny_models import CLASSIFIERS, build
from tests.tiny_prompts import write_prompts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _still_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the suite froze stays frozen: a load over HTTP unfreezes all, and each later collection takes a second."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Data and a language model for streams of prompts."""
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="session")
def models(prompts: Folders) -> Folders:
    """Data, and prepared models: `tiny` and `small` generate, `bert` classifies, `base` embeds."""
    assert prompts.models is not None
    save_gpt2(prompts.models / "small")
    build(CLASSIFIERS["bert"]).save_pretrained(prompts.models / "bert")
    save_tiny(prompts.models / "base")
    return prompts


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Runs commands of the program in this process."""
    return Commands(capsys)
