"""The content gate refuses reuse if a word turns the meaning."""

import numpy as np
import pytest

from llmcache.reuse.content_gate import ContentGate

WORDS = (
    *("turn", "the", "light", "on", "off", "up", "please", "do", "n't", "not", "never", "set", "alarm", "for"),
    *("7", "30", "seven", "eight", "in", "boston", "paris", "##s", "▁on"),
)


class Words:
    """A tokenizer of whole words."""

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(WORDS)}


def packed(text: str) -> bytes:
    return np.array([WORDS.index(word) for word in text.split()], np.uint16).tobytes()


def gate(**options: object) -> ContentGate:
    return ContentGate(Words(), np.dtype(np.uint16), **options)


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ("turn the light on", "please turn the light on", ""),
        ("turn the light on", "turn the light on", ""),
        ("turn the light on", "turn the light off", "opposite"),
        ("turn the light off", "turn the light ▁on", "opposite"),
        ("turn the light on", "do n't turn the light on", "negation"),
        ("do not turn the light on", "never turn the light on", ""),
        ("set alarm for 7", "set alarm for 7 please", ""),
        ("set alarm for 7", "set alarm for 30", "number"),
        ("set alarm for seven", "set alarm for eight", "number"),
        ("set alarm for seven", "set the alarm", "number"),
        ("set alarm in boston", "set alarm in paris", ""),
    ],
)
def test_words_that_turn_the_meaning(one: str, other: str, why: str) -> None:
    assert gate().refuses(packed(one), packed(other)) == why
    assert gate().refuses(packed(other), packed(one)) == why


def test_rare_words_may_not_differ_beyond_the_limit() -> None:
    limited = gate(max_idf=1.0)
    boston, paris, common = (packed(f"set alarm in {word}") for word in ("boston", "paris", "the"))
    assert limited.refuses(boston, paris) == ""  # nothing is rare before it has learned
    limited.learn([common, common, common, boston])
    assert limited.refuses(boston, paris) == "rare word"
    assert limited.refuses(common, packed("set alarm the")) == ""


def test_words_are_the_users_to_choose() -> None:
    own = gate(negations=("please",), opposites=("boston/paris",), numbers=())
    assert own.refuses(packed("turn the light on"), packed("please turn the light on")) == "negation"
    assert own.refuses(packed("in boston"), packed("in paris")) == "opposite"
    assert own.refuses(packed("set alarm for seven"), packed("set alarm for eight")) == ""
    assert own.refuses(packed("set alarm for 7"), packed("set alarm for 30")) == "number"
