"""Weights and settings that are edited before, between and during calls: never a stale answer, nothing hashed twice."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.errors import BankFileError, CalibrationError, StoreError
from llmcache.models import hashing, weights
from tests import inside
from tests.models.test_attributes import FAMILIES, SETTINGS, quantised
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens
from tests.topics import classifier, requests

X = padded([6, 4])


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were hashed at a time."""
    counts: list[int] = []

    def counted(tensors: list[Tensor]) -> list[str]:
        counts.append(len(tensors))
        return hashing.digests(tensors)

    monkeypatch.setattr(weights, "digests", counted)
    return counts


def plain(cache: LLMCache) -> Tensor:
    with cache.disabled():
        return states(cache(**X))


def valid(output: Tensor) -> Tensor:
    """States of valid tokens; logits as they are."""
    return output[X["attention_mask"].bool()] if output.ndim == 3 else output


def agrees(cache: LLMCache) -> bool:
    """Whether two calls answer as the plain model does."""
    expected = valid(plain(cache))
    return all(torch.allclose(valid(states(cache(**X))), expected, atol=1e-5) for _ in range(2))


def n_hits(cache: LLMCache) -> int:
    return sum(cache.stats().hits.values())


# -- what is neither parameter nor buffer ------------------------------------------------------------------------------


def test_packed_weights_that_are_replaced_serve_nothing_stale() -> None:
    model, other = quantised(), quantised(1)
    cache = LLMCache.wrap(model)
    assert agrees(cache) and n_hits(cache) == 2
    for layer, theirs in zip(model.encoder.layer, other.encoder.layer, strict=True):
        layer.output.dense._packed_params = theirs.output.dense._packed_params
    assert agrees(cache) and n_hits(cache) == 4


def test_a_save_of_other_packed_weights_is_refused(tmp_path: Path) -> None:
    cache = LLMCache.wrap(quantised())
    cache(**X)
    cache.save(tmp_path)
    with pytest.raises(BankFileError, match="other weights"):
        LLMCache.load(quantised(1), tmp_path)
    with LLMCache.load(quantised(), tmp_path) as loaded:
        loaded(**X)
        assert n_hits(loaded) == 2


def test_weights_that_cannot_be_read_are_computed_and_never_saved(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache(**X)
        cache.save(tmp_path)
    model = build(BARE["bert"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.encoder.layer[1].output.dense = torch.jit.script(model.encoder.layer[1].output.dense)
    with pytest.raises(BankFileError, match="scripted"):
        LLMCache.load(model, tmp_path)
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    stats = cache.stats()
    assert (stats.bypassed["unseen_weights"], stats.n_stored, stats.errors) == (4, 0, 0)
    with pytest.raises(StoreError, match="scripted"):
        cache.save(tmp_path)


@pytest.mark.parametrize("is_warm", [False, True])
def test_offloaded_weights_are_computed_and_counted(is_warm: bool) -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    if is_warm:
        cache(**X)
    expected = plain(cache)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(states(cache(**X)), expected)
    stats = cache.stats()
    assert (stats.bypassed["meta_weights"], stats.errors, n_hits(cache)) == (2, 0, 0)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", [name for name in SETTINGS if name not in ("config", "array", "forward")])
def test_a_setting_that_is_edited_serves_nothing_stale(edit: str, hashed: list[int]) -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    assert agrees(cache) and n_hits(cache) == 2
    hashed.clear()
    SETTINGS[edit](model)
    assert agrees(cache) and n_hits(cache) == 4
    assert sum(hashed) == 0 or edit == "parametrization"


def test_settings_that_take_turns_find_their_own_entries(hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    norm = model.encoder.layer[0].output.LayerNorm
    values = (norm.eps, 0.5)
    for value in values:
        norm.eps = value
        assert agrees(cache)
    hashed.clear()
    monkeypatch.setattr(inside.weights(cache), "_survey", lambda: pytest.fail("what was seen before is known"))
    for value in values * 2:
        norm.eps = value
        assert agrees(cache)
    assert n_hits(cache) == 2 * 2 + 4 * 4 and not hashed


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("neox", "falcon", "gpt_bigcode")])
def test_calls_in_a_row_look_at_nothing_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = dict(X)
    if family in ("marian", "mbart"):
        inputs["decoder_input_ids"] = tokens(2, 3)
    cache = LLMCache.wrap(build(FAMILIES[family]))
    cache(**inputs)  # the first one sees what was hung on the model
    monkeypatch.setattr(inside.weights(cache), "_refresh", lambda: pytest.fail("nothing was edited"))
    for _ in range(2):
        cache(**inputs)
    assert "weights_changed" not in cache.stats().bypassed and cache.stats().errors == 0


def test_attention_in_training_mode_by_itself_is_computed() -> None:
    model = build(BARE["llama"])
    cache = LLMCache.wrap(model)
    cache(**X)
    attention = model.layers[1].self_attn
    attention.attention_dropout = 0.5
    attention.train()
    cache(**X)
    assert cache.stats().bypassed == {"training": 2}


# -- edits during a call -----------------------------------------------------------------------------------------------


@contextmanager
def edited_within(model: nn.Module, edit: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    """Within: weights are edited after layer 0 of each call, and restored when it has ended."""
    with torch.no_grad():
        handle = model.get_submodule("encoder.layer.0.output").register_forward_hook(lambda *_: (edit(), None)[1])
        yield
        handle.remove()
        undo()


@pytest.mark.parametrize("kind", ["in place", "taken back within", "replaced", "setting"])
def test_what_was_computed_by_edited_weights_is_not_stored(kind: str) -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    expected = plain(cache)
    norm = model.encoder.layer[2].output.LayerNorm
    weight, eps = norm.weight, norm.eps
    edits: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "in place": (lambda: weight.mul_(2), lambda: weight.mul_(0.5)),
        "taken back within": (lambda: weight.mul_(2), lambda: None),
        "replaced": (
            lambda: setattr(norm, "weight", nn.Parameter(weight * 2)),
            lambda: setattr(norm, "weight", weight),
        ),
        "setting": (lambda: setattr(norm, "eps", 0.5), lambda: setattr(norm, "eps", eps)),
    }
    last = model.encoder.layer[3].register_forward_pre_hook(
        lambda *_: (weight.mul_(0.5), None)[1] if kind == "taken back within" else None
    )
    with edited_within(model, *edits[kind]):
        mixed = states(cache(**X))
        assert [row.bypassed for row in cache.last] == ["weights_changed"] * 2
    last.remove()
    assert not torch.allclose(mixed, expected)
    assert cache.stats().bypassed["weights_changed"] == 2 and cache.stats().n_stored == 0
    assert torch.equal(plain(cache), expected)
    assert agrees(cache) and n_hits(cache) == 2


def test_prefixes_computed_by_edited_weights_are_not_stored() -> None:
    model = build(GENERATORS["gpt2"])
    cache = LLMCache.wrap(model, prefix_block=4)
    ids = tokens(1, 13)
    weight = model.transformer.h[2].mlp.c_fc.weight
    handle = model.transformer.h[0].mlp.register_forward_hook(lambda *_: (weight.mul_(2), None)[1])
    cache(input_ids=ids)
    handle.remove()
    with torch.no_grad():
        weight.mul_(0.5)
    assert cache.stats().n_blocks == 0 and cache.stats().bypassed == {"weights_changed": 1}
    with cache.disabled():
        expected = cache(input_ids=ids).logits
    for _ in range(2):
        torch.testing.assert_close(cache(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
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


def two_adapters() -> PeftModel:
    torch.manual_seed(3)
    settings = LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    model = get_peft_model(build(CLASSIFIERS["bert"]), settings, adapter_name="north")
    model.add_adapter("south", settings)
    return model.eval()


def test_only_what_was_edited_is_hashed_again(hashed: list[int]) -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    cache(**X)
    hashed.clear()
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.mul_(2)
    assert agrees(cache) and sum(hashed) == 1


def test_adapters_that_take_turns_cost_no_hashing(hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    names = ("north", "south")
    for name in names:
        model.set_adapter(name)
        cache(**X)
    hashed.clear()
    monkeypatch.setattr(inside.weights(cache), "_survey", lambda: pytest.fail("what was seen before is known"))
    for name in names * 2:
        model.set_adapter(name)
        cache(**X)
    assert n_hits(cache) == 8 and not hashed


def test_adapters_that_are_merged_are_hashed_where_they_are(hashed: list[int]) -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    n_tensors = sum(hashed)
    hashed.clear()
    model.merge_adapter()
    assert agrees(cache)
    assert 0 < sum(hashed) < n_tensors
    model.unmerge_adapter()
    assert agrees(cache)


def train_a_step(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    """A forward with gradients and a backward; the step is left."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    model(**X, **more).logits.sum().backward()
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
        expected = plain(cache)
        assert torch.allclose(states(cache(**X)), expected, atol=1e-5)
        assert set(hashed) == {n_trained}
    optimizer.step()
    optimizer.zero_grad()
    assert agrees(cache)
    hashed.clear()
    assert agrees(cache) and not hashed


def test_much_that_holds_gradients_is_computed_and_counted(hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_HELD_BYTES", 1000)
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    cache(**X)
    before = n_hits(cache)
    optimizer = train_a_step(model)
    hashed.clear()
    for _ in range(2):
        optimizer.step()
        assert torch.equal(states(cache(**X)), plain(cache))
    assert cache.stats().bypassed["gradients_held"] == 4 and not hashed
    optimizer.step()
    optimizer.zero_grad()
    assert agrees(cache) and n_hits(cache) == before + 2


def test_a_step_of_a_model_that_is_frozen_afterwards_is_seen() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    optimizer = train_a_step(model)
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(False)
    assert agrees(cache)


@pytest.mark.slow
def test_a_fused_step_after_a_compiled_forward_is_seen() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with warnings.catch_warnings():  # torch's compiler looks at gradients of what is no leaf
        warnings.simplefilter("ignore")
        compiled(**X).logits.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert agrees(cache)


def test_hashing_by_several_threads_gives_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((n,), float(n)) for n in range(1, 40)]
    alone = hashing.digests(tensors)
    monkeypatch.setattr(hashing, "_MANY_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert hashing.digests(tensors) == alone
    assert len(set(alone)) == 39
