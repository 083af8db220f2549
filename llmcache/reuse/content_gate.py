"""The content gate: refuses a source that differs from the request in words that change the meaning.

Fingerprints miss such words: "turn the light on" and "turn the light off" have similar fingerprints. So once a source
is chosen, tokens are compared: negations, opposites, numbers, and words so rare that they may be names.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf, log
from typing import Any

import numpy as np

from llmcache.support.arrays import Floats

#: English. Many tokenizers split "don't" so that "t" is a token.
NEGATIONS = ("no", "not", "never", "none", "nobody", "nothing", "nowhere", "neither", "nor", "cannot", "t", "n't")
OPPOSITES = (
    *("on/off", "up/down", "in/out", "before/after", "more/less", "most/least", "first/last", "add/remove"),
    *("open/close", "opened/closed", "start/stop", "enable/disable", "increase/decrease", "raise/lower"),
    *("accept/decline", "allow/block", "buy/sell", "send/receive", "lock/unlock", "mute/unmute", "with/without"),
    *("always/never", "activate/deactivate", "subscribe/unsubscribe"),
)
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty"),
    *("fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand", "million", "billion"),
)
_MARKS = "#Ġ▁"  # prefixes by which tokenizers mark word pieces and word starts


class ContentGate:
    """Compares the tokens of two requests. Thread-safe once it has learned."""

    def __init__(
        self,
        tokenizer: Any,
        dtype: np.dtype[Any],
        max_idf: float | None = None,
        negations: Sequence[str] = NEGATIONS,
        opposites: Sequence[str] = OPPOSITES,
        numbers: Sequence[str] = NUMBERS,
    ) -> None:
        """Find the token ids of these words in the vocabulary.

        Args:
            tokenizer: A tokenizer of transformers, for its vocabulary.
            dtype: Dtype of packed token ids.
            max_idf: Largest ln((N + 1) / (n + 1)) of a token that only one of two requests may have, where `n` of the
                `N` learned requests have it; None: no limit.
            negations: Negations: both requests must have some, or neither.
            opposites: Pairs "a/b": if one request has only a, the other must not have only b.
            numbers: Words that count as numbers, besides tokens with a digit: both requests must have the same.
        """
        self._dtype = dtype
        self._max_idf = inf if max_idf is None else max_idf
        ids: dict[str, set[int]] = {}
        for token, number in tokenizer.get_vocab().items():
            ids.setdefault(token.strip(_MARKS).lower(), set()).add(number)
        self._negations = _ids_of(ids, negations)
        digits = [word for word in ids if any(mark.isdigit() for mark in word)]
        self._numbers = _ids_of(ids, (*numbers, *digits))
        pairs = [pair.split("/") for pair in opposites]
        self._opposites = [(_ids_of(ids, pair[:1]), _ids_of(ids, pair[1:])) for pair in pairs]
        self._idf: dict[int, float] = {}
        self._unseen = 0.0  # before `learn`, no token is rare

    def learn(self, requests: Iterable[bytes]) -> None:
        """Learn the rarity of tokens from requests, given as packed token ids."""
        counts: Counter[int] = Counter()
        n = 0
        for ids in requests:
            counts.update(self._tokens(ids))
            n += 1
        self._idf = {token: log((n + 1) / (count + 1)) for token, count in counts.items()}
        self._unseen = log(n + 1)

    def state(self) -> dict[str, Floats]:
        """Return the rarity of each seen token, and of unseen tokens."""
        tokens = list(self._idf)
        rarity = [self._idf[token] for token in tokens]
        return {
            name: np.array(a, np.float32)
            for name, a in (("tokens", tokens), ("idf", rarity), ("unseen", [self._unseen]))
        }

    def restore(self, state: Mapping[str, Floats]) -> None:
        self._idf = dict(zip(state["tokens"].astype(int).tolist(), state["idf"].tolist(), strict=True))
        self._unseen = float(state["unseen"][0])

    def refuses(self, request: bytes, other: bytes) -> str:
        """Return why a request must not serve another, given the packed token ids of both, or ""."""
        mine, its = self._tokens(request), self._tokens(other)
        differing = mine ^ its
        if not differing:
            return ""
        if bool(mine & self._negations) != bool(its & self._negations):
            return "negation"
        if differing & self._numbers:
            return "number"
        for a, b in self._opposites:
            if _sides(mine, a, b) * _sides(its, a, b) < 0:
                return "opposite"
        if any(self._idf.get(token, self._unseen) > self._max_idf for token in differing):
            return "rare word"
        return ""

    def _tokens(self, ids: bytes) -> set[int]:
        return set(np.frombuffer(ids, self._dtype).tolist())


def _ids_of(ids: Mapping[str, set[int]], words: Iterable[str]) -> set[int]:
    """Return the ids of all tokens that equal one of the words."""
    return {number for word in words for number in ids.get(word, ())}


def _sides(tokens: set[int], a: set[int], b: set[int]) -> int:
    """Return 1 if a request has only a of an opposite a/b, -1 if only b, 0 for both or neither."""
    return bool(tokens & a) - bool(tokens & b)
