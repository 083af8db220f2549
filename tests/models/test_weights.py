"""The digest follows every way in which weights change between two calls."""

import pytest
import torch
from torch import nn

from llmcache.models.weights import Weights
from tests.tiny_models import BARE, build


def digest_follows(model: nn.Module, weights: Weights) -> bool:
    """Whether the watcher agrees with one that sees the model for the first time."""
    return weights.digest() == Weights(model).digest()


@pytest.fixture
def model() -> nn.Module:
    return build(BARE["bert"])


def test_equal_weights_have_equal_digests() -> None:
    assert Weights(build(BARE["bert"])).digest() == Weights(build(BARE["bert"])).digest()
    assert Weights(build(BARE["bert"])).digest() != Weights(build(BARE["bert"], seed=1)).digest()


def test_the_digest_is_not_recomputed_while_nothing_changes(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(model)
    first = weights.digest()
    monkeypatch.setattr(weights, "_hash", lambda: "again")
    assert weights.digest() == first


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(1.5),
        lambda p: p.copy_(torch.randn_like(p)),
        lambda p: p.view(-1)[3:4].fill_(9.0),
        lambda p: setattr(p, "data", p.data.clone().fill_(2.0)),
        lambda p: nn.init.normal_(p),
    ],
)
def test_an_edited_parameter_is_seen(model: nn.Module, change: object) -> None:
    weights = Weights(model)
    before = weights.digest()
    with torch.no_grad():
        change(model.encoder.layer[2].output.dense.weight)  # type: ignore[operator]
    assert weights.digest() != before
    assert digest_follows(model, weights)


def test_an_edit_in_inference_mode_is_seen(model: nn.Module) -> None:
    weights = Weights(model)
    before = weights.digest()
    with torch.inference_mode():
        model.pooler.dense.weight.mul_(2.0)
    assert weights.digest() != before


def test_inference_parameters_cannot_be_watched_and_say_so() -> None:
    with torch.inference_mode():
        model = build(BARE["bert"])
    weights = Weights(model)
    weights.digest()
    assert weights.refusal == "inference_weights"
    plain = Weights(build(BARE["bert"]))
    plain.digest()
    assert plain.refusal is None


def test_data_replaced_twice_is_seen_even_where_memory_is_used_again() -> None:
    for _ in range(50):
        model = build(BARE["bert"])
        weights = Weights(model)
        before = weights.digest()
        parameter = model.encoder.layer[0].attention.self.query.weight
        parameter.data = parameter.data * 1.1
        parameter.data = parameter.data * 1.1  # may lie where the first one lay
        assert weights.digest() != before


def test_a_submodule_replaced_is_seen_even_where_memory_is_used_again() -> None:
    for _ in range(50):
        model = build(BARE["bert"])
        weights = Weights(model)
        before = weights.digest()
        attention = model.encoder.layer[0].attention.self
        attention.query = None
        attention.query = nn.Linear(32, 32)  # may get the id of the old one
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


def test_buffers_count(model: nn.Module) -> None:
    llama = build(BARE["llama"])
    weights = Weights(llama)
    before = weights.digest()
    llama.rotary_emb.inv_freq.mul_(2.0)
    assert weights.digest() != before


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
