"""Drafters of the tiny classifier of topics, and what they serve."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from llmcache import LLMCache
from tests.contract.streams import ask, classifier, requests
from tests.tiny_models import VOCABULARY, build

BOTH = {"semantic": 0.5, "draft": 1.0}
MAX_DROP = 0.08
SIZES: dict[str, Any] = {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32}

only_copy = pytest.mark.parametrize("kind", ["int8"], indirect=True, scope="session")
only_model = pytest.mark.parametrize("kind", ["model"], indirect=True, scope="session")


def wrap(home: Path, model: Any = None, **settings: Any) -> LLMCache:
    """Wrap the classifier, or a model, with an int8 copy as draft unless another one is given."""
    settings = {"draft": "int8", "max_drop": MAX_DROP, "auto_bypass": False, "audit": 0, **settings}
    return LLMCache.wrap(classifier() if model is None else model, engine={"name": "eager", "folder": home}, **settings)


def stranger(**sizes: Any) -> Any:
    """Return a tiny DistilBERT in eval mode, of which all answers are random."""
    config = DistilBertConfig(**{**SIZES, "vocab_size": VOCABULARY, "num_labels": 5, **sizes})
    return build(lambda: DistilBertForSequenceClassification(config), seed=1)


def student() -> Any:
    """Return a model like the classifier, with noise on its weights and half of its positions."""
    model = classifier()
    with torch.no_grad():
        rng = torch.Generator().manual_seed(3)
        for one in model.parameters():
            one.add_(0.001 * one.std() * torch.randn(one.shape, generator=rng) if one.ndim > 1 else 0)
    table = model.bert.embeddings.position_embeddings
    table.weight, model.config.max_position_embeddings = nn.Parameter(table.weight[:32].detach().clone()), 32
    return model


def drafted_rows(cache: LLMCache) -> list[Tensor]:
    """Return ten rows (1, T) that the draft serves."""
    asked = requests(80, seed=1)[0].split(1)
    served = [*islice((row for row in asked if ask(cache, row) == ["draft"]), 10)]
    assert len(served) == 10
    return served
