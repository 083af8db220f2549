"""The answers of a model as signatures, which are stored and compared.

The signature of a class is its number, that of scores the scores, that of an embedding the vector. An answer has
changed if its signature has. Signatures are made from the model's output, or from the logits that the user's
`answer_of` returns; signatures of embeddings from the payload, from which the embedding is computed.

A forecast is the output that a fingerprint predicts before any layer runs: rough, but specific to the request.

Sizes: N requests, n answers, B rows, C logits, S width of a signature.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import Any

import numpy as np
from torch import Tensor, nn

from llmcache.errors import ConfigError
from llmcache.models.heads import Head
from llmcache.support.arrays import Bools, Floats, normalise

_SHARE_OF_RANGE = 0.05  # by which two equal scores may differ


class Answers(ABC):
    """A kind of answer. Only some kinds learn from data."""

    name: str  # in settings
    reads_payload = False  # signatures are made from the payload of an entry, not from the model's output

    @abstractmethod
    def sign(self, outputs: Floats) -> Floats:
        """Return signatures (B, S) from the model's output for B rows (B, C), or from their payloads."""

    def learn(self, signatures: Floats) -> None:
        """Learn from signatures (N, S) of the first requests."""

    def state(self) -> dict[str, Floats]:
        """Return what `learn` computed, as arrays by name."""
        return {}

    def restore(self, state: Mapping[str, Floats]) -> None:
        """Restore the arrays that `state` returned."""

    @abstractmethod
    def agree(self, one: Floats, other: Floats) -> Bools:
        """Whether signatures (..., S) are the same answer, elementwise, bool (...); NaN agrees with nothing."""

    @abstractmethod
    def closeness(self, forecast: Floats, signatures: Floats) -> list[float]:
        """Return how well answers (n, S) fit the forecast of an output (C,): a number each (n,); larger is better.

        If answers are made from payloads, the forecast is of the payload. That of the forecast class is over 0.
        """

    @abstractmethod
    def margins(self, output: Floats) -> Sequence[float]:
        """Return how sure an output (C,) is of its answer: features (F,) from which a draft's risk is learned."""


class Classes(Answers):
    """One of C classes: the class with the largest logit."""

    name = "class"

    def sign(self, outputs: Floats) -> Floats:
        classes: Floats = outputs.argmax(axis=-1, keepdims=True).astype(np.float32)
        return classes

    def agree(self, one: Floats, other: Floats) -> Bools:
        same: Bools = one[..., 0] == other[..., 0]
        return same

    def closeness(self, forecast: Floats, signatures: Floats) -> list[float]:
        """Return each class's logit minus the largest of the others; of an unknown answer (NaN), the first class's."""
        logits = forecast.tolist()  # arrays take longer, for one forecast and a few answers
        *_, second, first = sorted(logits)
        own = [logits[int(known)] if known == known else first for known in signatures[:, 0].tolist()]
        return [logit - (second if logit == first else first) for logit in own]

    def margins(self, output: Floats) -> Sequence[float]:
        """Return the lead over the second class, its logarithm, and the log-odds of the first."""
        *others, first = sorted(output.tolist())  # cold after a session, array functions take twice as long
        behind = [logit - first for logit in others]
        return *_with_log(-behind[-1]), -log(sum(map(exp, behind)) + 1e-6)


class Labels(Answers):
    """A set of C labels: the labels with a logit over 0."""

    name = "labels"

    def sign(self, outputs: Floats) -> Floats:
        return (outputs > 0).astype(np.float32)

    def agree(self, one: Floats, other: Floats) -> Bools:
        same: Bools = (one == other).all(axis=-1)
        return same

    def closeness(self, forecast: Floats, signatures: Floats) -> list[float]:
        """Return the smallest margin among the labels, negative if a label is on the wrong side."""
        least: list[float] = np.where(signatures > 0, forecast, -forecast).min(axis=-1).tolist()
        return least

    def margins(self, output: Floats) -> Sequence[float]:
        """Return the least distance of a logit from 0, and its logarithm."""
        return _with_log(float(np.abs(output).min()))


class Scores(Answers):
    """Numbers: the same answer if no score differs by more than a twentieth of its range over the first requests."""

    name = "score"

    def __init__(self) -> None:
        self._most: Floats = np.zeros(1, np.float32)

    def sign(self, outputs: Floats) -> Floats:
        return outputs.reshape(len(outputs), -1)

    def learn(self, signatures: Floats) -> None:
        """Measure the range of the scores."""
        self._most = (_SHARE_OF_RANGE * np.ptp(signatures, axis=0)).astype(np.float32)

    def state(self) -> dict[str, Floats]:
        return {"most": self._most}

    def restore(self, state: Mapping[str, Floats]) -> None:
        self._most = state["most"]

    def agree(self, one: Floats, other: Floats) -> Bools:
        same: Bools = (np.abs(one - other) <= self._most).all(axis=-1)
        return same

    def closeness(self, forecast: Floats, signatures: Floats) -> list[float]:
        """Return the largest difference of a score, negated."""
        nearness: list[float] = (-np.abs(forecast - signatures).max(axis=-1)).tolist()
        return nearness

    def margins(self, output: Floats) -> Sequence[float]:
        """Return the scores: how far off a draft is may depend on where it is."""
        scores: list[float] = output.tolist()
        return scores


class Embeddings(Answers):
    """A vector: the same answer at a cosine of `least`, 0.98 by default."""

    name = "embedding"
    reads_payload = True
    least = 0.98

    def sign(self, outputs: Floats) -> Floats:
        return normalise(outputs)

    def agree(self, one: Floats, other: Floats) -> Bools:
        same: Bools = np.einsum("...s,...s->...", one, other) >= self.least
        return same

    def closeness(self, forecast: Floats, signatures: Floats) -> list[float]:
        """Return the cosine."""
        cosines: list[float] = (signatures @ (forecast / max(float(np.linalg.norm(forecast)), 1e-12))).tolist()
        return cosines

    def margins(self, output: Floats) -> Sequence[float]:
        """Return 0: a vector does not tell how far off it is."""
        return (0.0,)


def _with_log(lead: float) -> tuple[float, float]:
    return lead, log(lead + 1e-2)


ANSWERS: Mapping[str, type[Answers]] = {kind.name: kind for kind in (Classes, Labels, Scores, Embeddings)}

Reading = Callable[[Any], Tensor]


def find_answers(name: str, head: Head, model: nn.Module, min_cosine: float | None = None) -> Answers:
    """Return a model's kind of answers; `name`: a key of `ANSWERS`, or `auto`, which follows the head.

    Embeddings are the same from a cosine of `min_cosine` on; None: `Embeddings.least`.

    Answers of an unknown head are taken as embeddings, the strictest kind.

    Raises:
        ConfigError: The name is unknown.
    """
    if name == "auto":
        config = getattr(model, "config", None)
        if head.name != "classifier":
            name = "embedding"
        elif getattr(config, "num_labels", 2) == 1 or getattr(config, "problem_type", None) == "regression":
            name = "score"
        else:
            name = "labels" if getattr(config, "problem_type", None) == "multi_label_classification" else "class"
    if name not in ANSWERS:
        raise ConfigError(f"answer: unknown name {name!r}; known: auto, {', '.join(sorted(ANSWERS))}")
    made = ANSWERS[name]()
    if isinstance(made, Embeddings) and min_cosine is not None:
        made.least = min_cosine
    return made


def read_logits(output: Any) -> Tensor:
    """Return logits (B, C) from a model's output: the tensor itself, its `logits`, or the first of a tuple.

    Raises:
        TypeError: None of them is a 2-D floating-point tensor.
    """
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, tuple):
        output = output[0]
    if not isinstance(output, Tensor) or output.ndim != 2 or not output.is_floating_point():
        raise TypeError(
            f"the model returned {type(output).__name__}, in which no logits (B, C) were found: give wrap() a function "
            "that finds the answer, answer_of=lambda output: ..."
        )
    return output
