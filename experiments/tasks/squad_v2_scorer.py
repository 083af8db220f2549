"""Exact match and F1 of SQuAD v2, as the official scorer defines them (Rajpurkar, Jia and Liang 2018).

A metric module of Hugging Face `evaluate`, which needs no network:

    metric = evaluate.load("experiments/tasks/squad_v2_scorer.py")
    metric.compute(predictions=["Amazonia", ""], references=[["Amazonia", "the Amazon"], []])

An answer is compared in lower case, without punctuation, articles and extra white space. F1 is over words. Of several
accepted answers the best counts. A question without an answer is right (1) only when nothing was predicted.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import evaluate

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class SquadV2(evaluate.Metric):
    """Exact match and F1 in percent, over all questions and over those that have an answer, or have none."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Exact match and F1 of SQuAD v2",
            citation="Rajpurkar, Jia and Liang (2018): Know What You Don't Know",
            inputs_description="predictions: answers or nothing; references: lists of accepted answers, empty for none",
            features=datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
        exact = [exact_match(told, accepted) for told, accepted in zip(predictions, references, strict=True)]
        overlap = [f1(told, accepted) for told, accepted in zip(predictions, references, strict=True)]
        answerable = [bool(accepted) for accepted in references]
        unanswerable = [not accepted for accepted in references]
        return {
            "exact": _percent(exact),
            "f1": _percent(overlap),
            "total": len(exact),
            "exact_answerable": _percent(exact, answerable),
            "f1_answerable": _percent(overlap, answerable),
            "n_answerable": sum(answerable),
            "exact_unanswerable": _percent(exact, unanswerable),
        }


def load() -> SquadV2:
    """The metric as `evaluate.load` makes it, but without that function's copy of this file in the user's cache."""
    # So a cache folder that cannot be written is not in the way, and other processes are not either.
    with TemporaryDirectory() as folder:  # evaluate wants one, even for what it keeps in memory
        return SquadV2(keep_in_memory=True, cache_dir=folder)


def exact_match(told: str, accepted: Sequence[str]) -> float:
    """1.0 if the answer equals an accepted one, or both are nothing; else 0.0."""
    return max(float(normalise(told) == answer) for answer in _normalised(accepted))


def f1(told: str, accepted: Sequence[str]) -> float:
    """Best harmonic mean of precision and recall over words, 0 to 1, among the accepted answers."""
    return max(_overlap(normalise(told).split(), answer.split()) for answer in _normalised(accepted))


def normalise(answer: str) -> str:
    """Lower case; punctuation, then articles gone; single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def _normalised(accepted: Sequence[str]) -> list[str]:
    """Accepted answers that are more than articles and punctuation; the empty one where none is left."""
    return [text for answer in accepted if (text := normalise(answer))] or [""]


def _overlap(told: Sequence[str], right: Sequence[str]) -> float:
    if not told or not right:
        return float(told == right)
    n_shared = sum((Counter(told) & Counter(right)).values())
    return 2 * n_shared / (len(told) + len(right))


def _percent(scores: Sequence[float], chosen: Sequence[bool] | None = None) -> float | None:
    kept = scores if chosen is None else [score for score, is_chosen in zip(scores, chosen, strict=True) if is_chosen]
    return 100 * sum(kept) / len(kept) if kept else None
