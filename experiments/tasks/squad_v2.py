"""Task `squad_v2`: answer with a span of the passage, or with nothing. Requests come in data order, by passage.

Exact match and F1 are those of the official scorer (Rajpurkar, Jia and Liang 2018): answers are compared in lower case,
without punctuation, articles and extra white space; F1 is over words; among several accepted answers the best counts;
a question without an answer scores 1 only if the prediction is empty.

Sizes: N questions, T tokens, W windows of a passage.
"""

import hashlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.data.made import make_questions
from experiments.data.published import Question, read_squad
from experiments.models.loading import Inputs, Loaded, check_length, load
from experiments.support.files import Folders
from experiments.tasks.workload import OfficialSettings, Request, Workload

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


MOST_TOKENS = 30  # per answer, as in the reference implementations
MOST_ASKED = 64  # tokens per question
THRESHOLD = "no_answer_threshold"  # key in the model's config


class Settings(OfficialSettings):
    name: Literal["squad_v2"]
    max_length: int = Field(default=384, ge=96)  # most tokens per request; longer passages are cut at the end
    # Take every n-th passage, with all its questions: a sample from all articles, in order.
    every: int = Field(default=1, ge=1)

    def build(self, folders: Folders, seed: int) -> "SquadV2":
        is_made = self.data == "made"
        questions = make_questions(seed) if is_made else read_squad("validation", folders.data)
        loaded = load(self.model, "span", folders.models)
        check_length(loaded, self.max_length)
        asked = _sample(questions, self.every)[: self.limit]
        workload = SquadV2(loaded, asked, self.max_length)
        workload.facts |= {"n_all": len(questions), "n_articles": len({question.title for question in asked})}
        return workload


def _sample(questions: Sequence[Question], every: int) -> list[Question]:
    """Return all questions of each `every`-th passage, in order."""
    kept = set(list(dict.fromkeys(question.context for question in questions))[::every])
    return [question for question in questions if question.context in kept]


class SquadV2(Workload):
    """Extractive question answering with a model that has two output columns: start and end of the answer.

    One window per request: a passage that does not fit is cut, equally for every method.
    """

    metric = "f1"

    def __init__(self, loaded: Loaded, questions: Sequence[Question], max_length: int) -> None:
        """Tokenise the questions. The model's config may hold `no_answer_threshold`; it is 0 otherwise."""
        self.module = loaded.model
        self.tokenizer = loaded.tokenizer
        self._threshold = float(getattr(loaded.model.config, THRESHOLD, 0.0))
        self._offsets: list[NDArray[np.int64]] = []
        self._contexts = [question.context for question in questions]
        self.requests = [self._encode(question, max_length) for question in questions]
        pairs = zip(self._offsets, self._contexts, strict=True)
        cut = [len(offsets) == max_length and offsets[:, 1].max() < len(text.rstrip()) for offsets, text in pairs]
        self.facts = {
            "n_passages": len({question.context for question in questions}),
            "share_unanswerable": float(np.mean([not question.answers for question in questions])),
            "share_cut": float(np.mean(cut)),
            "no_answer_threshold": self._threshold,
        }

    def _encode(self, question: Question, max_length: int) -> Request:
        encoded = encode(self.tokenizer, question.text, question.context, max_length)
        self._offsets.append(in_context(encoded))
        inputs: Inputs = dict(encoded.convert_to_tensors("pt", prepend_batch_axis=True))
        references = [text for text, _ in question.answers]
        return Request(question.id, inputs, f"{question.text} {question.context}", references, question.context)

    def answer(self, output: Any, number: int) -> str:
        """Return the best span of this request's passage; "" unless it beats no answer by the threshold."""
        text, advantage = self.read(output, number)
        return text if advantage >= self._threshold else ""

    def read(self, output: Any, number: int) -> tuple[str, float]:
        """Return the best span, and its score minus that of no answer, in logits."""
        starts, ends = (logits[0].float().numpy() for logits in (output.start_logits, output.end_logits))
        span, advantage = best_span(starts, ends, self._offsets[number])
        return ("" if span is None else self._contexts[number][span[0] : span[1]]), advantage

    def scores(self, answers: Sequence[str]) -> NDArray[np.float64]:
        pairs = zip(answers, self.requests, strict=True)
        return np.array([f1(told, request.reference) for told, request in pairs])

    def extras(self, answers: Sequence[str]) -> dict[str, float | None]:
        return figures(answers, [request.reference for request in self.requests])

    def show(self, answer: str) -> str:
        """Return a short digest, since the text belongs to the data set."""
        return hashlib.sha256(answer.encode()).hexdigest()[:8] if answer else ""


def encode(tokenizer: Any, question: str, context: str, max_length: int, stride: int | None = None) -> Any:
    """Tokenise question (cut if long) and passage into one sequence with offsets; with `stride`, into all windows."""
    options = {} if stride is None else {"stride": stride, "return_overflowing_tokens": True}
    asked = tokenizer(question.strip(), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    kept = asked[: min(MOST_ASKED, max_length // 2)]
    end = kept[-1][1] if kept else 0
    return tokenizer(
        question.strip()[:end],
        context,
        truncation="only_second",
        max_length=max_length,
        return_offsets_mapping=True,
        **options,
    )


def in_context(encoded: Any, window: int = 0) -> NDArray[np.int64]:
    """Pop the offsets from `encoded`; return the passage characters (T, 2) of each token, -1 for other tokens."""
    offsets = encoded.pop("offset_mapping")
    rows = offsets[window] if isinstance(offsets[0], list) else offsets
    found = np.array(rows, dtype=np.int64)
    found[[part != 1 for part in encoded.sequence_ids(window)]] = -1
    return found


def best_span(
    starts: NDArray[np.float32], ends: NDArray[np.float32], offsets: NDArray[np.int64]
) -> tuple[tuple[int, int] | None, float]:
    """Return the best span in characters, None if none, and its score minus that of no answer (first token, twice)."""
    # Scores (T,) may come from another request of another length: positions beyond the shorter one are impossible.
    places = np.flatnonzero(offsets[: len(starts), 0] >= 0)
    if not len(places):
        return None, -np.inf
    first, last = places[0], places[-1] + 1
    scores = starts[first:last, None] + ends[None, first:last]
    n = last - first
    distance = np.arange(n)[None, :] - np.arange(n)[:, None]
    scores[(distance < 0) | (distance >= MOST_TOKENS)] = -np.inf
    start, end = np.unravel_index(int(scores.argmax()), scores.shape)
    span = int(offsets[first + start, 0]), int(offsets[first + end, 1])
    return span, float(scores[start, end] - starts[0] - ends[0])
