"""Shared by all tests: no network, one thread each in torch and FAISS, seeded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import faiss
import pytest
import torch

# Tiny models gain nothing from threads, and on a busy machine they wait for each other.
torch.set_num_threads(1)
faiss.omp_set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
