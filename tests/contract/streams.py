"""Requests about a few topics, and a tiny classifier of them, for tests of calibrations."""

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.tiny_models import CLASSIFIERS, build

N_TOPICS = 5  # as many as the classifier has labels
_WORDS, _FIRST = 12, 10  # words of each topic; id of the first word


def requests(n: int, seed: int = 0, n_words: int = 6, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return token ids (n, n_words + 2) and topics (n,); a share `noise` of the words is of any topic."""
    rng = torch.Generator().manual_seed(seed)
    topics = torch.randint(N_TOPICS, (n,), generator=rng)
    other = torch.randint(N_TOPICS, (n, n_words), generator=rng)
    owners = torch.where(torch.rand(n, n_words, generator=rng) < noise, other, topics[:, None])
    words = _FIRST + owners * _WORDS + torch.randint(_WORDS, (n, n_words), generator=rng)
    edge = torch.ones(n, 1, dtype=torch.int64)
    return torch.cat([edge, words, 2 * edge], dim=1), topics


def batched(ids: Tensor, size: int = 50) -> list[dict[str, Tensor]]:
    """Split requests into calls of several rows."""
    return [{"input_ids": part} for part in ids.split(size)]


def ask(cache: LLMCache, ids: Tensor) -> list[str | None]:
    """Ask each request alone; return the rungs that answered."""
    return [(cache(input_ids=row[None]), cache.last[0].rung)[1] for row in ids]


def classifier() -> Any:
    """Return a tiny BERT in eval mode, its head fitted to the topics."""
    return copy.deepcopy(_fitted())


@functools.cache
def _fitted() -> nn.Module:
    return fit_head(build(CLASSIFIERS["bert"]))


def fit_head(model: Any) -> Any:
    """Fit the classifier head of a BERT to the topics; return the model."""
    ids, topics = requests(400, seed=99)
    with torch.no_grad():
        pooled = model.bert(input_ids=ids).pooler_output.double()
        rows = torch.cat([pooled, torch.ones(len(ids), 1, dtype=torch.float64)], dim=1)
        wanted = torch.nn.functional.one_hot(topics, N_TOPICS).double()
        ridge = 1e-3 * torch.eye(rows.shape[1], dtype=torch.float64)
        weights = torch.linalg.solve(rows.T @ rows + ridge, rows.T @ wanted)
        model.classifier.weight.copy_(20 * weights[:-1].T)
        model.classifier.bias.copy_(20 * weights[-1])
    return model


@contextmanager
def calibrated(
    model: nn.Module | None = None, answer_of: Callable[[Any], Tensor] | None = None, **settings: Any
) -> Iterator[LLMCache]:
    """Load a cache of `classifier()`, calibrated on `requests(300)`: one calibration per process and settings."""
    folder = _saved(tuple(sorted({"max_drop": 0.05, "auto_bypass": False, **settings}.items())))
    reading = {} if answer_of is None else {"answer_of": answer_of}
    with LLMCache.load(classifier() if model is None else model, folder.name, **reading) as cache:
        yield cache


@functools.cache
def _saved(settings: tuple[tuple[str, Any], ...]) -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="calibrated-")
    with LLMCache.wrap(classifier(), **dict(settings)) as cache:
        assert cache.calibrate(batched(requests(300)[0])).is_certified
        cache.save(folder.name)
    return folder
