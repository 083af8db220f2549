"""Traced, transformed or watched calls are computed, and counted as bypassed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from llmcache import LLMCache
from tests.calls.helpers import agree, assert_close, one_layer, run
from tests.tiny_models import build, tokens

SEEN, OTHER = tokens(2, 6), tokens(2, 6, seed=9)
WEIGHT = "bert.encoder.layer.0.output.dense.weight"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def alone() -> nn.Module:
    """The same model without a cache."""
    return build(one_layer)


@pytest.fixture
def cache() -> LLMCache:
    """A warm cache: both requests are stored, and were served once."""
    cache = LLMCache.wrap(build(one_layer))
    for _ in range(2):
        cache(input_ids=SEEN)
    assert cache.stats().hits == {"exact": 2}
    return cache


@pytest.fixture
def model(cache: LLMCache) -> nn.Module:
    return cache.model


def bypassed(cache: LLMCache, reason: str = "traced") -> int:
    stats = cache.stats()
    assert stats.errors == 0
    assert set(stats.bypassed) == {reason}
    assert stats.hits == {"exact": 2}
    return stats.bypassed[reason]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx_records_the_model(cache: LLMCache, alone: nn.Module, mode: str) -> None:
    with torch.no_grad():
        trace = make_fx(lambda ids: cache.model(input_ids=ids).logits, tracing_mode=mode, _allow_non_fake_inputs=True)
        graph = trace(SEEN)
    assert_close(graph(OTHER), run(alone, input_ids=OTHER))
    assert bypassed(cache) == 2


class Doubling(TorchFunctionMode):
    """Changes the result of an operation, as simulated quantisation does."""

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
    cache: LLMCache, alone: nn.Module, make: Callable[[], AbstractContextManager[Any]]
) -> None:
    logits, counts = [], []
    for one in (cache.model, alone):
        with torch.no_grad(), make() as mode:
            logits.append(one(input_ids=SEEN).logits)
        counts.append(mode.get_total_flops() if isinstance(mode, FlopCounterMode) else getattr(mode, "n_products", 0))
    assert torch.equal(*logits)
    assert counts[0] == counts[1]
    assert bypassed(cache) == 2
    agree(cache, alone, input_ids=SEEN)  # nothing was stored
    assert cache.stats().hits == {"exact": 4}


def test_a_default_device_is_no_such_mode(cache: LLMCache, alone: nn.Module) -> None:
    with torch.device("cpu"):
        agree(cache, alone, input_ids=SEEN)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 4}, {})


def test_vmap(cache: LLMCache, model: nn.Module, alone: nn.Module) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = vmap(lambda ids: model(input_ids=ids).logits)(torch.stack([SEEN, OTHER]))
    assert_close(found, torch.stack([run(alone, input_ids=SEEN), run(alone, input_ids=OTHER)]))
    assert bypassed(cache) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_tangent_is_not_lost(cache: LLMCache, model: nn.Module, alone: nn.Module) -> None:
    weight = alone.get_parameter(WEIGHT).detach()
    direction = torch.linspace(-1, 1, weight.numel()).reshape(weight.shape)  # norms cancel a step of all ones

    def tangent(one: nn.Module) -> Tensor:
        one.set_attn_implementation("eager")

        def answer(value: Tensor) -> Any:
            return functional_call(one, {WEIGHT: value}, (), {"input_ids": SEEN}).logits

        with torch.no_grad():
            found: Tensor = jvp(answer, (weight,), (direction,))[1]
        return found

    assert_close(tangent(model), tangent(alone))
    assert tangent(alone).abs().max() > 0
    assert bypassed(cache) == 2


def test_fake_tensors(cache: LLMCache) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert cache.model(input_ids=mode.from_tensor(SEEN)).logits.shape == (2, 5)
    assert bypassed(cache) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # transformers' own
@pytest.mark.parametrize("is_strict", [False, True])
def test_an_export_holds_the_model_alone(cache: LLMCache, model: nn.Module, alone: nn.Module, is_strict: bool) -> None:
    inputs = {"input_ids": SEEN, "attention_mask": torch.ones_like(SEEN)}
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=inputs, strict=is_strict)
        found = program.module()(**{**inputs, "input_ids": OTHER}).logits
    assert_close(found, run(alone, input_ids=OTHER))
    # A strict export cannot leave its graph to count.
    assert cache.stats().bypassed == ({} if is_strict else {"compiled": 2})
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 2}, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_jit_trace_records_the_model_and_no_stored_state(cache: LLMCache, model: nn.Module, alone: nn.Module) -> None:
    model.config.return_dict = False
    with torch.no_grad():
        traced = torch.jit.trace(model, (SEEN,), check_trace=False)
        assert_close(traced(OTHER)[0], run(alone, input_ids=OTHER))
    assert bypassed(cache, "compiled") == 2


class Symbols(torch.fx.Tracer):
    """Traces into the trunk, but not into its modules."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, tf.BertPreTrainedModel)


def test_a_symbolic_trace_holds_the_model_alone(cache: LLMCache, model: nn.Module, alone: nn.Module) -> None:
    with torch.no_grad():
        graph, expected = (Symbols().trace(nn.Sequential(one)) for one in (model, alone))
    assert str(graph) == str(expected)
    assert bypassed(cache) == 1  # the number of rows is unknown
