"""Exact match and F1 of SQuAD v2, as the official scorer defines them (Rajpurkar, Jia and Liang 2018).

An answer is compared in lower case, without punctuation, articles and extra white space. F1 is over words. Of several
accepted answers the best counts. A question without an answer is right (1) only when nothing was predicted.
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
    """Fractions of 1, over all questions and over those that have an answer, or have none; None where none are."""
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


def _mean(scores: NDArray[np.float64]) -> float | None:
    return float(scores.mean()) if len(scores) else None
