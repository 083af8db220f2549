"""Edits of weights and settings before, between and during calls: no stale answer, and nothing is hashed twice."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.engines.engine import Eager
from llmcache.errors import BankFileError, StoreError
from llmcache.models import hashing, weights
from tests.calls.helpers import X, assert_close, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, STRANGE_GENERATORS, Make, build, states, tokens

Edit = Callable[[Any], Any]


def plain(cache: LLMCache, **inputs: Any) -> Tensor:
    """Return a wrapped model's answer without its cache."""
    with cache.disabled():
        return states(cache(**inputs))


def check(cache: LLMCache, n_hits: int | None = None, **inputs: Any) -> None:
    """Assert that two calls answer as the model does now, with this number of hits if given."""
    expected, before = plain(cache, **inputs), cache.stats().n_hits
    for _ in range(2):
        assert_close(states(cache(**inputs)), expected, inputs.get("attention_mask"))
    assert n_hits in (None, cache.stats().n_hits - before)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tensors hashed at a time."""
    counts: list[int] = []

    def counted(tensors: list[Tensor]) -> list[str]:
        counts.append(len(tensors))
        return hashing.digests(tensors)

    monkeypatch.setattr(weights, "digests", counted)
    return counts


# -- edits between calls -----------------------------------------------------------------------------------------------


def set_epsilon(value: float) -> Edit:
    return lambda model: setattr(model.encoder.layer[0].output.LayerNorm, "eps", value)


TURNS: dict[str, tuple[Make, list[Edit]]] = {
    "kernels": (
        BARE["gpt2"],
        [lambda model: model.set_attn_implementation("sdpa"), lambda model: model.set_attn_implementation("eager")],
    ),
    "settings": (BARE["bert"], [set_epsilon(1e-12), set_epsilon(0.5)]),
}


@pytest.mark.parametrize("what", TURNS)
def test_what_takes_turns_finds_its_own_entries_at_no_cost(
    what: str, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, turns = TURNS[what]
    cache = wrapped(make)
    for turn in turns:
        turn(cache.model)
        check(cache, n_hits=2, **X)
    hashed.clear()
    monkeypatch.setattr(cache._core.weights, "_survey", lambda: pytest.fail("what was seen before is known"))
    for turn in turns * 2:
        turn(cache.model)
        check(cache, n_hits=4, **X)
    assert not hashed


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "marian"])
def test_calls_in_a_row_look_at_nothing_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = X | ({"decoder_input_ids": tokens(2, 3)} if family == "marian" else {})
    if family == "t5":  # its head reads the last end-of-text token
        inputs = {"input_ids": tokens(2, 6).index_fill(1, torch.tensor([5]), 1)}
    cache = wrapped((CLASSIFIERS | STRANGE_GENERATORS)[family])
    cache(**inputs)  # the first call sees what wrapping changed
    monkeypatch.setattr(cache._core.weights, "_refresh", lambda: pytest.fail("nothing was edited"))
    for _ in range(2):
        cache(**inputs)
    assert "weights_changed" not in cache.stats().bypassed and cache.stats().errors == 0


# -- unreadable weights ------------------------------------------------------------------------------------------------


def test_weights_that_cannot_be_read_are_computed_and_never_saved(tmp_path: Path) -> None:
    with wrapped(BARE["bert"]) as cache:
        cache(**X)
        cache.save(tmp_path)
    model = build(BARE["bert"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.encoder.layer[1].output.dense = torch.jit.script(model.encoder.layer[1].output.dense)
    with pytest.raises(BankFileError, match="scripted"):
        LLMCache.load(model, tmp_path)
    cache = LLMCache.wrap(model)
    check(cache, n_hits=0, **X)
    stats = cache.stats()
    assert (stats.bypassed["unseen_weights"], stats.n_stored, stats.errors) == (4, 0, 0)
    with pytest.raises(StoreError, match="scripted"):
        cache.save(tmp_path)


@pytest.mark.parametrize("is_warm", [False, True])
def test_offloaded_weights_are_computed_and_counted(is_warm: bool) -> None:
    cache = wrapped(BARE["bert"])
    if is_warm:
        cache(**X)
    expected = plain(cache, **X)
    cpu_offload(cache.model, execution_device=torch.device("cpu"))
    assert torch.equal(states(cache(**X)), expected)
    stats = cache.stats()
    assert (stats.bypassed["meta_weights"], stats.errors, stats.n_hits) == (2, 0, 0)


# -- edits between checks of the weights -------------------------------------------------------------------------------


def steady() -> LLMCache:
    """A cache of 85 requests whose weights have been steady for so long that calls are opened without a check."""
    cache = wrapped(BARE["bert"])
    for seed in range(85):
        cache(input_ids=tokens(1, 5, seed))
    assert cache._core.weights.is_steady and cache.stats().n_stored == 85
    return cache


def replace_layer(model: Any) -> None:
    model.encoder.layer[1].output.dense = nn.Linear(*reversed(model.encoder.layer[1].output.dense.weight.shape))


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: model.encoder.layer[0].output.dense.weight.mul_(1.5),
        lambda model: model.encoder.layer[0].output.dense.weight.data.mul_(1.5),
        lambda model: setattr(model.encoder.layer[0].output.dense.bias, "data", torch.ones(model.config.hidden_size)),
        replace_layer,
        set_epsilon(1.0),
    ],
    ids=["in place", "without a trace", "other memory", "another module", "a setting"],
)
def test_what_was_stored_without_a_look_serves_no_other_weights(edit: Edit) -> None:
    cache = steady()
    with torch.no_grad():
        edit(cache.model)
    for seed in (84, 80, 3):
        check(cache, n_hits=1, input_ids=tokens(1, 5, seed))
    assert cache.stats().errors == 0


def test_an_edit_during_a_call_that_did_not_look_is_seen_by_the_next_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = steady()
    weight, run, asked = cache.model.encoder.layer[0].output.dense.weight, Eager.run, tokens(1, 5, 99)

    def edited(*args: Any) -> Any:
        with torch.no_grad():
            weight.mul_(2)
        return run(*args)

    monkeypatch.setattr(Eager, "run", edited)
    cache(input_ids=asked)
    monkeypatch.undo()
    with torch.no_grad():
        weight.mul_(0.5)  # the old values again, under which the edited state was stored
    check(cache, n_hits=1, input_ids=asked)
    check(cache, input_ids=tokens(1, 5, 3))
    assert cache.stats().errors == 0


def test_a_save_holds_nothing_that_was_stored_under_other_weights(tmp_path: Path) -> None:
    cache = steady()
    cache.save(tmp_path / "one")
    assert LLMCache.load(build(BARE["bert"]), tmp_path / "one").stats().n_stored == 85
    cache(input_ids=tokens(1, 5, 85))
    with torch.no_grad():
        cache.model.embeddings.word_embeddings.weight.mul_(1.5)
    cache.save(tmp_path / "other")
    other = build(BARE["bert"])
    other.load_state_dict(cache.model.state_dict())
    assert LLMCache.load(other, tmp_path / "other").stats().n_stored == 0


def train_a_step(model: nn.Module) -> torch.optim.Optimizer:
    """Run a forward and a backward with gradients; the caller makes the step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    model(**X).logits.sum().backward()
    return optimizer


def test_gradients_that_are_held_cost_hashing_of_what_holds_them(hashed: list[int]) -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    cache(**X)
    optimizer = train_a_step(model)
    n_trained = sum(parameter.grad is not None for parameter in model.bert.parameters())
    for _ in range(2):
        hashed.clear()
        optimizer.step()  # writes without a trace
        assert torch.allclose(states(cache(**X)), plain(cache, **X), atol=1e-5)
        assert set(hashed) == {n_trained}
    optimizer.step()
    optimizer.zero_grad()
    check(cache, **X)
    hashed.clear()
    check(cache, **X)
    assert not hashed


def test_much_that_holds_gradients_is_computed_and_counted(hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_HELD_BYTES", 1000)
    cache = wrapped(CLASSIFIERS["bert"])
    cache(**X)
    optimizer = train_a_step(cache.model)
    hashed.clear()
    for _ in range(2):
        optimizer.step()
        assert torch.equal(states(cache(**X)), plain(cache, **X))
    assert cache.stats().bypassed["gradients_held"] == 4 and not hashed
    optimizer.step()
    optimizer.zero_grad()
    check(cache, n_hits=2, **X)


def test_hashing_by_several_threads_gives_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((n,), float(n)) for n in range(1, 40)]
    alone = hashing.digests(tensors)
    monkeypatch.setattr(hashing, "_MANY_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert hashing.digests(tensors) == alone
    assert len(set(alone)) == 39
