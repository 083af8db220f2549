"""Exact match and F1 as the official script for SQuAD v2.0 defines them: hand-made cases."""

import pytest

from experiments.tasks.squad_v2_scorer import exact_match, f1, figures


@pytest.mark.parametrize(
    ("told", "accepted", "exact", "overlap"),
    [
        ("Amazon basin", ["the Amazon Basin."], 1, 1),
        ("amazon", ["Amazon basin"], 0, 2 / 3),
        ("the big river basin", ["river delta", "big basin"], 0, 4 / 5),  # the best accepted answer counts
        ("x", ["y", "x", "z"], 1, 1),
        ("a a b b", ["b b b c"], 0, 4 / 6),  # repeated words count as often as both have them; articles are ignored
        ("b a", ["a b c"], 0, 2 / 3),
        ("no", ["yes"], 0, 0),
        ("", [], 1, 1),  # rightly no answer
        ("x", [], 0, 0),  # an answer where there is none
        ("", ["x"], 0, 0),  # no answer where there is one
        ("the", ["x"], 0, 0),  # only an article
        ("the", [], 1, 1),
        ("", ["The", "..."], 1, 1),  # empty accepted answers count as none
        ("x", ["a"], 0, 0),
        ("", ["the", "x"], 0, 0),  # beside a real one, empty ones are dropped
        ("été", ["ÉTÉ"], 1, 1),
        ("été", ["ete"], 0, 0),
    ],
)
def test_scores(told: str, accepted: list[str], exact: float, overlap: float) -> None:
    assert exact_match(told, accepted) == exact
    assert f1(told, accepted) == pytest.approx(overlap)


def test_figures_are_means_over_all_questions_and_over_those_with_an_answer_or_without() -> None:
    found = figures(["x y", "x", "", "y"], [["x"], ["x", "z"], [], []])
    assert found == {
        "exact": 2 / 4,
        "f1": pytest.approx((2 / 3 + 1 + 1 + 0) / 4),
        "exact_answerable": 1 / 2,
        "f1_answerable": pytest.approx((2 / 3 + 1) / 2),
        "exact_unanswerable": 1 / 2,
    }
    assert figures(["x"], [["x"]])["exact_unanswerable"] is None and figures([""], [[]])["f1_answerable"] is None
