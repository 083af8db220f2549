"""Recipe: all-MiniLM-L6-v2 with a multiple-choice head, for OpenBookQA."""

from collections.abc import Sequence
from typing import Any

import torch

from experiments.data.published import Choice, read_openbookqa
from experiments.models.loading import Loaded, load
from experiments.prepare.training import Order, Schedule, train
from experiments.tasks.openbookqa import OpenBookQA
from llmcache import ConfigError

MAX_LENGTH = 64


def prepare(order: Order) -> tuple[Loaded, dict[str, Any]]:
    """Train the model; return it with its accuracy on the validation and test sets, and that of chance."""
    torch.manual_seed(order.seed)
    base = load(order.base, "choice", is_new_head=True)
    questions = read_openbookqa("train", order.data_dir)[: order.limit]
    n_choices = {len(question.choices) for question in questions}
    if len(n_choices) > 1:
        raise ConfigError(f"openbookqa: training takes questions with one number of choices (got {sorted(n_choices)})")
    schedule = Schedule(epochs=order.epochs or 3, batch_size=8, learning_rate=1e-4)
    train(base.model, questions, Collator(base.tokenizer), schedule, order.folder, order.seed, "openbookqa")
    figures = {
        split: _accuracy(base, read_openbookqa(split, order.data_dir)[: order.limit])
        for split in ("validation", "test")
    }
    return base, {"n_train": len(questions), **figures, "chance": 1 / n_choices.pop()}


class Collator:
    """Makes batches of questions with equally many choices: tensors (B, choices, T), and the right choices (B,)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, questions: Sequence[Choice]) -> dict[str, torch.Tensor]:
        stems = [question.stem for question in questions for _ in question.choices]
        choices = [choice for question in questions for choice in question.choices]
        rows = self._tokenizer(
            stems, choices, truncation=True, max_length=MAX_LENGTH, padding=True, return_tensors="pt"
        )
        shaped = {name: tensor.view(len(questions), -1, tensor.shape[-1]) for name, tensor in rows.items()}
        return {**shaped, "labels": torch.tensor([question.right for question in questions])}


def _accuracy(model: Loaded, questions: Sequence[Choice]) -> float:
    task = OpenBookQA(model, questions, MAX_LENGTH)
    return float(task.scores(task.answer_all("Answering")).mean())
