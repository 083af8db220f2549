"""A synthetic stream of requests to the support desk of an online shop with a subscription and an app.

Each request is one of three kinds (shares below), since real traffic repeats itself:

- *repeat*: an earlier distinct text, character by character;
- *near*: the paraphrase of an earlier request, with other slots, opener, closer and noise;
- *fresh*: an intent by popularity, any of its paraphrases with equal chance, new slots and noise.

Popularity is Zipf's law with an offset: rank r (from 0) has weight 1 / (offset + r). Intents are ranked as
`support_desk.yaml` lists them; texts and paraphrases by age, so early ones come back more often, and their intents
gain. There are at least 100 ranks, and an empty rank gives a fresh request: repeats are rarer until some 100 texts
exist. The label is the drawn intent; noise never changes it. A fresh or near request can equal an earlier text by
chance, which adds one to three points to the share of exact repeats.

Only `random.Random.random` and correctly rounded arithmetic are used, so a seed gives the same stream everywhere.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

import yaml

PHRASES: Final[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
INTENTS: Final[tuple[str, ...]] = tuple(PHRASES["templates"])

_T = TypeVar("_T")
_ALTERNATIVES: Final = re.compile(r"\[([^\]]*)\]")
_SLOT: Final = re.compile(r"\{(\w+)\}")
_DIGIT: Final = re.compile("#")
_SHORT_FORMS: Final[dict[str, str]] = PHRASES["contractions"]
_CONTRACTIBLE: Final = re.compile(r"\b(" + "|".join(_SHORT_FORMS) + r")\b")
_SENTENCE_START: Final = re.compile(r"(?:^|[.?!] )[a-z]")
_PUNCTUATION: Final = re.compile(r"[.,:?!]+(?= |$)")
_MIN_TYPO_LENGTH: Final = 4
_MIN_RANKS: Final = 100  # without this floor, the first few requests would come back again and again

# Shares of requests that come back; the rest are fresh.
REPEAT_SHARE: Final = 0.15  # exact repeats, besides chance repeats
NEAR_SHARE: Final = 0.45  # known paraphrases with other slots and noise
# Offsets of popularity, in ranks; higher is flatter.
INTENT_OFFSET: Final = 12.0
REPEAT_OFFSET: Final = 20.0  # for texts and paraphrases that come back

# Probabilities of writing habits, per request unless noted otherwise.
OPENER: Final = 0.3  # a greeting at the start
CONTEXT: Final = 0.1  # a sentence that fits any request, before or after the question
CLOSER: Final = 0.25  # thanks or similar at the end
FILLER_WORD: Final = 0.15  # a filler ("just", "actually") is inserted
CONTRACTION: Final = 0.6  # "do not" becomes "don't", per occurrence
NO_APOSTROPHE: Final = 0.25
TYPO: Final = 0.015  # two letters swapped, one dropped or one doubled, per word of four letters or more
NO_PUNCTUATION: Final = 0.3  # commas and marks at word ends are left out
LOWER: Final = 0.35
UPPER: Final = 0.01


@dataclass(frozen=True, slots=True)
class Request:
    text: str  # what the customer wrote, one line
    label: str  # the intent, one of `INTENTS`


class _Paraphrase(NamedTuple):
    """A template with chosen alternatives and open slots."""

    text: str
    label: str


def support_desk(n: int = 2000, seed: int = 0) -> list[Request]:
    """Return `n` requests, the same on every machine. A longer stream of a seed begins with the shorter one."""
    if n < 0 or seed < 0:
        raise ValueError(f"n and seed must be 0 or more, got n={n}, seed={seed}")
    desk = _Desk(Random(seed))
    return [desk.next_request() for _ in range(n)]


class _Desk:
    """State of a stream: distinct requests and paraphrases so far, oldest first."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._intent_weights = _zipf(len(INTENTS), INTENT_OFFSET)
        self._age_weights: list[float] = []
        self._requests: list[Request] = []
        self._seen: set[Request] = set()
        self._paraphrases: list[_Paraphrase] = []

    def next_request(self) -> Request:
        kind = self._rng.random()
        if kind < REPEAT_SHARE:
            request = self._old(self._requests)
            if request is not None:
                return request
        is_near = REPEAT_SHARE <= kind < REPEAT_SHARE + NEAR_SHARE
        paraphrase = (self._old(self._paraphrases) if is_near else None) or self._fresh()
        request = Request(_write(paraphrase.text, self._rng), paraphrase.label)
        if request not in self._seen:
            self._seen.add(request)
            self._requests.append(request)
        return request

    def _fresh(self) -> _Paraphrase:
        label = INTENTS[_draw(self._rng, self._intent_weights, len(INTENTS))]
        template = _pick(self._rng, PHRASES["templates"][label])
        text = _ALTERNATIVES.sub(lambda match: _pick(self._rng, match[1].split("|")), template)
        self._paraphrases.append(_Paraphrase(text, label))
        return self._paraphrases[-1]

    def _old(self, things: Sequence[_T]) -> _T | None:
        """Draw an item by popularity; None if the drawn rank is empty."""
        n_ranks = max(len(things), _MIN_RANKS)
        if len(self._age_weights) < n_ranks:
            self._age_weights = _zipf(2 * n_ranks, REPEAT_OFFSET)
        rank = _draw(self._rng, self._age_weights, n_ranks)
        return things[rank] if rank < len(things) else None


def _write(paraphrase: str, rng: Random) -> str:
    """Fill the slots of a paraphrase, add opener, closer and context, and add noise."""
    parts = [paraphrase]
    if rng.random() < CONTEXT:
        parts.insert(_pick(rng, (0, 1)), _pick(rng, PHRASES["contexts"]))
    if rng.random() < OPENER:
        parts.insert(0, _pick(rng, PHRASES["openers"]))
    if rng.random() < CLOSER:
        parts.append(_pick(rng, PHRASES["closers"]))
    text = _fill(" ".join(parts), rng)
    text = _CONTRACTIBLE.sub(lambda m: _SHORT_FORMS[m[1]] if rng.random() < CONTRACTION else m[1], text)
    if rng.random() < FILLER_WORD:
        words = text.split(" ")
        words.insert(1 + int(rng.random() * (len(words) - 1)), _pick(rng, PHRASES["filler_words"]))
        text = " ".join(words)
    text = " ".join(_mistyped(word, rng) if rng.random() < TYPO else word for word in text.split(" "))
    return _restyled(_SENTENCE_START.sub(lambda m: m[0].upper(), text), rng)


def _fill(text: str, rng: Random) -> str:
    """Fill each slot, with the same words at each occurrence, and replace each ``#`` by a random digit."""
    values: dict[str, str] = {}
    for slot in _SLOT.findall(text):
        if slot not in values:
            values[slot] = _DIGIT.sub(lambda _: str(int(rng.random() * 10)), _pick(rng, PHRASES["fillers"][slot]))
    text = _DIGIT.sub(lambda _: str(int(rng.random() * 10)), text)
    return _SLOT.sub(lambda match: values[match[1]], text)


def _mistyped(word: str, rng: Random) -> str:
    """Swap, drop or double a letter, never the first. Short words and words with digits or marks stay unchanged."""
    if len(word) < _MIN_TYPO_LENGTH or not word.isalpha():
        return word
    at = 1 + int(rng.random() * (len(word) - 2))
    middle = _pick(rng, (word[at + 1] + word[at], word[at + 1], word[at] * 2 + word[at + 1]))
    return word[:at] + middle + word[at + 2 :]


def _restyled(text: str, rng: Random) -> str:
    """Drop apostrophes and punctuation, and change case, each with its probability."""
    if rng.random() < NO_APOSTROPHE:
        text = text.replace("'", "")
    if rng.random() < NO_PUNCTUATION:
        text = _PUNCTUATION.sub("", text)
    case = rng.random()
    if case < LOWER:
        return text.lower()
    return text.upper() if case > 1.0 - UPPER else text


def _pick(rng: Random, options: Sequence[_T]) -> _T:
    return options[int(rng.random() * len(options))]


def _zipf(n: int, offset: float) -> list[float]:
    """Return the running totals of 1 / (offset + rank) for `n` ranks."""
    return list(accumulate(1.0 / (offset + rank) for rank in range(n)))


def _draw(rng: Random, totals: Sequence[float], n: int) -> int:
    """Draw one of the first `n` ranks by weight, given the weights' running totals."""
    return bisect_right(totals, rng.random() * totals[n - 1], 0, n - 1)
