"""Requests about a few topics, and a tiny classifier that tells them apart: what calibrations are tried on."""

import numpy as np
import torch
from torch import nn

from tests.tiny_models import CLASSIFIERS, build

N_TOPICS = 5  # as many as the tiny classifier has labels
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


def classifier() -> nn.Module:
    """A tiny BERT whose head was fitted to the topics."""
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
