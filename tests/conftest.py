"""Shared by all tests: no network, one thread each in torch and FAISS, seeded."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import faiss
import pytest
import torch

from llmcache.models import loading
from tests.tiny_data import save_base, write_data

# Tiny models gain nothing from threads, and on a busy machine they wait for each other.
torch.set_num_threads(1)
faiss.omp_set_num_threads(1)


def pytest_collection_finish() -> None:
    # Collecting garbage then looks at what tests made, not at all of torch and transformers, for a third of a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _asks_the_hub_anew() -> None:
    loading.FAILED.clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small data sets of every kind that recipes read."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that recipes begin from."""
    return save_base(tmp_path_factory.mktemp("base") / "tiny")
