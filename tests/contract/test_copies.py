"""Copies, pickles and replicas of a wrapped model equal the plain model's; `unwrap` leaves nothing behind."""

import copy
import functools
import io
import logging
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import LLMCache, WrapError
from tests.contract.judge import ask, check_calls, check_same, wrapped
from tests.contract.models import fresh, inputs_of, plain, sentence_model
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, tokens

X = padded([6, 4])
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert with a head": CLASSIFIERS["bert"],
    "gpt2": GENERATORS["gpt2"],
    "llama": BARE["llama"],
    "t5": BARE["t5"],
}


def scale(model: nn.Module, factor: float = 1.5) -> nn.Module:
    """Change all weights in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def shallow(model: nn.Module) -> nn.Module:
    """Copy each module by `copy.copy`, and give the copies their own weights."""
    twin = copy.copy(model)
    twin._modules = {name: part and shallow(part) for name, part in model._modules.items()}
    twin._parameters = {
        name: one if one is None else nn.Parameter(one.detach() * 1.5) for name, one in model._parameters.items()
    }
    return twin


def replica(model: nn.Module) -> nn.Module:
    """Replicate as `torch.nn.parallel.replicate` does for another device, with other weights."""
    copies: dict[nn.Module, Any] = {part: part._replicate_for_data_parallel() for part in model.modules()}  # type: ignore[operator]
    for part, twin in copies.items():
        twin._modules = {name: child and copies[child] for name, child in part._modules.items()}
        for name, one in part._parameters.items():
            setattr(twin, name, one if one is None else one.detach() * 1.5)
    return copies[model]  # type: ignore[no-any-return]


def pickled(model: nn.Module) -> nn.Module:
    return scale(pickle.loads(pickle.dumps(model)))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return scale(torch.load(file, weights_only=False))


def deep(model: nn.Module) -> nn.Module:
    return scale(copy.deepcopy(model))


COPIES = [shallow, replica, pickled, saved, deep]


def attributes(model: nn.Module) -> list[tuple[str, str, Any]]:
    """List all attributes of all modules: path, name, and identity of the value or of its elements."""

    def held(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, id(one)) for key, one in value.items()]
        return [id(one) for one in value] if isinstance(value, list | set) else id(value)

    return [(path, name, held(value)) for path, part in model.named_modules() for name, value in vars(part).items()]


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "make"),
    [("bert with a head", make) for make in COPIES] + [("llama", shallow), ("t5", shallow), ("gpt2", replica)],
)
def test_a_copy_is_that_of_the_plain_model(family: str, make: Callable[[nn.Module], nn.Module]) -> None:
    """inside/reuse.md: a copy of a wrapped model runs its own forward, and holds the user's hooks and none of ours."""
    with wrapped(MODELS[family]) as (cache, plain):
        cache(**X)
        twin, own = make(cache.model), make(plain)
        expected = ask(own, **X)
        assert sorted(one[:2] for one in attributes(twin)) == sorted(one[:2] for one in attributes(own))
        for part in twin.modules():
            assert "forward" not in vars(part) and not part._forward_hooks and not part._forward_pre_hooks
        for _ in range(2):
            check_same(ask(twin, **X), expected, exact=True)
        assert check_calls(cache, plain, X, repeats=1) == 2
        assert cache.stats().n_requests == 4  # calls of a copy are not counted
        [*cache.model.modules()][-1].register_forward_hook(users_hook)
        assert [hook for part in make(cache.model).modules() for hook in part._forward_hooks.values()] == [users_hook]
    check_same(ask(twin, **X), expected, exact=True)


def users_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing; copies must keep this hook."""


class Deep(tf.BertModel):
    """Defines `__deepcopy__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(vars(self), memo)
        return twin


class State(tf.BertModel):
    """Defines the state to pickle."""

    def __getstate__(self) -> dict[str, Any]:
        return {"all": vars(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state["all"])


@pytest.mark.parametrize(("kind", "make"), [(Deep, deep), (State, deep), (State, pickled)])
def test_a_copy_of_a_class_that_copies_itself_runs_its_own_forward(kind: Any, make: Any) -> None:
    """inside/reuse.md: a copy of a wrapped model is a copy of the plain model, even if its class copies itself."""
    with wrapped(BARE["bert"]) as (cache, plain):
        plain.__class__ = cache.model.__class__ = kind
        twin, expected = make(cache.model), make(plain)
        assert kind is Deep or vars(twin).keys() == vars(expected).keys()  # it copies the swapped forward as its own
        check_same(ask(twin, **X), ask(expected, **X), exact=True)


def test_a_copy_of_a_model_under_a_foreign_wrapper_has_its_own_weights() -> None:
    """inside/reuse.md: forwards that others put on a model stay as they were, in copies too."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    plain, model = build(BARE["bert"]), build(BARE["bert"])
    for layer in model.encoder.layer:
        add_hook_to_module(layer, ModelHook())
    with LLMCache.wrap(model):
        twin = copy.deepcopy(model)
        scale(model)
        check_same(ask(twin, **X), ask(plain, **X), exact=True)


def test_a_copy_can_be_wrapped_by_itself() -> None:
    """README: `LLMCache.wrap(model)` takes any model, also a copy of a wrapped one."""
    with wrapped(CLASSIFIERS["bert"]) as (first, plain):
        twin = shallow(first.model)
        with LLMCache.wrap(twin, auto_bypass=False) as second:
            assert check_calls(second, shallow(plain), X) == 2
        assert first.stats().n_requests == 0


# -- pickles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert with a head", "llama"])
def test_a_pickle_is_that_of_the_plain_model(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """inside/reuse.md: a wrapped model is pickled as the plain one, and the log says so."""
    model = build(MODELS[family])
    before = pickle.dumps(model)
    with LLMCache.wrap(model), caplog.at_level(logging.INFO, "llmcache"):
        data = pickle.dumps(model)
    assert b"llmcache" not in data and len(data) == len(before)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_model_with_a_foreign_forward_is_pickled_with_it() -> None:
    """inside/reuse.md: forwards that others put on a model stay as they were, in pickles too."""
    model = build(BARE["bert"])
    model.pooler.forward = model.embeddings.LayerNorm.forward
    model.encoder.forward = model.encoder.forward
    expected = ask(model, **X)
    with LLMCache.wrap(model):
        twin = pickle.loads(pickle.dumps(model))
        assert {name for name, part in twin.named_modules() if "forward" in vars(part)} == {"pooler", "encoder"}
    check_same(ask(twin, **X), expected)


def sentences() -> Any:
    """A tiny sentence-transformers model."""
    return copy.deepcopy(_sentences())


@functools.cache
def _sentences() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return sentence_model(Path(folder), bert=build(BARE["bert"]))


@pytest.mark.parametrize("make", [shallow, deep])
def test_a_copy_of_a_sentence_model_holds_nothing_of_the_cache(make: Callable[[Any], Any]) -> None:
    """inside/reuse.md: a copy of a wrapped model is a copy of the plain model, with its pooling layer and the rest."""
    model, texts = sentences(), ["w1 w2 w3", "w4"]
    own, expected, before = model.encode(texts), make(model).encode(texts), attributes(model)
    with LLMCache.wrap(model, payload="mean"):
        model.encode(texts)
        twin = make(model)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in twin.modules())
        assert (twin.encode(texts) == expected).all()
    assert attributes(model) == before
    assert model.encode(texts) == pytest.approx(own, abs=1e-5)


def test_what_a_wrapped_model_saves_is_that_of_the_plain_one(tmp_path: Path) -> None:
    """inside/reuse.md: `state_dict()` and `save_pretrained` of a wrapped model give the plain model's weights."""
    with wrapped(CLASSIFIERS["bert"]) as (cache, plain):
        cache(**X)
        check_same(dict(cache.model.state_dict()), dict(plain.state_dict()), exact=True)
        cache.model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    check_same(ask(loaded, **X), ask(plain, **X), exact=True)


# -- unwrap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    [
        *(("bert", "classifier", settings) for settings in ({}, {"tau": 0.9}, {"tau": 0.9, "layers": "last"})),
        ("llama", "bare", {"tau": 0.9}),
        *((family, "causal", {}) for family in ("gpt2", "qwen3")),
        *((family, "seq2seq", {}) for family in ("t5", "bart")),
    ],
)
def test_unwrap_leaves_every_attribute_as_it_was(family: str, kind: str, settings: dict[str, Any]) -> None:
    """docs/api.md: `unwrap` removes the cache, and nothing of it stays on the model, copied or not."""
    model, inputs = fresh(family, kind), inputs_of(family, kind)
    expected, before = ask(model, **inputs), attributes(model)
    for _ in range(2):
        cache = LLMCache.wrap(model, **settings)
        with pytest.raises(WrapError, match="already wrapped"):
            LLMCache.wrap(model, **settings)
        for _ in range(2):
            ask(model, **inputs)
        for make in COPIES[:4]:
            make(model)
        assert cache.unwrap() is model is cache.unwrap() and attributes(model) == before
    check_same(ask(model, **inputs), expected, exact=True)


@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    [("bert", "classifier", {}), ("llama", "causal", {}), ("bert", "classifier", {"tau": 0.9999})],
)
def test_unwrap_while_other_threads_call(family: str, kind: str, settings: dict[str, Any]) -> None:
    """docs/architecture.md: `unwrap` waits for no call; running calls answer right, and the model is as before."""
    model, done = fresh(family, kind), threading.Event()
    calls = [{"input_ids": tokens(2, length, seed=length % 4)} for length in range(4, 10)]
    expected = [ask(plain(family, kind), **call) for call in calls]
    ask(model, **calls[0])
    before = attributes(model)

    def work(turn: int) -> None:
        while not done.is_set():
            turn = (turn + 1) % len(calls)
            check_same(ask(model, **calls[turn]), expected[turn], where=f"call {turn}")

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, number) for number in range(2)]
        try:
            for _ in range(4):
                with LLMCache.wrap(model, **settings):
                    for call, output in zip(calls[:3], expected, strict=False):
                        check_same(ask(model, **call), output)
        finally:
            done.set()
        assert [one.result() for one in working] == [None, None]
    assert attributes(model) == before


# -- accelerate --------------------------------------------------------------------------------------------------------


def prepare(model: Any) -> Any:
    return accelerator().prepare_model(model, evaluation_mode=True)


def take_apart(model: Any) -> Any:
    return accelerator().unwrap_model(model, keep_fp32_wrapper=False)


def accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision="bf16")


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for step in ("before", "after"):  # another test of this process may have set it
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        if step == "before":
            yield


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("family", ["t5", "bert with a head", "gpt2"])
def test_accelerate_prepares_a_wrapped_model(family: str) -> None:
    """inside/reuse.md: accelerate's `prepare_model` and `unwrap_model` may come after wrapping."""
    model, own = build(MODELS[family]), build(MODELS[family])
    before = attributes(model)
    cache = LLMCache.wrap(model, auto_bypass=False)
    prepare(model)
    assert check_calls(cache, prepare(build(MODELS[family])), X) > 0
    assert take_apart(model) is model
    assert check_calls(cache, own, X) > 0  # the cache is still on
    cache.unwrap()
    theirs = ("_is_accelerate_prepared", "forward")  # accelerate leaves these on a plain model too
    assert [one for one in attributes(model) if one[:1] != ("",) or one[1] not in theirs] == before
    check_same(ask(model, **X), ask(own, **X), exact=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("family", "is_unwrapped_first"), [("bert with a head", True), ("bert with a head", False), ("gpt2", True)]
)
def test_a_prepared_model_is_wrapped(family: str, is_unwrapped_first: bool) -> None:
    """inside/reuse.md: accelerate's `prepare_model` and `unwrap_model` may come before wrapping, or around it."""
    own, model = prepare(build(MODELS[family])), prepare(build(MODELS[family]))
    cache = LLMCache.wrap(model, auto_bypass=False)
    assert check_calls(cache, own, X) > 0
    if is_unwrapped_first:
        cache.unwrap()
        check_same(ask(model, **X), ask(own, **X), exact=True)
    take_apart(model)
    take_apart(own)
    check_calls(cache, own, X)
    cache.unwrap()
    check_same(ask(model, **X), ask(own, **X), exact=True)


def test_what_lies_on_top_of_the_cache_has_to_go_first() -> None:
    """inside/reuse.md: `unwrap` refuses while another forward lies on top, and works once that is gone."""
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    below = model.forward
    model.forward = lambda *args, **kwargs: below(*args, **kwargs)
    with pytest.raises(WrapError):
        cache.unwrap()
    model.forward = below
    cache.unwrap()
    assert "forward" not in vars(model)
