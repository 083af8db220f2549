"""Requests about a few topics, and a tiny classifier that tells them apart: what calibrations are tried on."""

import copy
import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from llmcache import LLMCache
from tests.tiny_models import CLASSIFIERS, build

N_TOPICS = 5  # as many as the tiny classifier has labels
N_CALIBRATED = 500
_WORDS = 12  # of each topic
_FIRST = 10  # id of the first word; those below are special or padding


def requests(
    n: int, seed: int = 0, n_words: int = 6, noise: float = 0.2
) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Inputs, one request each, and their topics: some words of a request belong to another one."""
    rng = np.random.default_rng(seed)
    topics = rng.integers(0, N_TOPICS, n)
    inputs = []
    for topic in topics:
        owners = np.where(rng.random(n_words) < noise, rng.integers(0, N_TOPICS, n_words), topic)
        ids = [1, *(_FIRST + owners * _WORDS + rng.integers(0, _WORDS, n_words)), 2]
        inputs.append({"input_ids": torch.tensor([ids])})
    return inputs, topics.tolist()


def batched(inputs: list[dict[str, torch.Tensor]], size: int = 50) -> list[dict[str, torch.Tensor]]:
    """The same requests, several in a call: nothing else is calibrated on, and sooner."""
    parts = [inputs[i : i + size] for i in range(0, len(inputs), size)]
    return [{name: torch.cat([one[name] for one in part]) for name in part[0]} for part in parts]


def classifier() -> nn.Module:
    """A tiny BERT whose head was fitted to the topics."""
    return copy.deepcopy(_fitted())


@contextmanager
def calibrated(model: nn.Module | None = None, **settings: Any) -> Iterator[LLMCache]:
    """A cache of `classifier()` that was calibrated on `requests(N_CALIBRATED)`, as loaded: made once a process."""
    settings = {"max_drop": 0.05, "auto_bypass": False, **settings}
    with LLMCache.load(model or classifier(), _calibrated(tuple(sorted(settings.items()))).name) as cache:
        yield cache


@functools.cache
def _calibrated(settings: tuple[tuple[str, Any], ...]) -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="calibrated-")
    with LLMCache.wrap(classifier(), **dict(settings)) as cache:
        assert cache.calibrate(batched(requests(N_CALIBRATED)[0])).is_certified
        cache.save(folder.name)
    return folder


@functools.cache
def _fitted() -> nn.Module:
    from sklearn.linear_model import LogisticRegression

    model = build(CLASSIFIERS["bert"])
    inputs, topics = requests(400, seed=99)
    with torch.inference_mode():
        pooled = np.concatenate([model.bert(**x).pooler_output.numpy() for x in inputs])
    centre, scale = pooled.mean(axis=0), pooled.std(axis=0)
    fitted = LogisticRegression(max_iter=2000).fit((pooled - centre) / scale, topics)
    weight = fitted.coef_ / scale
    with torch.no_grad():
        model.classifier.weight.copy_(torch.from_numpy(weight))
        model.classifier.bias.copy_(torch.from_numpy(fitted.intercept_ - weight @ centre))
    return model
