"""Small edits of a request that make it another one: adversaries of a cache that goes by what requests are like.

Each keeps all but a word or two, so that a vector of meaning hardly moves. Made by rule from English requests: not all
of them read well, and of some the model's answer is rightly the same.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random

#: `(text, rng) -> edited text`, or None where the text offers nothing to edit.
Edit = Callable[[str, Random], str | None]

_MOST = 5  # requests that a rare word may be in: among some thousand that is a name, a place or a slip
_SHORTEST = 4  # letters of a rare word: shorter ones are mostly pieces of others
_SUBJECTS = "i|you|we|they|it|he|she|this|that|there|my|your|the"
_AUXILIARIES = "am|is|are|was|were|do|does|did|can|could|will|would|should|may|must|have|has|had"
_AUXILIARY = re.compile(rf"\b({_AUXILIARIES})\b(\s+(?:{_SUBJECTS})\b)?", re.IGNORECASE)
_CONTRACTED = {"can't": "can", "won't": "will", "cannot": "can"}
# Common English opposites and words for numbers, whether the content gate knows them or not: it is what is tried.
_OPPOSITES = tuple(
    tuple(pair.split("/"))
    for pair in (
        *("on/off", "up/down", "in/out", "before/after", "more/less", "most/least", "first/last", "add/remove"),
        *("open/close", "start/stop", "enable/disable", "increase/decrease", "raise/lower", "accept/decline"),
        *("buy/sell", "send/receive", "lock/unlock", "with/without", "always/never", "activate/deactivate"),
        *("cheap/expensive", "fast/slow", "early/late", "high/low", "long/short", "new/old", "big/small", "good/bad"),
        *("best/worst", "better/worse", "left/right", "inside/outside", "above/below", "begin/end", "come/go"),
        *("pay/refund", "deposit/withdraw", "failed/succeeded", "lost/found", "win/lose", "won/lost", "give/take"),
        *("push/pull", "load/unload", "show/hide", "remember/forget", "today/tomorrow", "morning/evening", "day/night"),
        *("hot/cold", "loud/quiet", "louder/quieter", "happy/sad", "same/different", "possible/impossible"),
        *("correct/incorrect", "many/few", "all/none", "next/previous", "public/private", "physical/virtual"),
    )
)
_NUMBERS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "fifteen", "twenty"),
    *("thirty", "fifty", "hundred", "thousand", "second", "third", "fourth", "fifth", "once", "twice", "dozen"),
    *("half", "double", "couple"),
)
_NEGATED = re.compile(r"\b(can't|won't|cannot|(\w+)n't|not|never)\b\s*", re.IGNORECASE)


def negate(text: str, rng: Random) -> str | None:
    """Take the first negation out; where there is none, put one in."""
    found = _NEGATED.search(text)
    if found is not None:
        left = _CONTRACTED.get(found[1].lower(), found[2] or "")
        return " ".join(f"{text[: found.start()]}{left} {text[found.end() :]}".split())
    auxiliary = _AUXILIARY.search(text)
    if auxiliary is None:
        return f"do not {text}"
    return f"{text[: auxiliary.end()]} not{text[auxiliary.end() :]}"


def oppose(text: str, rng: Random) -> str | None:
    """Turn a word into its opposite, if that is not there as well."""
    said = set(words(text))
    turns = [
        (one, other) for a, b in _OPPOSITES for one, other in ((a, b), (b, a)) if one in said and other not in said
    ]
    return _replace(text, *rng.choice(turns)) if turns else None


def renumber(text: str, rng: Random) -> str | None:
    """Turn a number into another one: digits into as many others, a word for a number into another such word."""
    numbers = [word for word in words(text) if word.isdecimal() or word in _NUMBERS]
    if not numbers:
        return None
    old = rng.choice(numbers)
    if not old.isdecimal():
        return _replace(text, old, rng.choice([word for word in _NUMBERS if word != old]))
    first, last = (0, 9) if len(old) == 1 else (10 ** (len(old) - 1), 10 ** len(old) - 1)
    return _replace(text, old, str(rng.choice([n for n in (first, last, rng.randint(first, last)) if n != int(old)])))


class Renaming:
    """Turns a rare word of a request, a name mostly, into a rare word of another one."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts = Counter(word for text in texts for word in set(words(text)))
        self._rare = sorted(
            word for word, n in counts.items() if n <= _MOST and len(word) >= _SHORTEST and word.isalpha()
        )
        self._is_rare = set(self._rare)

    def __call__(self, text: str, rng: Random) -> str | None:
        own = [word for word in words(text) if word in self._is_rare]
        others = [word for word in self._rare if word not in own]
        return _replace(text, rng.choice(own), rng.choice(others)) if own and others else None


def edits_of(texts: Iterable[str]) -> Mapping[str, Edit]:
    """All kinds of edits by name, for the requests of one stream."""
    return {"negation": negate, "opposite": oppose, "number": renumber, "name": Renaming(texts)}


def words(text: str) -> list[str]:
    """Words and numbers, in small letters."""
    return re.findall(r"[^\W_]+", text.lower())


def _replace(text: str, old: str, new: str) -> str:
    """The text with the first of the words that are `old` replaced."""
    return re.sub(rf"(?<![^\W_]){re.escape(old)}(?![^\W_])", new, text, count=1, flags=re.IGNORECASE)
