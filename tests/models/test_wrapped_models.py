"""A wrapped model: what entries keep of its states, copies of it, and the rounding of its rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.models.coupling import rounding_of
from llmcache.models.twin import make_trial, make_twin
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


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("left", [False, True])
def test_the_last_row_with_either_padding(family: str, left: bool) -> None:
    model, inputs = build(CLASSIFIERS[family]), padded([7, 4], left=left)
    plain = ask(model, **inputs).logits
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            check_same(ask(model, **inputs).logits, plain)
        assert (cache.stats().hits, cache.stats().nbytes) == ({"exact": 2}, 2 * 32 * 4)


def test_what_a_classifiers_entry_does_not_keep_is_not_taken_for_states() -> None:
    model: Any = build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model):
        for _ in range(2):
            hidden = ask(model.bert, **padded([5])).last_hidden_state
    assert hidden[0, 0].isfinite().all()
    assert hidden[0, 1:].isnan().all()


def test_weights_are_shared_and_attributes_copied() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].held = model[1].held = {"module": model}
    model[0].norm = nn.functional.normalize(model[0].weight)  # with a gradient, so that copy.deepcopy refuses it
    twin = make_trial(model)
    assert twin[0].weight is model[0].weight
    assert twin[0].held is twin[1].held is not model[0].held and twin[0].held["module"] is twin
    assert torch.equal(twin[0].norm, model[0].norm) and twin[0].norm is not model[0].norm


def test_a_twin_of_a_wrapped_model_holds_nothing_of_the_cache() -> None:
    model = build(BARE["bert"])
    names = [sorted(vars(part)) for part in model.modules()]
    with LLMCache.wrap(model):
        assert [sorted(vars(part)) for part in make_twin(model).modules()] == names


def test_float32_of_an_accelerator_is_trusted_unless_it_may_be_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, convolution, x = nn.Linear(2, 2), nn.Conv1d(2, 2, 1), torch.zeros(2)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert rounding_of(linear, x) == 1e-5
    monkeypatch.setattr(Tensor, "is_cpu", False)
    assert rounding_of(linear, x) == 2e-3
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert (rounding_of(linear, x), rounding_of(convolution, x)) == (1e-5, 2e-3)
    assert rounding_of(linear, x.bfloat16()) == 2e-2
