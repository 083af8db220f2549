"""Heads: models that answer each request with logits, one column per label.

Sizes: B rows, T tokens, D hidden width, C labels, N labelled requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from experiments.data.labelled import Labelled
from experiments.models.loading import Loaded
from experiments.support.progress import tracked
from experiments.support.section import Section
from llmcache import ConfigError
from llmcache.lab import quiet

_BATCH = 32
_MOST_UNANSWERABLE = 0.1  # share of a stream; above it, the labels are probably of another data set


class Head(Section):
    # `logistic`: logistic regression on the pooled last states, fitted on a part of the labelled data. `ready`: the
    # model is a sequence classifier.
    kind: Literal["logistic", "ready"] = "logistic"
    # Pooling for `logistic`: `mean` over valid tokens, or `cls`, the first token.
    pool: Literal["mean", "cls"] = "mean"
    # Share of the labelled data that is not streamed: `logistic` is fitted on it, a `ready` model was trained on it
    # (`llmcache prepare` takes the same seeded half). 0 if the model was trained on other data.
    fit_share: float = Field(default=0.5, ge=0.0, lt=1.0)

    def check(self) -> None:
        if self.kind == "logistic" and self.fit_share == 0.0:
            raise ValueError("fit_share must be above 0 for a logistic head, which is fitted on that share")


@dataclass(frozen=True, slots=True)
class Classifier:
    # `module(**inputs)` returns logits (B, C), or an output that has them. Wrapping it wraps the trunk inside.
    module: nn.Module
    labels: tuple[str, ...]  # name of each column
    tokenizer: Any
    n_fit: int = 0  # labelled requests the head was fitted on here
    unanswerable: tuple[str, ...] = ()  # labels of the stream without a column


def pool_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(hidden.dtype).unsqueeze(-1)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


#: `(hidden (B, T, D), mask (B, T)) -> (B, D)`.
POOLS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": pool_mean, "cls": lambda hidden, _: hidden[:, 0]}


class PooledClassifier(nn.Module):
    """Trunk, pooling, linear layer. The trunk's own pooler is removed, since nothing reads it."""

    def __init__(self, trunk: nn.Module, pool: str, linear: nn.Linear | None = None) -> None:
        """Join the parts and remove the trunk's pooler; without `linear`, the output is the pooled vector."""
        super().__init__()
        if getattr(trunk, "pooler", None) is not None:
            trunk.pooler = None  # type: ignore[assignment]
        self.trunk = trunk
        self.pool = POOLS[pool]
        self.linear = linear or nn.Identity()

    def forward(self, **inputs: Tensor) -> Tensor:
        hidden = self.trunk(**inputs).last_hidden_state
        mask = inputs.get("attention_mask")
        logits: Tensor = self.linear(self.pool(hidden, torch.ones_like(hidden[..., 0]) if mask is None else mask))
        return logits


def ready(loaded: Loaded, stream: Sequence[Labelled]) -> Classifier:
    """Use the model's own head, which must have a column for every label of the stream."""
    names: dict[int, str] = loaded.model.config.id2label  # type: ignore[union-attr, assignment]
    labels = tuple(names[i] for i in range(len(names)))
    if strange := sorted({request.label for request in stream} - set(labels)):
        raise ConfigError(f"data.label: the model does not know {_some(strange)}; it answers with {_some(labels)}")
    # Not wrapped in a module: the library could not see what the head reads, and would keep every token.
    return Classifier(loaded.model, labels, loaded.tokenizer)


def fit_logistic(
    loaded: Loaded, pool: str, fit: Sequence[Labelled], stream: Sequence[Labelled], max_length: int
) -> Classifier:
    """Fit a logistic regression on pooled states. Labels of the stream that are not in `fit` are answered wrong."""
    labels = tuple(sorted({request.label for request in fit}))
    strange = tuple(sorted({request.label for request in stream} - set(labels)))
    n_strange = sum(request.label in strange for request in stream)
    if n_strange > _MOST_UNANSWERABLE * len(stream):
        raise ConfigError(
            f"data.label: {_some(strange)} occurs in the stream ({n_strange} of {len(stream)} requests) but not among "
            f"the {len(fit)} that the head is fitted on; raise task.head.fit_share, or take another seed or column"
        )
    if len(labels) < 2:
        raise ConfigError(f"data.label: only one label ({_some(labels)}); a classifier needs at least two")
    features = pooled_states(loaded, pool, [request.text for request in fit], max_length)
    numbers = np.array([labels.index(request.label) for request in fit])
    return Classifier(
        PooledClassifier(loaded.model, pool, _fit_linear(features, numbers)).eval(),
        labels,
        loaded.tokenizer,
        len(fit),
        strange,
    )


def as_sentence_model(whole: Loaded, classifier: Classifier, pool: str, max_length: int) -> Any:
    """Return a fitted classifier as a sentence-transformers model with the same logits: trunk, pooling, `Dense`.

    `whole` is the trunk with its unused pooler: a cache's keys cover all weights.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    linear: Any = classifier.module.linear
    trunk: Any = whole.model
    trunk.config.id2label = dict(enumerate(classifier.labels))
    trunk.config.label2id = {label: i for i, label in enumerate(classifier.labels)}
    dense = Dense(linear.in_features, linear.out_features, activation_function=nn.Identity())
    dense.linear.load_state_dict(linear.state_dict())
    with TemporaryDirectory() as place, quiet():
        trunk.save_pretrained(place)
        whole.tokenizer.save_pretrained(place)
        parts = [Transformer(place, max_seq_length=max_length), Pooling(linear.in_features, pool), dense]
        return SentenceTransformer(modules=parts, device="cpu").eval()


def pooled_states(loaded: Loaded, pool: str, texts: Sequence[str], max_length: int) -> NDArray[np.float32]:
    """Return the pooled last states (N, D) of texts, computed in batches of similar length."""
    model = PooledClassifier(loaded.model, pool).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    batches = [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]
    states: list[Any] = [None] * len(texts)
    with torch.inference_mode():
        for batch in tracked(batches, "Fitting the head"):
            inputs = loaded.tokenizer(
                [texts[i] for i in batch], truncation=True, max_length=max_length, padding=True, return_tensors="pt"
            )
            for i, row in zip(batch, model(**inputs).float().numpy(), strict=True):
                states[i] = row
    return np.stack(states)


def _fit_linear(features: NDArray[np.float32], numbers: NDArray[np.int64]) -> nn.Linear:
    """Fit a logistic regression on standardised features (N, D); return it as a linear layer on the raw features."""
    from sklearn.linear_model import LogisticRegression

    mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    fitted = LogisticRegression(C=0.1, max_iter=5000).fit((features - mean) / scale, numbers)
    weight, bias = fitted.coef_ / scale, fitted.intercept_ - fitted.coef_ @ (mean / scale)
    if len(weight) == 1:  # two labels: one row, the log-odds of the second
        weight, bias = np.concatenate([0 * weight, weight]), np.concatenate([0 * bias, bias])
    linear = nn.Linear(features.shape[1], len(weight))
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
        linear.bias.copy_(torch.from_numpy(bias))
    return linear


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more
