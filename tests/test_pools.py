"""Process pools: too slow for `tests/contract/`, as each process loads the libraries."""

import pytest
import torch
from sentence_transformers import SentenceTransformer

from llmcache import LLMCache
from tests.contract.test_copies import sentences


@pytest.mark.slow
def test_a_pool_of_processes_encodes_with_a_wrapped_model() -> None:
    """docs/reuse.md: sentence-transformers' pools of processes compute as they do with the plain model."""
    texts = ["w1 w2 w3", "w4", "w5 w6"]
    model: SentenceTransformer = sentences()
    expected = model.encode(texts)
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        assert torch.allclose(torch.tensor(model.encode(texts, device=["cpu"])), torch.tensor(expected), atol=1e-6)
        for _ in range(2):
            assert torch.allclose(torch.tensor(model.encode(texts)), torch.tensor(expected), atol=1e-6)
        assert cache.stats().n_hits >= len(texts)
