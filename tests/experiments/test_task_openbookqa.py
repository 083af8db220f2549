"""Multiple choice: any number of choices, answers, and padding that changes no score."""

from types import SimpleNamespace

import pytest
import torch

from experiments.data.openbookqa import Choice
from experiments.models.loading import Loaded, load
from experiments.tasks.openbookqa import OpenBookQA
from tests.tiny_models import save_bert

QUESTIONS = [
    Choice("three", "one two", ("three", "four five six seven eight", "nine"), 1),
    Choice("four", "five six", ("one", "two", "three four", "five"), 3),
    Choice("five", "seven", ("one", "two", "three", "four", "five six seven eight nine one two"), 4),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    text = "one two three four five six seven eight nine"
    torch.manual_seed(0)
    return load(str(save_bert(tmp_path_factory.mktemp("bert") / "tiny", text)), "choice", is_new_head=True)


def test_requests_hold_a_row_for_each_choice(loaded: Loaded) -> None:
    task = OpenBookQA(loaded, QUESTIONS, 64)
    assert [request.inputs["input_ids"].shape[:2] for request in task.requests] == [(1, 3), (1, 4), (1, 5)]
    assert [request.reference for request in task.requests] == [1, 3, 4]
    assert task.requests[1].text == "five six one two three four five"
    assert task.facts["chance"] == pytest.approx((1 / 3 + 1 / 4 + 1 / 5) / 3)
    ids = task.requests[0].inputs["input_ids"][0, 1].tolist()
    assert loaded.tokenizer.decode(ids) == "[CLS] one two [SEP] four five six seven eight [SEP]"
    assert OpenBookQA(loaded, QUESTIONS, 6).requests[2].inputs["input_ids"].shape == (1, 5, 6)


def test_padding_changes_no_score(loaded: Loaded) -> None:
    task = OpenBookQA(loaded, QUESTIONS, 64)
    for question, request in zip(QUESTIONS, task.requests, strict=True):
        with torch.inference_mode():
            together = loaded.model(**request.inputs).logits[0]
            alone = []
            for choice in question.choices:
                row = loaded.tokenizer(question.stem, choice, return_tensors="pt")
                alone.append(loaded.model(**{name: x.unsqueeze(0) for name, x in row.items()}).logits[0, 0])
        torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-4)
        assert len(set(together.tolist())) == len(question.choices)


def test_the_highest_score_is_the_answer(loaded: Loaded) -> None:
    task = OpenBookQA(loaded, QUESTIONS, 64)
    told = [
        task.answer(SimpleNamespace(logits=torch.tensor([scores])), number)
        for number, scores in enumerate([[0.0, 2.0, 1.0], [3.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    ]
    assert told == [1, 0, 4]
    assert task.scores(told).tolist() == [1.0, 0.0, 1.0]
    assert [task.show(answer) for answer in told] == ["B", "A", "E"]
    assert task.is_changed(0, 1) and not task.is_changed(2, 2)
    assert task.extras(told) == {}
