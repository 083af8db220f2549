"""Copies, pickles and replicas of a wrapped model equal the plain model's; `unwrap` leaves nothing behind."""

import copy
import functools
import io
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer

from llmcache import LLMCache, WrapError
from tests.contract.judge import ask, check_same
from tests.contract.models import fresh, inputs_of, plain
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, llama, padded, tokenizer, tokens

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
def test_a_copy_runs_its_own_forward(family: str, make: Callable[[nn.Module], nn.Module]) -> None:
    """Trouble costs speed, never correctness: a copy of a wrapped model answers as a copy of the plain one does."""
    plain, model = build(MODELS[family]), build(MODELS[family])
    expected = ask(make(plain), **X)
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        cache(**X)
        twin = make(model)
        for _ in range(2):
            check_same(ask(twin, **X), expected, exact=True)
        check_same(cache(**X), ask(plain, **X))
        assert (cache.stats().n_requests, cache.stats().n_hits) == (4, 2)  # calls of a copy are not counted
    check_same(ask(twin, **X), expected, exact=True)


@pytest.mark.parametrize("make", COPIES)
def test_a_copy_holds_nothing_of_the_cache(make: Callable[[nn.Module], nn.Module]) -> None:
    """docs/reuse.md: a copy of a wrapped model has no hook or forward of the cache, and keeps the user's hooks."""
    plain, model = build(GENERATORS["llama"]), build(GENERATORS["llama"])
    with LLMCache.wrap(model):
        twin, expected = make(model), make(plain)
        assert [name for name, part in twin.named_modules() if "forward" in vars(part)] == []
        found = [(path, name) for path, name, _ in attributes(twin)]
        assert sorted(found) == sorted((path, name) for path, name, _ in attributes(expected))
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in twin.modules())
        model.model.norm.register_forward_hook(users_hook)
        hooks = [hook for part in make(model).modules() for hook in part._forward_hooks.values()]
        assert hooks == [users_hook]


def users_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing; copies must keep this hook."""


class Deep(BertLayer):
    """Defines `__deepcopy__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(vars(self), memo)
        return twin


class State(BertLayer):
    """Defines the state to pickle."""

    def __getstate__(self) -> dict[str, Any]:
        return {"all": vars(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state["all"])  # type: ignore[no-untyped-call]


class Reduced(BertLayer):
    """Defines `__reduce__`."""

    def __reduce__(self) -> Any:
        return make_layer, (type(self), vars(self))


def make_layer(kind: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    layer = kind.__new__(kind)
    vars(layer).update(attributes)
    return layer


@pytest.mark.parametrize(("kind", "make"), [(Deep, deep), (State, pickled), (Reduced, deep), (Reduced, pickled)])
def test_a_copy_of_a_class_that_copies_itself_runs_its_own_forward(kind: Any, make: Any) -> None:
    """docs/reuse.md: a copy of a wrapped model is a copy of the plain model, even if its class copies itself."""
    plain, model = build(BARE["bert"]), build(BARE["bert"])
    for one in (*plain.encoder.layer, *model.encoder.layer):
        one.__class__ = kind
    with LLMCache.wrap(model):
        check_same(ask(make(model), **X), ask(make(plain), **X), exact=True)


def test_a_layer_put_back_as_its_copy_runs_its_own_forward() -> None:
    """docs/reuse.md: layers may be replaced after wrapping."""
    plain, model = build(BARE["bert"]), build(BARE["bert"])
    with LLMCache.wrap(model) as cache:
        cache(**X)
        for one in (plain, model):
            one.encoder.layer[1] = shallow(one.encoder.layer[1])
        for _ in range(2):
            check_same(cache(**X), ask(plain, **X))


def test_a_copy_of_a_model_under_a_foreign_wrapper_has_its_own_weights() -> None:
    """docs/reuse.md: forwards that others put on a model stay as they were, in copies too."""
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
    model = build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model) as first:
        twin = shallow(model)
        expected = ask(twin, **X)
        with LLMCache.wrap(twin, auto_bypass=False) as second:
            for _ in range(2):
                check_same(second(**X), expected)
            assert second.stats().n_hits == 2
        assert first.stats().n_requests == 0
        with pytest.raises(WrapError):
            LLMCache.wrap(model)


# -- pickles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert with a head", "llama"])
def test_a_pickle_is_that_of_the_plain_model(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """docs/reuse.md: a wrapped model is pickled as the plain one, and the log says so."""
    model = build(MODELS[family])
    before = pickle.dumps(model)
    with LLMCache.wrap(model), caplog.at_level(logging.INFO, "llmcache"):
        data = pickle.dumps(model)
    assert b"llmcache" not in data and len(data) == len(before)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_model_with_a_foreign_forward_is_pickled_with_it() -> None:
    """docs/reuse.md: forwards that others put on a model stay as they were, in pickles too."""
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
    import tempfile

    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    with tempfile.TemporaryDirectory() as folder:
        build(BARE["bert"]).save_pretrained(folder)  # type: ignore[operator]
        tokenizer().save_pretrained(folder)
        body = Transformer(folder)
    return SentenceTransformer(modules=[body, Pooling(32, "mean")], device="cpu").eval()


@pytest.mark.parametrize("make", [shallow, deep])
def test_a_copy_of_a_sentence_model_holds_nothing_of_the_cache(make: Callable[[Any], Any]) -> None:
    """docs/reuse.md: a copy of a wrapped model is a copy of the plain model, pooling layer included."""
    model = sentences()
    texts, expected = ["w1 w2 w3", "w4"], make(model).encode(["w1 w2 w3", "w4"])
    with LLMCache.wrap(model, payload="mean"):
        model.encode(texts)
        twin = make(model)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in twin.modules())
        assert torch.equal(torch.tensor(twin.encode(texts)), torch.tensor(expected))


def test_what_a_wrapped_model_saves_is_that_of_the_plain_one(tmp_path: Path) -> None:
    """docs/reuse.md: `state_dict()` and `save_pretrained` of a wrapped model give the plain model's weights."""
    plain, model = build(CLASSIFIERS["bert"]), build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model) as cache:
        cache(**X)
        ours, theirs = model.state_dict(), plain.state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(plain).from_pretrained(tmp_path).eval()  # type: ignore[attr-defined]
    check_same(ask(loaded, **X), ask(plain, **X), exact=True)


# -- unwrap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "classifier"),
        ("gpt2", "causal"),
        ("qwen3", "causal"),
        ("t5", "seq2seq"),
        ("bart", "seq2seq"),
    ],
)
def test_unwrap_leaves_every_attribute_as_it_was(family: str, kind: str) -> None:
    """docs/api.md: `unwrap` removes the cache, and nothing of it stays on the model, copied or not."""
    model, inputs = fresh(family, kind), inputs_of(family, kind)
    expected = ask(model, **inputs)
    before = attributes(model)
    for _ in range(2):
        cache = LLMCache.wrap(model)
        for _ in range(2):
            ask(model, **inputs)
        for make in COPIES[:4]:
            make(model)
        assert cache.unwrap() is model
        assert attributes(model) == before
    check_same(ask(model, **inputs), expected, exact=True)


def test_unwrap_leaves_a_sentence_transformer_as_it_was() -> None:
    """docs/api.md: `unwrap` leaves a sentence-transformers model as it was, its pooling layer included."""
    model, texts = sentences(), ["w1 w2 w3", "w4"]
    expected = torch.tensor(model.encode(texts))
    before = attributes(model)
    with LLMCache.wrap(model, payload="mean"):
        model.encode(texts)
    assert attributes(model) == before
    check_same(torch.tensor(model.encode(texts)), expected)


@pytest.mark.parametrize(("family", "kind"), [("bert", "classifier"), ("llama", "causal")])
def test_unwrap_while_other_threads_call(family: str, kind: str) -> None:
    """docs/architecture.md: `unwrap` waits for no call; running calls answer right, and the model is as before."""
    model = fresh(family, kind)
    calls = [{"input_ids": tokens(2, length, seed=length % 4)} for length in range(4, 10)]
    expected = [ask(plain(family, kind), **call) for call in calls]
    ask(model, **calls[0])
    before, done, troubles = attributes(model), threading.Event(), []

    def work(turn: int) -> None:
        try:
            while not done.is_set():
                turn += 1
                number = turn % len(calls)
                check_same(ask(model, **calls[number]), expected[number], where=f"call {number}")
        except BaseException as trouble:
            troubles.append(trouble)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            with LLMCache.wrap(model):
                for call, output in zip(calls[:3], expected, strict=False):
                    check_same(ask(model, **call), output)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert troubles == []
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

    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


MADE: dict[str, Callable[[], Any]] = {
    "trunk": BARE["bert"],
    "head": CLASSIFIERS["bert"],
    "decoder": GENERATORS["llama"],
}


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("kind", MADE)
def test_accelerate_prepares_a_wrapped_model(kind: str) -> None:
    """docs/reuse.md: accelerate's `prepare_model` and `unwrap_model` may come after wrapping."""
    plain, model = prepare(build(MADE[kind])), build(MADE[kind])
    before = attributes(model)
    cache = LLMCache.wrap(model, auto_bypass=False)
    prepared = prepare(model)
    for _ in range(2):
        check_same(ask(prepared, **X), ask(plain, **X))
    assert cache.stats().n_hits > 0
    assert take_apart(model) is model
    n_hits, expected = cache.stats().n_hits, ask(build(MADE[kind]), **X)
    for _ in range(2):
        check_same(ask(model, **X), expected)
    assert cache.stats().n_hits > n_hits  # the cache is still on
    cache.unwrap()
    theirs = ("_is_accelerate_prepared", "forward")  # accelerate leaves these on a plain model too
    assert [one for one in attributes(model) if one[:1] != ("",) or one[1] not in theirs] == before
    check_same(ask(model, **X), expected, exact=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(("kind", "is_unwrapped_first"), [("head", True), ("head", False), ("decoder", True)])
def test_a_prepared_model_is_wrapped(kind: str, is_unwrapped_first: bool) -> None:
    """docs/reuse.md: accelerate's `prepare_model` and `unwrap_model` may come before wrapping, or around it."""
    plain, model = prepare(build(MADE[kind])), prepare(build(MADE[kind]))
    cache = LLMCache.wrap(model, auto_bypass=False)
    for _ in range(2):
        check_same(ask(model, **X), ask(plain, **X))
    assert cache.stats().n_hits > 0
    if is_unwrapped_first:
        cache.unwrap()
        check_same(ask(model, **X), ask(plain, **X), exact=True)
    take_apart(model)
    take_apart(plain)
    for _ in range(2):
        check_same(ask(model, **X), ask(plain, **X))
    cache.unwrap()
    check_same(ask(model, **X), ask(plain, **X), exact=True)


def test_what_lies_on_top_of_the_cache_has_to_go_first() -> None:
    """docs/reuse.md: `unwrap` refuses while another forward lies on top, and works once that is gone."""
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    below = model.forward
    model.forward = lambda *args, **kwargs: below(*args, **kwargs)
    with pytest.raises(WrapError):
        cache.unwrap()
    model.forward = below
    cache.unwrap()
    assert "forward" not in vars(model)


# -- others that copy --------------------------------------------------------------------------------------------------


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module  # type: ignore[no-any-return]


def of_functions(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the model with other weights, by `torch.func`."""
    weights = {name: one.detach() * 1.5 for name, one in model.named_parameters()}
    return lambda **inputs: torch.func.functional_call(model, weights, args=(), kwargs=inputs)


@pytest.mark.parametrize(
    ("family", "use"),
    [
        ("bert with a head", averaged),
        ("bert with a head", of_functions),
        ("bert with a head", nn.DataParallel),
        ("llama", lambda model: copy.copy(copy.deepcopy(model))),
    ],
)
def test_what_torch_makes_of_a_wrapped_model_answers_as_of_the_plain_one(family: str, use: Any) -> None:
    """Trouble costs speed, never correctness: torch's copies and calls of a wrapped model answer right."""
    plain, model = build(MODELS[family]), build(MODELS[family])
    expected = ask(use(plain), **X)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            cache(**X)
            check_same(ask(use(model), **X), expected)


def test_a_decoders_copy_generates_as_the_plain_one(tmp_path: Path) -> None:
    """docs/reuse.md: a copy of a wrapped model generates the tokens of a copy of the plain model."""
    plain = build(lambda: tf.LlamaForCausalLM(llama()))
    model: Any = build(lambda: tf.LlamaForCausalLM(llama()))
    ids = tokens(1, 8)
    wanted: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with LLMCache.wrap(model) as cache:
        model.generate(ids, **wanted)
        for make in (shallow, pickled):
            found: Tensor = make(model).generate(ids, **wanted)
            assert torch.equal(found, make(plain).generate(ids, **wanted))
        torch.save(model, tmp_path / "model.pt")
        assert cache.stats().n_hits == 0
