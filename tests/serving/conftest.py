"""Folders with tiny models, made once a process."""

from pathlib import Path

import pytest

from tests.serving.served import write


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("classifier", "reranker", "embedding", "decoder"):
        write(folder, kind)
    return folder
