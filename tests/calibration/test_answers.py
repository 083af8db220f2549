"""Signatures of answers: how outputs are read, and which signatures agree."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from llmcache.errors import ConfigError
from llmcache.models.adapters import locate
from llmcache.models.heads import find_head
from llmcache.reuse.answers import ANSWERS, Scores, find_answers, read_logits
from tests.tiny_models import BARE, CLASSIFIERS, Make, build


@pytest.mark.parametrize(
    ("name", "one", "other", "is_same"),
    [
        ("class", [0.1, 0.9, 0.2], [-3.0, 0.0, -1.0], True),
        ("class", [0.1, 0.9, 0.2], [0.1, 0.2, 0.9], False),
        ("labels", [1.0, -1.0], [0.1, -9.0], True),
        ("labels", [1.0, -1.0], [1.0, 0.1], False),
        ("embedding", [1.0, 0.0], [5.0, 0.5], True),
        ("embedding", [1.0, 0.0], [1.0, 0.3], False),
        ("score", [0.5], [0.5], True),
        ("score", [0.5], [0.51], False),  # no range is known yet
    ],
)
def test_what_is_the_same_answer(name: str, one: list[float], other: list[float], is_same: bool) -> None:
    answers = ANSWERS[name]()
    signed = answers.sign(np.float32([one, other]))
    assert bool(answers.agree(signed[0], signed[1])) is is_same


def test_scores_may_differ_by_a_twentieth_of_their_range() -> None:
    scores, other = Scores(), Scores()
    scores.learn(np.float32([[-1.0], [3.0], [0.0]]))
    other.restore(scores.state())
    for one in (scores, other):
        assert one.agree(np.float32([1.0]), np.float32([1.19]))
        assert not one.agree(np.float32([1.0]), np.float32([1.21]))


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_all_pairs_are_compared_at_once_and_an_unknown_answer_agrees_with_nothing(name: str) -> None:
    answers, unknown = ANSWERS[name](), np.full((2, 3), np.nan, np.float32)
    signed = answers.sign(torch.randn(4, 3).numpy())
    together = answers.agree(signed[:, None], signed[None])
    assert together.shape == (4, 4)
    assert together.diagonal().all()
    assert (together == together.T).all()
    assert not answers.agree(unknown, unknown).any()
    assert not answers.agree(unknown, np.float32([1.0, 0.0, 0.0])).any()


@pytest.mark.parametrize(
    ("make", "config", "kind"),
    [
        (CLASSIFIERS["bert"], {"num_labels": 1}, "score"),
        (CLASSIFIERS["bert"], {"num_labels": 3, "problem_type": "regression"}, "score"),
        (BARE["bert"], {}, "embedding"),
    ],
)
def test_the_model_tells_the_kind(make: Make, config: dict[str, Any], kind: str) -> None:
    model = build(make)
    for name, value in config.items():
        setattr(model.config, name, value)
    head = find_head(model, locate(model))
    assert find_answers("auto", head, model).name == kind
    with pytest.raises(ConfigError, match="answer: unknown name 'colour'; known: auto, class"):
        find_answers("colour", head, model)


def test_logits_are_found_in_what_models_return() -> None:
    logits = torch.randn(2, 3)
    for output in (logits, SequenceClassifierOutput(logits=logits), (logits, None), {"logits": logits}):
        assert read_logits(output) is logits
    for strange in (torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.long), {"states": logits}, "text"):
        with pytest.raises(TypeError, match="answer_of"):
            read_logits(strange)
