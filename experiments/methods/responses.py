"""Caches in front of the model: they store answers and return them unchanged."""

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from experiments.methods.base import COMPUTED, Method, Served
from experiments.models.heads import PooledClassifier
from experiments.models.loading import MINILM, encode, load
from experiments.support.nearest import Nearest, unit
from experiments.support.section import Section
from experiments.tasks.workload import Answer, Workload

NUMBER_BYTES = 8
ENCODED_TOKENS = 256  # all-MiniLM-L6-v2 was trained on at most this many


class ExactResponse(Method):
    """Returns the stored answer to a request with the same tokens."""

    def begin(self) -> None:
        self._kept: dict[bytes, tuple[int, Answer]] = {}
        super().begin()

    def ask(self, number: int) -> Answer:
        key = self._workload.requests[number].inputs["input_ids"].numpy().tobytes()
        found = self._kept.get(key)
        if found is not None:
            self._last = Served("response", found[0], 1.0)
            return found[1]
        answer = super().ask(number)
        self._kept[key] = (number, answer)
        self._last = Served()
        return answer

    @property
    def nbytes(self) -> int:
        return sum(len(key) + size_of(answer) for key, (_, answer) in self._kept.items())

    @property
    def n_entries(self) -> int:
        return len(self._kept)


class SemanticResponse(Method):
    """Returns the stored answer to a similar text, as GPTCache does.

    The request's text is embedded with all-MiniLM-L6-v2 (mean pooling). FAISS finds the nearest stored request, whose
    answer is returned if the cosine is at least `threshold`. Every request is charged for the encoder's time.
    """

    class Settings(Section):
        threshold: float = Field(default=0.8, ge=-1.0, le=1.0)  # least cosine; 0.8 is GPTCache's default
        encoder: str = MINILM  # sentence encoder: a name for `experiments.models.loading.load`

    def __init__(self, workload: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(workload, options)
        self.encode = Encoder(self._settings.encoder)

    def begin(self) -> None:
        self._answers = Nearest()
        super().begin()

    def ask(self, number: int) -> Answer:
        """Embed, search, and return the neighbour's answer, or compute and store it."""
        request = self._workload.requests[number]
        vector = self.encode(request.text)
        found, alike = self._answers.find(vector, self._settings.threshold)
        if found is not None:
            self._last = Served("response", found[0], alike)
            return self._workload.borrowed(found[1])
        answer = super().ask(number)
        self._answers.add(vector, (number, answer))
        self._last = Served(COMPUTED, None, alike)
        return answer

    @property
    def nbytes(self) -> int:
        return self._answers.nbytes + sum(size_of(answer) for _, answer in self._answers.kept)

    @property
    def n_entries(self) -> int:
        return len(self._answers.kept)


def size_of(answer: Answer) -> int:
    if isinstance(answer, str):
        return len(answer.encode())
    fields = [getattr(answer, field.name) for field in fields_of(answer)] if is_dataclass(answer) else []
    return sum(int(value.nbytes) for value in fields) or NUMBER_BYTES


class Encoder:
    """Sentence embeddings with mean pooling, by `module(**inputs)`: float32 (1, D)."""

    def __init__(self, name: str) -> None:
        loaded = load(name)
        self.module: nn.Module = PooledClassifier(loaded.model, "mean").eval()
        self._tokenizer = loaded.tokenizer

    def __call__(self, text: str) -> NDArray[np.float32]:
        """Return the embedding, float32 (D,) of L2 norm 1."""
        return unit(self.module(**encode(self._tokenizer, text, ENCODED_TOKENS))[0].float().numpy())
