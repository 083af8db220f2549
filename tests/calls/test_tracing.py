"""Traced, transformed or watched calls are computed, and counted as bypassed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.autograd import forward_ad
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from llmcache import LLMCache
from tests.calls.helpers import agree, one_layer
from tests.contract.judge import check_same
from tests.tiny_models import build, tokens

SEEN, OTHER = tokens(2, 6), tokens(2, 6, seed=9)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make() -> Any:
    model: Any = build(one_layer)
    model.set_attn_implementation("eager")  # vmap cannot take the others apart
    return model


def batched(model: Any) -> Any:
    return vmap(lambda ids: model(input_ids=ids).logits)(torch.stack([SEEN, OTHER]))


def traced(model: Any) -> Any:
    model.config.return_dict = False
    return torch.jit.trace(model, (SEEN,), check_trace=False)(OTHER)[0]


def exported(model: Any, is_strict: bool = False) -> Any:
    inputs = {"input_ids": SEEN, "attention_mask": torch.ones_like(SEEN)}
    program = torch.export.export(model, (), kwargs=inputs, strict=is_strict)
    return program.module()(**{**inputs, "input_ids": OTHER}).logits


def exported_strictly(model: Any) -> Any:
    return exported(model, is_strict=True)


def compiled(model: Any) -> Any:
    run: Any = torch.compile(model, backend="eager")
    return torch.cat([run(input_ids=SEEN).logits, run(input_ids=OTHER).logits])


class Symbols(torch.fx.Tracer):
    """Traces into the trunk, but not into its modules."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, tf.BertPreTrainedModel)


def symbolic(model: Any) -> Any:
    return str(Symbols().trace(nn.Sequential(model)))


class Doubling(TorchFunctionMode):
    """Changes the result of an operation, as simulated quantisation does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.nn.functional.gelu else output


def within(mode: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    """Return a call within a mode, which gives what the mode counted, too."""

    def call(model: Any) -> Any:
        with mode() as found:
            logits = model(input_ids=SEEN).logits
        return logits, isinstance(found, FlopCounterMode) and found.get_total_flops()

    return call


#: By name: the use of a model, the reason that is counted, and the number of rows.
USES: dict[str, tuple[Callable[[Any], Any], str, int]] = {
    "vmap": (batched, "traced", 2),
    "symbols": (symbolic, "traced", 1),  # the number of rows is unknown
    "a mode of functions": (within(Doubling), "traced", 2),
    "a counter": (within(lambda: FlopCounterMode(display=False)), "traced", 2),
    "forward mode": (within(forward_ad.dual_level), "traced", 2),
    "jit": (traced, "compiled", 2),
    "export": (exported, "compiled", 2),
    "strict export": (exported_strictly, "", 0),  # it cannot leave its graph to count
    "compile": (compiled, "compiled", 4),
}
SLOW = ("export", "strict export", "compile")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # transformers' own
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in USES])
def test_a_use_that_must_see_the_model_gets_the_model_alone(name: str) -> None:
    use, reason, n_rows = USES[name]
    alone, cache = make(), LLMCache.wrap(make())
    for _ in range(2):
        agree(cache, alone, input_ids=SEEN)
    with torch.no_grad():
        check_same(use(cache.model), use(alone))
    stats = cache.stats()
    assert (stats.hits, stats.errors) == ({"exact": 2}, 0)
    assert stats.bypassed == ({reason: n_rows} if reason else {})
    alone.config.return_dict = cache.model.config.return_dict = True
    agree(cache, alone, input_ids=SEEN)  # nothing was stored
    assert cache.stats().hits == {"exact": 4}


def test_a_default_device_is_no_such_mode() -> None:
    alone, cache = make(), LLMCache.wrap(make())
    for _ in range(2):
        with torch.device("cpu"):
            agree(cache, alone, input_ids=SEEN)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 2}, {})
