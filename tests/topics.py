"""Requests about a few topics, and a tiny classifier that tells them apart: what calibrations are tried on."""

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from llmcache import AuditStats, LLMCache
from tests.tiny_models import CLASSIFIERS, build

N_TOPICS = 5  # as many as the tiny classifier has labels
N_CALIBRATED = 400
_WORDS = 12  # of each topic
_FIRST = 10  # id of the first word; those below are special or padding


Inputs = dict[str, torch.Tensor]


def requests(n: int, seed: int = 0, n_words: int = 6, noise: float = 0.2) -> tuple[list[Inputs], list[int]]:
    """Inputs, one request each, and their topics: some words of a request belong to another one."""
    rng = np.random.default_rng(seed)
    topics = rng.integers(0, N_TOPICS, n)
    inputs = []
    for topic in topics:
        owners = np.where(rng.random(n_words) < noise, rng.integers(0, N_TOPICS, n_words), topic)
        ids = [1, *(_FIRST + owners * _WORDS + rng.integers(0, _WORDS, n_words)), 2]
        inputs.append({"input_ids": torch.tensor([ids])})
    return inputs, topics.tolist()


def batched(inputs: list[Inputs], size: int = 50) -> list[Inputs]:
    """The same requests, several in a call: nothing else is calibrated on, and sooner."""
    parts = [inputs[i : i + size] for i in range(0, len(inputs), size)]
    return [{name: torch.cat([one[name] for one in part]) for name in part[0]} for part in parts]


def ask(cache: LLMCache, inputs: list[Inputs]) -> tuple[list[int], list[str | None]]:
    """Answers of all rows, and which rung gave each."""
    answers, rungs = [], []
    for one in inputs:
        answers += cache(**one).logits.argmax(dim=-1).tolist()
        rungs += [outcome.rung for outcome in cache.last]
    return answers, rungs


def rungs_of(cache: LLMCache, inputs: list[Inputs]) -> list[str | None]:
    """Which rung gave each answer."""
    return ask(cache, inputs)[1]


def alone(cache: LLMCache, inputs: list[Inputs]) -> list[int]:
    """The model's own answers."""
    with cache.disabled():
        return [int(answer) for one in batched(inputs) for answer in cache(**one).logits.argmax(dim=-1)]


def known(cache: LLMCache) -> AuditStats:
    """What the audit tells."""
    stats = cache.stats().audit
    assert stats is not None
    return stats


@contextmanager
def edited(weight: torch.Tensor) -> Iterator[None]:
    """Within: other values."""
    own = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(own.flip(0) + 0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(own)


class Reading:
    """Finds logits; on demand those of a model that has another opinion now, or none at all."""

    def __init__(self) -> None:
        self.drifts = False
        self.fails = False

    def __call__(self, output: Any) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("no answer today")
        return output.logits.roll(1, dims=-1) if self.drifts else output.logits


def classifier() -> nn.Module:
    """A tiny BERT whose head was fitted to the topics."""
    return copy.deepcopy(_fitted())


@contextmanager
def calibrated(
    model: nn.Module | None = None, answer_of: Callable[[Any], torch.Tensor] | None = None, **settings: Any
) -> Iterator[LLMCache]:
    """A cache of `classifier()` that was calibrated on `requests(N_CALIBRATED)`, as loaded: made once a process."""
    settings = {"max_drop": 0.05, "auto_bypass": False, **settings}
    folder = _calibrated(tuple(sorted(settings.items()))).name
    more: dict[str, Any] = {} if answer_of is None else {"answer_of": answer_of}
    with LLMCache.load(model or classifier(), folder, **more) as cache:
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
    return fit_head(build(CLASSIFIERS["bert"]))


def fit_head(model: Any) -> nn.Module:
    """Have a BERT with a classifier tell the topics apart, and return it."""
    from sklearn.linear_model import LogisticRegression

    inputs, topics = requests(400, seed=99)
    with torch.inference_mode():
        pooled = np.concatenate([model.bert(**x).pooler_output.numpy() for x in batched(inputs)])
    centre, scale = pooled.mean(axis=0), pooled.std(axis=0)
    fitted = LogisticRegression(max_iter=2000).fit((pooled - centre) / scale, topics)
    weight = fitted.coef_ / scale
    with torch.no_grad():
        model.classifier.weight.copy_(torch.from_numpy(weight))
        model.classifier.bias.copy_(torch.from_numpy(fitted.intercept_ - weight @ centre))
    fit: nn.Module = model
    return fit
