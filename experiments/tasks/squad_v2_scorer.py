"""Exact match and F1 of SQuAD v2, as in the official scorer (Rajpurkar, Jia and Liang 2018).

Answers are compared in lower case, without punctuation, articles and extra white space. F1 is over words. Among several
accepted answers the best counts. A question without an answer scores 1 only if the prediction is empty.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def figures(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float | None]:
    """Return fractions of 1 over all questions, those with an answer, and those without; None for an empty group."""
    pairs = list(zip(answers, references, strict=True))
    exact, overlap = (np.array([score(*pair) for pair in pairs]) for score in (exact_match, f1))
    has_answer = np.array([bool(accepted) for accepted in references], dtype=bool)
    return {
        "exact": _mean(exact),
        "f1": _mean(overlap),
        "exact_answerable": _mean(exact[has_answer]),
        "f1_answerable": _mean(overlap[has_answer]),
        "exact_unanswerable": _mean(exact[~has_answer]),
    }


def exact_match(told: str, accepted: Sequence[str]) -> float:
    """Return 1.0 if the answer equals an accepted one, or both are empty; else 0.0."""
    return max(float(normalise(told) == answer) for answer in _normalised(accepted))


def f1(told: str, accepted: Sequence[str]) -> float:
    """Return the best harmonic mean of precision and recall over words, 0 to 1, among the accepted answers."""
    return max(_overlap(normalise(told).split(), answer.split()) for answer in _normalised(accepted))


def normalise(answer: str) -> str:
    """Convert to lower case, drop punctuation, then articles, and collapse white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def _normalised(accepted: Sequence[str]) -> list[str]:
    """Return the normalised accepted answers that are not empty; [""] if none is left."""
    return [text for answer in accepted if (text := normalise(answer))] or [""]


def _overlap(told: Sequence[str], right: Sequence[str]) -> float:
    if not told or not right:
        return float(told == right)
    n_shared = sum((Counter(told) & Counter(right)).values())
    return 2 * n_shared / (len(told) + len(right))


def _mean(scores: NDArray[np.float64]) -> float | None:
    return float(scores.mean()) if len(scores) else None
