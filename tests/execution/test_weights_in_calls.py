"""Weights and settings that are edited before, between and during calls: never a stale answer, nothing hashed twice."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.errors import BankFileError, CalibrationError, StoreError
from llmcache.models import hashing, weights
from tests import inside
from tests.execution.calls import X, check, one_layer, plain, two_adapters, wrapped
from tests.models.test_attributes import FAMILIES, SETTINGS, quantised
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, states, tokens
from tests.topics import classifier, requests

Edit = Callable[[Any], Any]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were hashed at a time."""
    counts: list[int] = []

    def counted(tensors: list[Tensor]) -> list[str]:
        counts.append(len(tensors))
        return hashing.digests(tensors)

    monkeypatch.setattr(weights, "digests", counted)
    return counts


# -- edits between calls -----------------------------------------------------------------------------------------------


def scale(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.mul_(1.5)


def replace_packed(model: Any) -> None:
    for layer, theirs in zip(model.encoder.layer, quantised(1).encoder.layer, strict=True):
        layer.output.dense._packed_params = theirs.output.dense._packed_params


def of_another(model: Any, **more: bool) -> None:
    model.load_state_dict(build(BARE["bert"], seed=7).state_dict(), **more)


WEIGHTS: dict[str, Edit] = {
    "in place": scale,
    "load_state_dict": of_another,
    "assigned state dict": lambda model: of_another(model, assign=True),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "embedding": lambda model: nn.init.normal_(model.embeddings.word_embeddings.weight),
    "new parameter": lambda model: setattr(
        model.encoder.layer[0].output.dense, "weight", nn.Parameter(torch.randn(32, 48))
    ),
    "new layer": lambda model: setattr(
        model.encoder.layer[0], "output", build(BARE["bert"], 5).encoder.layer[0].output
    ),
    "packed": replace_packed,
    "parametrization": SETTINGS["parametrization"],
}
ATTRIBUTES: dict[str, Edit] = {
    "eager": lambda model: model.set_attn_implementation("eager"),
    **{name: edit for name, edit in SETTINGS.items() if name not in ("config", "array", "forward", *WEIGHTS)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "tau"),
    # Rows of quantised layers affect each other, so that tau is refused there.
    [(edit, tau) for tau in (None, -1.0) for edit in WEIGHTS | ATTRIBUTES if (edit, tau) != ("packed", -1.0)],
)
def test_nothing_stale_is_served_after_an_edit(edit: str, tau: float | None, hashed: list[int]) -> None:
    cache = LLMCache.wrap(quantised() if edit == "packed" else build(BARE["bert"]), tau=tau)
    check(cache, n_hits=2, **X)
    hashed.clear()
    (WEIGHTS | ATTRIBUTES)[edit](cache.model)
    is_refused = edit in ("is_causal", "removed attribute")  # as other_attention
    check(cache, n_hits=0 if is_refused else 2, **X)
    assert edit in WEIGHTS or sum(hashed) == 0
    assert edit != "in place" or sum(hashed) == 1


def set_epsilon(value: float) -> Edit:
    return lambda model: setattr(model.encoder.layer[0].output.LayerNorm, "eps", value)


TURNS: dict[str, tuple[Callable[[], nn.Module], list[Edit]]] = {
    "weights": (
        lambda: build(BARE["bert"]),
        [lambda model: model.load_state_dict(build(BARE["bert"]).state_dict()), of_another],
    ),
    "kernels": (
        lambda: build(BARE["gpt2"]),
        [lambda model: model.set_attn_implementation("sdpa"), lambda model: model.set_attn_implementation("eager")],
    ),
    "settings": (lambda: build(BARE["bert"]), [set_epsilon(1e-12), set_epsilon(0.5)]),
    "adapters": (two_adapters, [lambda model: model.set_adapter("north"), lambda model: model.set_adapter("south")]),
}


@pytest.mark.parametrize("what", TURNS)
def test_what_takes_turns_finds_its_own_entries_at_no_cost(
    what: str, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, turns = TURNS[what]
    cache = LLMCache.wrap(make())
    for turn in turns:
        turn(cache.model)
        check(cache, n_hits=2, **X)
    hashed.clear()
    if what != "weights":
        monkeypatch.setattr(inside.weights(cache), "_survey", lambda: pytest.fail("what was seen before is known"))
    for turn in turns * 2:
        turn(cache.model)
        check(cache, n_hits=4, **X)
    assert what == "weights" or not hashed


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("neox", "falcon", "gpt_bigcode")])
def test_calls_in_a_row_look_at_nothing_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = X | ({"decoder_input_ids": tokens(2, 3)} if family in ("marian", "mbart") else {})
    cache = wrapped(FAMILIES[family])
    cache(**inputs)  # the first one sees what was hung on the model
    monkeypatch.setattr(inside.weights(cache), "_refresh", lambda: pytest.fail("nothing was edited"))
    for _ in range(2):
        cache(**inputs)
    assert "weights_changed" not in cache.stats().bypassed and cache.stats().errors == 0


def test_attention_in_training_mode_by_itself_is_computed() -> None:
    cache = wrapped(BARE["llama"])
    cache(**X)
    attention = cache.model.layers[1].self_attn
    attention.attention_dropout = 0.5
    attention.train()
    cache(**X)
    assert cache.stats().bypassed == {"training": 2}


# -- what cannot be read -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_save_of_other_packed_weights_is_refused(tmp_path: Path) -> None:
    cache = LLMCache.wrap(quantised())
    cache(**X)
    cache.save(tmp_path)
    with pytest.raises(BankFileError, match="other weights"):
        LLMCache.load(quantised(1), tmp_path)
    with LLMCache.load(quantised(), tmp_path) as loaded:
        check(loaded, n_hits=4, **X)


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


# -- edits during a call -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in place", "taken back within", "replaced", "setting"])
def test_what_was_computed_by_edited_weights_is_not_stored(kind: str) -> None:
    """Edited after layer 0, and restored when the call has ended, or before its last layer."""
    cache = wrapped(BARE["bert"])
    expected = plain(cache, **X)
    layers = cache.model.encoder.layer
    norm = layers[2].output.LayerNorm
    weight, eps = norm.weight, norm.eps
    edits: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "in place": (lambda: weight.mul_(2), lambda: weight.mul_(0.5)),
        "taken back within": (lambda: weight.mul_(2), lambda: weight.mul_(0.5)),
        "replaced": (
            lambda: setattr(norm, "weight", nn.Parameter(weight * 2)),
            lambda: setattr(norm, "weight", weight),
        ),
        "setting": (lambda: setattr(norm, "eps", 0.5), lambda: setattr(norm, "eps", eps)),
    }
    edit, undo = edits[kind]
    with torch.no_grad():
        handles = [layers[0].output.register_forward_hook(lambda *_: (edit(), None)[1])]
        if kind == "taken back within":
            handles.append(layers[3].register_forward_pre_hook(lambda *_: (undo(), None)[1]))
        mixed = states(cache(**X))
        for handle in handles:
            handle.remove()
        if kind != "taken back within":
            undo()
    assert [row.bypassed for row in cache.last] == ["weights_changed"] * 2
    assert not torch.allclose(mixed, expected)
    assert cache.stats().bypassed["weights_changed"] == 2 and cache.stats().n_stored == 0
    assert torch.equal(plain(cache, **X), expected)
    check(cache, n_hits=2, **X)


def test_prefixes_computed_by_edited_weights_are_not_stored() -> None:
    cache = wrapped(GENERATORS["gpt2"], prefix_block=4)
    ids = tokens(1, 13)
    weight = cache.model.transformer.h[2].mlp.c_fc.weight
    handle = cache.model.transformer.h[0].mlp.register_forward_hook(lambda *_: (weight.mul_(2), None)[1])
    cache(input_ids=ids)
    handle.remove()
    with torch.no_grad():
        weight.mul_(0.5)
    assert cache.stats().n_blocks == 0 and cache.stats().bypassed == {"weights_changed": 1}
    check(cache, input_ids=ids)
    assert cache.stats().n_blocks == 3


@pytest.mark.slow
def test_a_calibration_by_edited_weights_is_refused() -> None:
    model = classifier()
    cache = LLMCache.wrap(model, auto_bypass=False)
    weight = model.bert.encoder.layer[2].output.dense.weight
    begin = model.bert.embeddings.register_forward_hook(lambda *_: (weight.mul_(2), None)[1])
    end = model.bert.encoder.layer[3].register_forward_hook(lambda *_: (weight.mul_(0.5), None)[1])
    with pytest.raises(CalibrationError, match="bypassed"):
        cache.calibrate(requests(400)[0], max_drop=0.1)
    begin.remove()
    end.remove()
    assert "weights_changed" in cache.stats().bypassed and cache.calibration is None


# -- what is hashed ----------------------------------------------------------------------------------------------------


def test_adapters_that_are_merged_are_hashed_where_they_are(hashed: list[int]) -> None:
    cache = LLMCache.wrap(two_adapters())
    check(cache, **X)
    n_tensors = sum(hashed)
    hashed.clear()
    cache.model.merge_adapter()
    check(cache, **X)
    assert 0 < sum(hashed) < n_tensors
    cache.model.unmerge_adapter()
    check(cache, **X)


def train_a_step(model: nn.Module) -> torch.optim.Optimizer:
    """A forward with gradients and a backward; the step is left."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    model(**X).logits.sum().backward()
    return optimizer


def test_gradients_that_are_held_cost_hashing_of_what_holds_them(hashed: list[int]) -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    cache(**X)
    optimizer = train_a_step(model)
    n_trained = sum(parameter.grad is not None for parameter in model.base_model.model.bert.parameters())
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


def test_a_step_of_a_model_that_is_frozen_afterwards_is_seen() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    check(cache, **X)
    optimizer = train_a_step(cache.model)
    optimizer.step()
    optimizer.zero_grad()
    cache.model.requires_grad_(False)
    check(cache, n_hits=2, **X)


@pytest.mark.slow
def test_a_fused_step_after_a_compiled_forward_is_seen() -> None:
    cache = wrapped(one_layer)
    check(cache, **X)
    compiled = torch.compile(cache.model, backend="eager")
    optimizer = torch.optim.SGD(cache.model.parameters(), lr=0.1, fused=True)
    with warnings.catch_warnings():  # torch's compiler looks at gradients of what is no leaf
        warnings.simplefilter("ignore")
        compiled(**X).logits.sum().backward()
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
