"""The digest follows every way in which weights change between two calls."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from llmcache.models.weights import Weights
from tests.models.checks import follows
from tests.tiny_models import BARE, build


@pytest.fixture
def model() -> nn.Module:
    return build(BARE["bert"])


def test_equal_weights_have_equal_digests(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(model)
    first = weights.digest()
    assert first == Weights(build(BARE["bert"])).digest() != Weights(build(BARE["bert"], seed=1)).digest()
    monkeypatch.setattr(weights, "_hash", lambda: "again")
    assert weights.digest() == first  # not hashed again while nothing changes


@pytest.mark.parametrize("edit", [lambda p: p.view(-1)[3:4].fill_(9.0), torch.inference_mode()(lambda p: p.mul_(2.0))])
def test_an_edit_of_a_buffer_that_is_not_saved_is_seen(edit: Callable[[torch.Tensor], object]) -> None:
    llama = build(BARE["llama"])
    assert follows(llama, lambda: edit(llama.rotary_emb.inv_freq))


def test_inference_parameters_cannot_be_watched_and_say_so() -> None:
    with torch.inference_mode():
        model = build(BARE["bert"])
    weights = Weights(model)
    weights.digest()
    assert weights.refusal == "inference_weights"
    plain = Weights(build(BARE["bert"]))
    plain.digest()
    assert plain.refusal is None


def test_what_is_replaced_is_seen_even_where_memory_is_used_again() -> None:
    for _ in range(50):
        model = nn.Module()
        model.query = nn.Linear(32, 32)
        weights = Weights(model)
        before = weights.digest()
        model.query.weight.data = model.query.weight.data * 1.1
        model.query.weight.data = model.query.weight.data * 1.1  # may reuse the first one's memory
        assert weights.digest() != before
        before = weights.digest()
        model.query = None
        model.query = nn.Linear(32, 32)  # may reuse the old one's id
        assert weights.digest() != before


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "single"])
def test_a_step_of_an_optimizer_is_seen(model: nn.Module, optimizer: str) -> None:
    """Fused kernels (Trainer's default) write without raising the version counter."""
    weights = Weights(model)
    before = weights.digest()
    step = torch.optim.AdamW(
        model.parameters(), lr=1e-2, fused=optimizer == "fused", foreach=optimizer == "foreach" or None
    )
    weights.suspect()  # as every forward with gradients does
    model(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state.sum().backward()
    assert weights.digest() == before  # an evaluation between backward and step
    step.step()
    after = weights.digest()
    assert after != before
    step.zero_grad()
    assert weights.digest() == after


def test_casting_there_and_back_to_the_same_values_gives_the_same_digest(model: nn.Module) -> None:
    weights = Weights(model)
    before = weights.digest()
    model.double()
    assert weights.digest() != before
    model.float()
    assert weights.digest() == before


def test_names_and_shapes_count() -> None:
    one, two = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        one.weight.fill_(1.0)
        two.weight.fill_(1.0)
    assert Weights(one).digest() != Weights(two).digest()
