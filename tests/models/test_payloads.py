"""An entry keeps what the head reads, for other lengths and paddings too."""

from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache
from tests.models.checks import repeated
from tests.tiny_models import BARE, CLASSIFIERS, build, padded


def mean(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
    weights = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def repadded(inputs: dict[str, torch.Tensor], more: int) -> dict[str, torch.Tensor]:
    return {name: nn.functional.pad(value, (0, more)) for name, value in inputs.items()}


@pytest.mark.parametrize("family", ["bert", "t5", "llama", "gpt2", "deberta"])
def test_the_mean_of_valid_tokens_for_any_padding(family: str) -> None:
    """The mean is taken after the final norm, if there is one."""
    model = build(BARE[family])
    inputs = padded([7, 4, 5])
    plain = mean(model, inputs)
    with LLMCache.wrap(model, payload="mean") as cache:
        for more in (0, 0, 1, 5):
            torch.testing.assert_close(mean(model, repadded(inputs, more)), plain, atol=1e-5, rtol=1e-5)
        fresh = {name: torch.cat([value, padded([7], seed=40)[name]]) for name, value in inputs.items()}
        torch.testing.assert_close(mean(model, fresh)[:3], plain, atol=1e-5, rtol=1e-5)
        assert cache.stats().hits == {"exact": 12}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("left", [False, True])
def test_the_last_row_with_either_padding(family: str, left: bool) -> None:
    stats = repeated(build(CLASSIFIERS[family]), padded([7, 4], left=left))
    assert (stats.hits, stats.nbytes) == ({"exact": 2}, 2 * 32 * 4)


def test_a_first_row_that_is_padding_is_computed() -> None:
    stats = repeated(build(CLASSIFIERS["bert"]), padded([7, 4], left=True))
    assert (stats.hits, stats.bypassed) == ({"exact": 1}, {"head_reads_padding": 2})


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_padding_token_at_the_end_of_a_text_is_read_as_the_head_reads_it(family: str) -> None:
    """pad == eos: the head takes the last token that is not eos, the mask says the eos is valid."""
    inputs = padded([7, 4])
    inputs["input_ids"][0, -1] = 0
    stats = repeated(build(CLASSIFIERS[family]), inputs | {"use_cache": False})
    assert (stats.bypassed, stats.hits) == ({"head_reads_padding": 2}, {"exact": 1})
