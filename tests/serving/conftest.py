"""Folders with tiny models, made once a process."""

from pathlib import Path

import pytest

from tests.serving import decoders
from tests.serving.served import write


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind of encoder, and a decoder, `decoders.NAME`."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("classifier", "reranker", "embedding"):
        write(folder, kind)
    decoders.model().save_pretrained(folder / decoders.NAME)
    decoders.tokenizer().save_pretrained(folder / decoders.NAME)
    return folder
