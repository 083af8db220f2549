"""An entry keeps what the head reads, for other lengths and paddings too."""

from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache
from tests.contract.judge import ask, check_same
from tests.tiny_models import BARE, CLASSIFIERS, STRANGERS, build, padded


def mean(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden: torch.Tensor = ask(model, **inputs).last_hidden_state
    weights = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


@pytest.mark.parametrize("family", ["t5", "llama", "modernbert"])
def test_the_mean_of_valid_tokens_for_any_padding(family: str) -> None:
    """The mean is taken after the final norm, if there is one."""
    model = build((BARE | STRANGERS)[family])
    inputs = padded([7, 4, 5])
    plain = mean(model, inputs)
    with LLMCache.wrap(model, payload="mean") as cache:
        for more in (0, 0, 1, 5):
            repadded = {name: nn.functional.pad(value, (0, more)) for name, value in inputs.items()}
            check_same(mean(model, repadded), plain)
        fresh = {name: torch.cat([value, padded([7], seed=40)[name]]) for name, value in inputs.items()}
        check_same(mean(model, fresh)[:3], plain)
        assert cache.stats().hits == {"exact": 12}


def test_what_a_classifiers_entry_does_not_keep_is_not_taken_for_states() -> None:
    model: Any = build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model):
        for _ in range(2):
            hidden = ask(model.bert, **padded([5])).last_hidden_state
    assert hidden[0, 0].isfinite().all()
    assert hidden[0, 1:].isnan().all()
