"""Clozes: answers stand where stated, a given share has none, and the seed decides."""

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.prepare.cloze import make_clozes
from tests.tiny_data import passage

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
