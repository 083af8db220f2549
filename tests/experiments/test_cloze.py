"""Questions made from text: answered where they say so, unanswered elsewhere, seeded."""

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.prepare.cloze import make_clozes, plain
from tests.tiny_data import NAMES, passage

PASSAGES = [passage(seed) for seed in range(30)]


@settings(deadline=None, max_examples=20)
@given(share=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99))
def test_answers_stand_where_they_are_said_to(share: float, seed: int) -> None:
    made = make_clozes(PASSAGES, 25, share, seed)
    assert made == make_clozes(PASSAGES, 25, share, seed)
    assert len({question.id for question in made}) == len(made)
    for question in made:
        assert "what" in question.text and question.text.endswith("?")
        for text, start in question.answers:
            assert question.context[start : start + len(text)] == text
            assert text not in question.text
        assert len({text for text, _ in question.answers}) <= 1
    n_answered = sum(bool(question.answers) for question in made)
    assert {0.0: n_answered == len(made), 0.5: 0 < n_answered < len(made), 1.0: n_answered == 0}[share]


def test_without_an_answer_the_passage_does_not_hold_it() -> None:
    for question in make_clozes(PASSAGES, 25, 1.0, 0):
        missing = [name for name in NAMES if name not in question.context and name not in question.text]
        assert missing


def test_each_passage_is_used_before_one_is_used_again() -> None:
    turns = [question.id.split("-")[1] for question in make_clozes(PASSAGES, 50, 0.0, 0)]
    assert turns == sorted(turns) and turns.count("0") == 30 and len(turns) == 50


def test_passages_that_are_not_used() -> None:
    rare, short, long = passage(0).replace("winter", "<unk>"), "Too short. Too short.", passage(0) * 4
    for text in (rare, short, long, "nothing has a name here . " * 20):
        assert make_clozes([text], 5, 0.3, 0) == [], text


def test_tokenised_lines_are_set_as_print_has_them() -> None:
    line = """It was n't , in 1 @,@ 999 ( the " well @-@ known " one ) , Rome 's ."""
    assert plain(line) == """It wasn't, in 1,999 (the "well-known" one), Rome's."""
