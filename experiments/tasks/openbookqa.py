"""Task `openbookqa`: multiple choice. A request is a question; the rows of its choices form one batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from experiments.data.made import make_choices
from experiments.data.published import Choice, read_openbookqa
from experiments.models.loading import Inputs, Loaded, check_length, load
from experiments.support.files import Folders
from experiments.tasks.workload import OfficialSettings, Request, Workload


class Settings(OfficialSettings):
    name: Literal["openbookqa"]
    max_length: int = Field(default=64, ge=8)  # most tokens per row: question and one choice

    def build(self, folders: Folders, seed: int) -> "OpenBookQA":
        is_made = self.data == "made"
        questions = make_choices(seed) if is_made else read_openbookqa("test", folders.data)
        loaded = load(self.model, "choice", folders.models)
        check_length(loaded, self.max_length)
        return OpenBookQA(loaded, questions[: self.limit], self.max_length)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores (1, choices), in the form of the model's own output."""

    logits: Tensor


class OpenBookQA(Workload):
    """Multiple choice with a model that scores each pair of question and choice."""

    def __init__(self, loaded: Loaded, questions: Sequence[Choice], max_length: int) -> None:
        """Tokenise the questions; a row (question and choice) has at most `max_length` tokens."""
        self.module = loaded.model
        self.tokenizer = loaded.tokenizer
        self.requests = [self._encode(question, max_length) for question in questions]
        self.facts = {"chance": float(np.mean([1 / len(question.choices) for question in questions]))}

    def _encode(self, question: Choice, max_length: int) -> Request:
        inputs = {name: rows.unsqueeze(0) for name, rows in encode(self.tokenizer, question, max_length).items()}
        return Request(question.id, inputs, " ".join([question.stem, *question.choices]), question.right)

    def answer(self, output: Any, number: int) -> int:
        return int(output.logits[0].argmax())

    def mix(self, parts: Sequence[tuple[Any, int]]) -> Any:
        return Scores(torch.stack([output.logits[0, row] for output, row in parts])[None])

    def show(self, answer: int) -> str:
        return ascii_uppercase[answer]


def encode(tokenizer: Any, question: Choice, max_length: int) -> Inputs:
    """Tokenise a row per choice, padded to the longest: tensors (choices, T)."""
    stems = [question.stem] * len(question.choices)
    options = {"truncation": True, "max_length": max_length, "padding": True, "return_tensors": "pt"}
    return dict(tokenizer(stems, list(question.choices), **options))
