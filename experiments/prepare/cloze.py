"""Questions made from plain text, to pretrain span selection before real questions.

A name or number that a passage mentions in several sentences is hidden in one of them. That sentence is the question;
the rest of the passage has the answer (recurring span selection, Ram et al. 2021, section 3, with the wh-word of Lewis
et al. 2019 in place of the hidden span). For a share of the questions, the sentences with the answer are left out, so
there is no answer.
"""

import random
import re
from collections.abc import Iterable

from experiments.data.published import UNK, Question

_SPAN = re.compile(r"(?:[A-Z][\w'-]+|\d[\d,.]*\d)(?: (?:of |the |de )?(?:[A-Z][\w'-]+|\d[\d,.]*\d))*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")
_COMMON_WORDS = """
The This That These Those There Their They Then Thus When Where While Which What Who With Within Without His Her He She
It Its In On At By For From After Before During Although However Some Many Most Other Another Both One Two Three As An
And But Not No Despite Since Until Under Over Also Because If To Of Each All Only Once Later Such Additionally
"""
_COMMON = frozenset(_COMMON_WORDS.split())
FEWEST_WORDS, MOST_WORDS = 60, 220


def make_clozes(passages: Iterable[str], n: int, share_unanswerable: float, seed: int) -> list[Question]:
    """Return at most `n` cloze questions, each from another passage as long as there are enough."""
    rng = random.Random(seed)
    usable = [text for text in passages if FEWEST_WORDS <= len(text.split()) <= MOST_WORDS and UNK not in text]
    rng.shuffle(usable)
    made: list[Question] = []
    for turn in range(3):
        for number, passage in enumerate(usable):
            if len(made) == n:
                return made
            is_answerable = rng.random() >= share_unanswerable
            if question := _cloze(passage, f"cloze-{turn}-{number}", is_answerable, rng):
                made.append(question)
    return made


def plain(line: str) -> str:
    """Return a line of WikiText as ordinary text, with hyphens, punctuation and quotes as in print."""
    text = re.sub(r" @(.)@ ", r"\1", line)
    text = re.sub(r" ([.,;:!?)\]%]|'s|n't|'re|'ve|'ll|'d)(?= |$)", r"\1", text)
    text = re.sub(r'" ([^"]*) "', r'"\1"', text)
    return re.sub(r"([(\[$]) ", r"\1", text)


def _cloze(passage: str, name: str, is_answerable: bool, rng: random.Random) -> Question | None:
    """Return a question on a passage, or None if the passage mentions nothing twice."""
    sentences = _SENTENCE.split(passage)
    mentions: dict[str, list[int]] = {}
    for number, sentence in enumerate(sentences):
        for span in {match.group() for match in _SPAN.finditer(sentence)}:
            mentions.setdefault(span, []).append(number)
    spans = sorted(span for span, where in mentions.items() if len(where) > 1 and span not in _COMMON)
    if not spans:
        return None
    span = rng.choice(spans)
    hidden = rng.choice(mentions[span])
    rest = [sentence for number, sentence in enumerate(sentences) if number != hidden]
    if not is_answerable:
        rest = [sentence for sentence in rest if span not in sentence]
    if not rest:
        return None
    context = " ".join(rest)
    found = re.finditer(rf"\b{re.escape(span)}\b", context) if is_answerable else ()
    answers = tuple((span, match.start()) for match in found)
    if is_answerable and not answers:  # found only inside longer words
        return None
    asked = sentences[hidden].replace(span, "what").rstrip(".") + "?"
    return Question(name, "cloze", asked, context, answers)
