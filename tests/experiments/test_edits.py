"""Edits make another request of a request, and touch a word or two of it."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.measures.edits import Renaming, edits_of, negate, oppose, renumber, words

WORDS = ("please", "turn", "on", "off", "up", "not", "never", "don't", "can", "is", "it", "two", "7", "1999", "Berlin")
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join)


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("can i pay here", "can i not pay here"),
        ("Does it work?", "Does it not work?"),
        ("play some jazz", "do not play some jazz"),
        ("I can't pay", "I can pay"),
        ("it won't open", "it will open"),
        ("why cannot i pay", "why can i pay"),
        ("it doesn't work", "it does work"),
        ("do not play jazz", "do play jazz"),
        ("I never got it", "I got it"),
        ("a documentary", "do not a documentary"),
    ],
)
def test_a_negation_is_put_in_or_taken_out(text: str, edited: str) -> None:
    assert negate(text, Random(0)) == edited


def test_words_become_their_opposites() -> None:
    assert oppose("Turn the light ON", Random(0)) == "Turn the light off"
    assert oppose("on and off", Random(0)) is None
    assert oppose("once upon a time", Random(0)) is None


@given(st.integers(0, 9999), st.integers(0, 50))
def test_numbers_become_others_of_as_many_digits(number: int, seed: int) -> None:
    edited = renumber(f"send {number} euros", Random(seed))
    assert edited is not None
    _, other, _ = edited.split()
    assert other != str(number) and len(other) == len(str(number))


def test_words_for_numbers_become_others() -> None:
    edited = renumber("wake me at seven", Random(0))
    assert edited is not None and edited.startswith("wake me at ") and edited != "wake me at seven"
    assert renumber("wake me someday", Random(0)) is None


def test_only_rare_words_are_renamed() -> None:
    rename = Renaming(["fly to Paris"] + ["fly to Berlin tomorrow"] * 3 + ["go to work"] * 6)
    assert rename("go to work", Random(0)) is None
    edited = {rename("go to paris", Random(seed)) for seed in range(20)}
    assert edited == {"go to berlin", "go to tomorrow"}


@given(TEXTS, st.integers(0, 50))
def test_every_edit_changes_little_and_something(text: str, seed: int) -> None:
    for kind, edit in edits_of(["a card from Berlin", "a card from Madrid"]).items():
        edited = edit(text, Random(seed))
        if edited is not None:
            before, after = words(text), words(edited)
            assert before != after, kind
            assert len(before) - 2 <= len(after) <= len(before) + 2, kind
            if kind != "negation":
                assert sum(one != other for one, other in zip(before, after, strict=True)) == 1, kind
