"""Recipe: all-MiniLM-L6-v2 with a span head, for SQuAD v2.

clozes from the training text -> real questions -> no-answer threshold, tuned on held-out articles
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from experiments.data.published import Question, read_squad, read_wikitext
from experiments.models.loading import Loaded, load
from experiments.prepare.cloze import make_clozes, plain
from experiments.prepare.training import Order, Padding, Schedule, train
from experiments.support.progress import tracked
from experiments.tasks.squad_v2 import THRESHOLD, SquadV2, encode, f1, figures, in_context
from llmcache import ConfigError

MAX_LENGTH = 384
TRAIN_LENGTH = 256
STRIDE = 96
N_CLOZES = 8000
SHARE_UNANSWERABLE = 0.3
N_HELD_OUT = 2
MIXED = (0.3, 0.7)  # share of unanswerable questions in articles suited to tune the threshold; overall it is a third


def prepare(order: Order) -> tuple[Loaded, dict[str, Any]]:
    """Train the model. Its figures on held-out articles and the evaluation set come with those of never answering."""
    data_dir, seed, limit = order.data_dir, order.seed, order.limit
    questions = read_squad("train", data_dir)
    held_out = choose_articles(questions, seed)
    torch.manual_seed(seed)
    base = load(order.base, "span", is_new_head=True)
    tuning = [question for question in questions if question.title in held_out][:limit]
    training = [question for question in questions if question.title not in held_out][:limit]
    passages = sorted({question.context for question in training})
    passages += [plain(line) for line in read_wikitext("train", data_dir)]
    clozes = make_clozes(passages, min(N_CLOZES, limit or N_CLOZES), SHARE_UNANSWERABLE, seed)
    for phase, asked, schedule in (
        ("cloze", clozes, Schedule(epochs=1, batch_size=16, learning_rate=2e-4)),
        ("squad", training, Schedule(epochs=order.epochs or 4, batch_size=16, learning_rate=1.5e-4)),
    ):
        train(base.model, windows(base.tokenizer, asked), Padding(base.tokenizer), schedule, order.folder, seed, phase)
    setattr(base.model.config, THRESHOLD, tune(base, tuning))
    evaluation = read_squad("validation", data_dir)[:limit]
    return base, {
        "n_train": len(training),
        "n_clozes": len(clozes),
        "held_out_articles": sorted(held_out),
        "threshold": getattr(base.model.config, THRESHOLD),
        "tuning": evaluate(base, tuning),
        "evaluation": evaluate(base, evaluation),
        "always_no_answer": figures([""] * len(evaluation), [_texts(question) for question in evaluation]),
    }


def choose_articles(questions: Sequence[Question], seed: int) -> set[str]:
    """Return the titles of articles held out to tune the threshold; they have both kinds of questions."""
    kinds: dict[str, list[bool]] = {}
    for question in questions:
        kinds.setdefault(question.title, []).append(not question.answers)
    if len(kinds) < 2:
        raise ConfigError(f"squad_v2: the training data has one article only ({next(iter(kinds))!r}); it takes two")
    low, high = MIXED
    mixed = [title for title in sorted(kinds) if low <= float(np.mean(kinds[title])) <= high] or sorted(kinds)
    return set(random.Random(seed).sample(mixed, min(N_HELD_OUT, len(mixed), len(kinds) - 1)))


def windows(tokenizer: Any, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Return training examples: each window of each passage, with first and last token of the first answer."""
    # A window without the whole answer is a no-answer example: both are 0, the first token. White space around an
    # answer is ignored, since no token stands for it.
    examples = []
    for question in questions:
        encoded = encode(tokenizer, question.text, question.context, TRAIN_LENGTH, STRIDE)
        offsets = encoded["offset_mapping"]
        for number in range(len(offsets)):
            encoded["offset_mapping"] = offsets
            places = in_context(encoded, number)
            start, end = _find(question, places)
            example = {name: encoded[name][number] for name in tokenizer.model_input_names if name in encoded}
            examples.append({**example, "start_positions": start, "end_positions": end})
    return examples


def _find(question: Question, places: Any) -> tuple[int, int]:
    if not question.answers:
        return 0, 0
    text, begin = question.answers[0]
    begin, end = begin + len(text) - len(text.lstrip()), begin + len(text.rstrip())
    first = np.flatnonzero((places[:, 0] <= begin) & (places[:, 1] > begin))
    last = np.flatnonzero((places[:, 0] < end) & (places[:, 1] >= end))
    return (int(first[0]), int(last[0])) if len(first) and len(last) else (0, 0)


def evaluate(model: Loaded, questions: Sequence[Question]) -> dict[str, float | None]:
    """Return the official figures of the model with its threshold, fractions of 1."""
    threshold: float = getattr(model.model.config, THRESHOLD)
    told = [text if advantage >= threshold else "" for text, advantage in _read(model, questions)]
    return figures(told, [_texts(question) for question in questions])


def tune(model: Loaded, questions: Sequence[Question]) -> float:
    """Return the least advantage over no answer, in logits, at which answering gives the best F1."""
    told = _read(model, questions)
    gains = [f1(text, _texts(question)) for (text, _), question in zip(told, questions, strict=True)]
    return best_threshold([advantage for _, advantage in told], gains, [not question.answers for question in questions])


def best_threshold(advantages: Sequence[float], gains: Sequence[float], is_unanswerable: Sequence[bool]) -> float:
    """Return the advantage over no answer (N,) above which answering scores most; 0 without data."""
    # Half way between two advantages, or beyond the first or last. An infinite one (no passage) is no boundary.
    order = np.argsort(advantages)
    ranked = np.array(advantages)[order]
    withheld = np.concatenate([[0.0], np.cumsum(np.array(is_unanswerable, dtype=float)[order])])
    given = np.concatenate([np.cumsum(np.array(gains, dtype=float)[order][::-1])[::-1], [0.0]])
    values = ranked[np.isfinite(ranked)]
    if not len(values):
        return 0.0
    cuts = np.concatenate([[values[0] - 1], (values[1:] + values[:-1]) / 2, [values[-1] + 1]])
    n_withheld = np.searchsorted(ranked, cuts)
    return float(cuts[int((withheld + given)[n_withheld].argmax())])


def _read(model: Loaded, questions: Sequence[Question]) -> list[tuple[str, float]]:
    """Return the best span for each question, and its advantage over no answer."""
    task = SquadV2(model, questions, MAX_LENGTH)
    with torch.inference_mode():
        return [
            task.read(model.model(**request.inputs), number)
            for number, request in enumerate(tracked(task.requests, "Answering"))
        ]


def _texts(question: Question) -> list[str]:
    return [text for text, _ in question.answers]
