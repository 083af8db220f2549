"""Exact match and F1 as the official script for SQuAD v2.0 defines them: hand-made cases."""

from collections.abc import Sequence
from pathlib import Path

import evaluate
import pytest
from hypothesis import strategies as st

from experiments.tasks.scorers import squad_v2 as scorer
from experiments.tasks.scorers.squad_v2 import exact_match, f1, normalise


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The  Amazon,\tbasin.", "amazon basin"),
        ("An apple a day", "apple day"),
        ("theatre of another", "theatre of another"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation goes first, so no article is left to drop
        ("A.", ""),
        ("$5,500", "5500"),
        ("São «Paulo»", "são «paulo»"),  # only ASCII punctuation is dropped
        ("ÉTÉ\u00a0X", "été x"),  # a no-break space is white space
        ("", ""),
    ],
)
def test_normalise(answer: str, normal: str) -> None:
    assert normalise(answer) == normal


@pytest.mark.parametrize(
    ("told", "accepted", "exact", "overlap"),
    [
        ("Amazon basin", ["the Amazon Basin."], 1, 1),
        ("amazon", ["Amazon basin"], 0, 2 / 3),
        ("the big river basin", ["river delta", "big basin"], 0, 4 / 5),  # the best accepted answer counts
        ("x", ["y", "x", "z"], 1, 1),
        ("a a b b", ["b b b c"], 0, 4 / 6),  # words count as often as both have them; articles do not
        ("b a", ["a b c"], 0, 2 / 3),
        ("no", ["yes"], 0, 0),
        ("", [], 1, 1),  # rightly nothing
        ("x", [], 0, 0),  # something where there is nothing
        ("", ["x"], 0, 0),  # nothing where there is something
        ("the", ["x"], 0, 0),  # told nothing but an article
        ("the", [], 1, 1),
        ("", ["The", "..."], 1, 1),  # accepted answers that are nothing are as none
        ("x", ["a"], 0, 0),
        ("", ["the", "x"], 0, 0),  # but one that is something stays alone
        ("été", ["ÉTÉ"], 1, 1),
        ("été", ["ete"], 0, 0),
    ],
)
def test_scores(told: str, accepted: list[str], exact: float, overlap: float) -> None:
    assert exact_match(told, accepted) == exact
    assert f1(told, accepted) == pytest.approx(overlap)


words = st.lists(st.sampled_from(["x", "y", "z", "the", "X.", ","]), max_size=5).map(" ".join)


PREDICTIONS = ["Amazon", "wrong", "river basin", "", "something"]
REFERENCES: Sequence[Sequence[str]] = [["the Amazon", "x"], ["right"], ["big river basin"], [], []]
SCORES = {
    "exact": 100 * 2 / 5,
    "f1": 100 * (1 + 0 + 4 / 5 + 1 + 0) / 5,
    "total": 5,
    "exact_answerable": 100 / 3,
    "f1_answerable": 100 * (1 + 4 / 5) / 3,
    "n_answerable": 3,
    "exact_unanswerable": 50.0,
}


def test_through_evaluate() -> None:
    path = Path(scorer.__file__)
    metric = evaluate.load(str(path), keep_in_memory=True)
    assert metric.compute(predictions=PREDICTIONS, references=REFERENCES) == pytest.approx(SCORES)
