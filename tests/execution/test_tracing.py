"""Calls that are traced, transformed or watched: never answered from the store, and counted."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llmcache import LLMCache
from tests.tiny_models import CLASSIFIERS, build, padded, tokens

SEEN, OTHER = tokens(2, 6), tokens(2, 6, seed=9)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    return build(CLASSIFIERS["bert"])


@pytest.fixture
def cache(model: nn.Module) -> LLMCache:
    """What a hit would come from is stored, and how a hit is answered before the layers is known."""
    cache = LLMCache.wrap(model)
    for _ in range(2):
        cache(input_ids=SEEN)
    assert cache.stats().hits == {"exact": 2}
    return cache


def plain(ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return build(CLASSIFIERS["bert"])(input_ids=ids).logits


def bypassed(cache: LLMCache, reason: str = "traced") -> int:
    stats = cache.stats()
    assert stats.errors == 0
    assert set(stats.bypassed) == {reason}
    assert stats.hits == {"exact": 2}
    return stats.bypassed[reason]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_model(model: nn.Module, cache: LLMCache, mode: str) -> None:
    with torch.no_grad():
        graph = make_fx(lambda ids: model(input_ids=ids).logits, tracing_mode=mode, _allow_non_fake_inputs=True)(SEEN)
    torch.testing.assert_close(graph(OTHER), plain(OTHER), atol=1e-5, rtol=1e-5)
    assert bypassed(cache) == 2


class Doubling(TorchFunctionMode):
    """Changes what an operation does, as one that simulates quantisation would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.nn.functional.gelu else output


class Watching(TorchDispatchMode):
    """Sees every operation."""

    n_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_products += "mm" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Doubling, Watching, lambda: FlopCounterMode(display=False), forward_ad.dual_level])
def test_a_mode_sees_what_it_sees_of_the_plain_model(
    model: nn.Module, cache: LLMCache, make: Callable[[], AbstractContextManager[Any]]
) -> None:
    logits, counts = [], []
    for one in (model, build(CLASSIFIERS["bert"])):
        with torch.no_grad(), make() as mode:
            logits.append(one(input_ids=SEEN).logits)
        counts.append(mode.get_total_flops() if isinstance(mode, FlopCounterMode) else getattr(mode, "n_products", 0))
    assert torch.equal(*logits)
    assert counts[0] == counts[1]
    assert bypassed(cache) == 2
    torch.testing.assert_close(cache(input_ids=SEEN).logits, plain(SEEN), atol=1e-5, rtol=1e-5)  # nothing was stored
    assert cache.stats().hits == {"exact": 4}


def test_a_default_device_is_no_such_mode(model: nn.Module, cache: LLMCache) -> None:
    with torch.device("cpu"):
        torch.testing.assert_close(cache(input_ids=SEEN).logits, plain(SEEN), atol=1e-5, rtol=1e-5)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 4}, {})


def test_vmap(model: nn.Module, cache: LLMCache) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        many = vmap(lambda ids: model(input_ids=ids).logits)
        found = many(torch.stack([SEEN, OTHER]))
    torch.testing.assert_close(found, torch.stack([plain(SEEN), plain(OTHER)]), atol=1e-5, rtol=1e-5)
    assert bypassed(cache) == 2


def test_functionalize(model: nn.Module, cache: LLMCache) -> None:
    with torch.no_grad():
        found = functionalize(lambda ids: model(input_ids=ids).logits)(SEEN)
    torch.testing.assert_close(found, plain(SEEN), atol=1e-5, rtol=1e-5)
    assert bypassed(cache) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_tangent_is_not_lost(model: nn.Module, cache: LLMCache) -> None:
    weight = model.bert.encoder.layer[0].output.dense.weight.detach()
    name = "bert.encoder.layer.0.output.dense.weight"

    def answer(one: nn.Module, value: Tensor) -> Tensor:
        found: Tensor = functional_call(one, {name: value}, (), {"input_ids": SEEN}).logits
        return found

    tangents = []
    for one in (model, build(CLASSIFIERS["bert"])):
        one.set_attn_implementation("eager")
        with torch.no_grad():
            tangents.append(jvp(lambda value, one=one: answer(one, value), (weight,), (torch.ones_like(weight),))[1])
    torch.testing.assert_close(*tangents)
    assert tangents[0].abs().max() > 0
    assert bypassed(cache) == 2


def test_other_weights_for_one_call_give_their_own_answer(model: nn.Module, cache: LLMCache) -> None:
    """`functional_call` alone transforms nothing: its weights have a digest of their own."""
    name = "bert.encoder.layer.0.output.dense.weight"
    weight = model.get_parameter(name).detach() * 2
    changed = build(CLASSIFIERS["bert"])
    with torch.no_grad():
        changed.get_parameter(name).mul_(2)
        expected = changed(input_ids=SEEN).logits
        for _ in range(2):
            found = functional_call(model, {name: weight}, (), {"input_ids": SEEN}).logits
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(input_ids=SEEN).logits, plain(SEEN), atol=1e-5, rtol=1e-5)


class Labelled(Tensor):
    """A class of one's own, which operations hand on."""


def test_a_tensor_of_another_class_gets_what_the_plain_model_returns(model: nn.Module, cache: LLMCache) -> None:
    ids = SEEN.as_subclass(Labelled)
    with torch.inference_mode():
        expected = build(CLASSIFIERS["bert"])(input_ids=ids).logits
    found = cache(input_ids=ids).logits
    assert type(found) is type(expected)
    assert torch.equal(found, expected)
    assert bypassed(cache) == 2


def test_fake_tensors(cache: LLMCache) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert cache.model(input_ids=mode.from_tensor(SEEN)).logits.shape == (2, 5)
    assert bypassed(cache) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # transformers' own
@pytest.mark.parametrize("is_strict", [False, True])
def test_an_export_holds_the_model_alone(model: nn.Module, cache: LLMCache, is_strict: bool) -> None:
    inputs = {"input_ids": SEEN, "attention_mask": torch.ones_like(SEEN)}
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=inputs, strict=is_strict)
        found = program.module()(**{**inputs, "input_ids": OTHER}).logits
    torch.testing.assert_close(found, plain(OTHER), atol=1e-5, rtol=1e-5)
    # A strict one cannot leave its graph to count.
    assert cache.stats().bypassed == ({} if is_strict else {"compiled": 2})
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 2}, 0)


class Symbols(torch.fx.Tracer):
    """Goes into the trunk, but not into what it is made of."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, tf.BertPreTrainedModel)


def test_a_symbolic_trace_holds_the_model_alone(model: nn.Module, cache: LLMCache) -> None:
    with torch.no_grad():
        graph, expected = (Symbols().trace(nn.Sequential(one)) for one in (model, build(CLASSIFIERS["bert"])))
    assert str(graph) == str(expected)
    assert bypassed(cache) == 1  # how many rows is not known


def test_padded_inputs_are_watched_as_well(cache: LLMCache) -> None:
    inputs = padded([6, 4])
    with torch.no_grad(), Watching():
        cache.model(**inputs)
    assert bypassed(cache) == 2
