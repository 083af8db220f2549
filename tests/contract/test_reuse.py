"""Approximate reuse serves no call that the model refuses, or that has unusual positions or token types."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from llmcache import LLMCache
from tests.contract.judge import ask
from tests.contract.streams import ask as rungs_of
from tests.contract.streams import calibrated, classifier, requests
from tests.tiny_models import PAD

FRESH = requests(12, seed=7)[0]
N_TOKENS = FRESH.shape[1]
PLACES = torch.arange(N_TOKENS)[None]
#: Arguments that the classifier takes, and like arguments that it refuses.
BEYOND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token types": ({"token_type_ids": 0}, {"token_type_ids": 2}),
    "negative token types": ({"token_type_ids": 0}, {"token_type_ids": -1}),
    "positions": ({"attention_mask": 1, "position_ids": PLACES}, {"attention_mask": 1, "position_ids": PLACES + 60}),
    "negative positions": (
        {"attention_mask": 1, "position_ids": PLACES},
        {"attention_mask": 1, "position_ids": PLACES - 1},
    ),
    "dtype of token types": ({"token_type_ids": 0}, {"token_type_ids": torch.zeros(1, N_TOKENS, dtype=torch.uint8)}),
    "dtype of ids": ({}, {"input_ids": torch.int16}),
    "length": ({}, {"input_ids": 9}),
    "padding": ({"attention_mask": 1}, {"attention_mask": 1, "padding": 60}),
}


@pytest.fixture
def cache() -> Iterator[LLMCache]:
    with calibrated(audit=0) as cache:
        yield cache


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return classifier()


def made(ids: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
    """Make a call: a number fills an argument or repeats the ids; a dtype converts the ids."""
    call = {"input_ids": ids[None]}
    for name, value in given.items():
        if name == "input_ids":
            call[name] = ids[None].to(value) if isinstance(value, torch.dtype) else ids[None].repeat(1, value)
        elif name != "padding":
            call[name] = value if isinstance(value, Tensor) else torch.full_like(ids[None], value)
    return {name: pad(value, (0, given.get("padding", 0))) for name, value in call.items()}


@pytest.mark.parametrize("name", BEYOND)
def test_what_the_model_refuses_is_answered_by_no_other_request(cache: LLMCache, plain: nn.Module, name: str) -> None:
    """A call that the plain model refuses is refused, even if a similar request could serve it."""
    taken, refused = BEYOND[name]
    rungs = []
    for row in FRESH:
        ask(cache.model, **made(row, taken))
        rungs.append(cache.last[0].rung)
    assert "semantic" in rungs
    for row in requests(5, seed=8)[0]:
        with pytest.raises((IndexError, RuntimeError)) as expected:
            ask(plain, **made(row, refused))
        with pytest.raises(expected.type):
            ask(cache.model, **made(row, refused))


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": PLACES + 3},
        {"token_type_ids": 1},
        {"token_type_ids": (PLACES > 3).long()},
        {"token_type_ids": (PLACES < 1).long()},
    ],
    ids=["positions", "one type", "types that change within a text", "types that fall"],
)
def test_a_request_with_unusual_arguments_is_computed(cache: LLMCache, plain: nn.Module, given: dict[str, Any]) -> None:
    """Unusual positions or token types may change the answer, and a fingerprint reads tokens only."""
    for row in FRESH:
        call = made(row, {"attention_mask": 1} | given)
        output = ask(cache.model, **call)
        assert cache.last[0].rung is None
        torch.testing.assert_close(output, ask(plain, **call))


def test_usual_token_types_of_a_pair_are_reused(cache: LLMCache) -> None:
    """Token types that change after a separator, as tokenizers set them, allow approximate hits."""
    rungs = []
    for row in FRESH:
        pair = torch.cat([row, torch.tensor([PAD]), row[1:]])  # the only special token of this model
        types = (torch.arange(len(pair)) > len(row)).long()[None]
        ask(cache.model, **made(pair, {"attention_mask": 1, "token_type_ids": types}))
        rungs.append(cache.last[0].rung)
    assert "semantic" in rungs


LABELLED: dict[str, Any] = {
    "by name": lambda model, ids, labels: model(input_ids=ids, labels=labels),
    "by position": lambda model, ids, labels: model(ids, None, None, None, None, labels),
    "as a tuple": lambda model, ids, labels: model(input_ids=ids, labels=labels, return_dict=False),
}


@pytest.mark.parametrize("how", LABELLED)
def test_a_loss_is_that_of_the_request_itself(cache: LLMCache, plain: nn.Module, how: str) -> None:
    """A bound covers answers: a call with labels is computed, or an exact repeat (docs/calibration.md)."""
    ids, labels = requests(24, seed=5)[0], torch.arange(24) % 5
    found = cache.look_up({"input_ids": ids})
    assert found.served is not None
    with torch.inference_mode():
        for number in range(2):
            expected, made = (LABELLED[how](model, ids, labels) for model in (plain, cache.model))
            torch.testing.assert_close(made[0], expected[0])
            assert {one.rung for one in cache.last} == {("exact" if number else None)}
        rows = list(found.served.rows)  # looked up before labels were given
        made = cache(**found.served.inputs, labels=labels[rows])
        torch.testing.assert_close(made.loss, plain(input_ids=ids[rows], labels=labels[rows]).loss)
    assert cache.stats().errors == 0 and "semantic" in rungs_of(cache, requests(24, seed=6)[0])
