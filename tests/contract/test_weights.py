"""After an edit of weights, by whatever means, no answer comes from the old ones."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from llmcache import LLMCache, UnfitBankError
from tests.contract.judge import ask, check_same
from tests.forks import in_child
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, tokens

X = padded([6, 4])
#: Calls within which the cache sees an edit of part of a tensor that leaves no other trace (docs/reuse.md).
PLACES = 8

Edit = Callable[[Any], object]


def wrap(model: nn.Module) -> LLMCache:
    return LLMCache.wrap(model, auto_bypass=False)


def plain(cache: LLMCache, **inputs: Any) -> Any:
    with cache.disabled():
        return ask(cache.model, **inputs)


def check(cache: LLMCache, **inputs: Any) -> None:
    """Assert that a call is computed with the present weights, and its repeat served."""
    inputs = inputs or X
    expected, n_rows = plain(cache, **inputs), len(inputs["input_ids"])
    for hits in (0, n_rows):
        before = cache.stats().n_hits
        check_same(ask(cache.model, **inputs), expected)
        assert cache.stats().n_hits - before == hits


def weight(model: Any) -> Any:
    return model.encoder.layer[1].output.dense.weight


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory with its own version counter, as in another process."""
    return torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


def another() -> dict[str, Tensor]:
    return build(BARE["bert"], seed=7).state_dict()


def quietly(edit: Edit) -> Edit:
    """Make an edit run without warnings and gradients."""

    def made(model: Any) -> None:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            edit(model)

    return made


def step(model: Any) -> None:
    """Step a fused optimizer, which raises no version counter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(**X).last_hidden_state.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def average(model: Any) -> None:
    """Blend in averaged weights, as trainers do before evaluation."""
    for parameter, mean in zip(model.parameters(), build(BARE["bert"], seed=7).parameters(), strict=True):
        parameter.data.lerp_(mean.data, 0.5)


# Edits that leave another trace than values: a version counter, a replaced object, gradients.
SEEN: dict[str, Edit] = {
    "in place": quietly(lambda m: weight(m).mul_(1.5)),
    "load_state_dict": lambda m: m.load_state_dict(another()),
    "load_state_dict, assigned": lambda m: m.load_state_dict(another(), assign=True),
    "another parameter": lambda m: setattr(
        m.encoder.layer[0].output.dense, "weight", nn.Parameter(torch.randn(32, 48))
    ),
    "a fused step": step,
    "pruned": lambda m: prune.l1_unstructured(m.encoder.layer[1].output.dense, "weight", amount=0.5),
    "quantised": quietly(lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, inplace=True)),
    "swapped": quietly(lambda m: torch.utils.swap_tensors(weight(m), nn.Parameter(torch.randn(32, 48)))),
    "an epsilon": lambda m: setattr(m.encoder.layer[0].output.LayerNorm, "eps", 0.5),
    "another attention": lambda m: m.set_attn_implementation("eager"),
}
# Edits that show in the values only.
UNCOUNTED: dict[str, Edit] = {
    ".data of one weight, times": lambda m: weight(m).data.mul_(1.5),
    ".data of a bias": lambda m: m.encoder.layer[3].output.dense.bias.data.add_(0.5),
    ".data of another": lambda m: setattr(weight(m), "data", torch.randn(32, 48)),
    ".data of all, averaged": average,
    "a NumPy view": lambda m: weight(m).detach().numpy().__imul__(1.5),
    "a vector of all": quietly(
        lambda m: vector_to_parameters(parameters_to_vector(m.parameters()) * 1.1, m.parameters())
    ),
    "memory with another counter": lambda m: alias(weight(m).data).mul_(1.5),
}


@pytest.mark.parametrize("edit", SEEN | UNCOUNTED)
def test_an_edit_between_calls(edit: str) -> None:
    """After an edit of weights or settings the next call is computed, and its repeat is served."""
    cache = wrap(build(BARE["bert"]))
    check(cache)
    (SEEN | UNCOUNTED)[edit](cache.model)
    inputs = {name: value[:1] for name, value in X.items()} if edit == "quantised" else X
    check(cache, **inputs)


@pytest.mark.parametrize(("family", "tau"), [("gpt2", None), ("bert", 0.9)])
def test_an_uncounted_edit_of_classifiers(family: str, tau: float | None) -> None:
    """After an edit through `.data` neither a repeat nor a similar request is served."""
    cache = LLMCache.wrap(build(CLASSIFIERS[family]), tau=tau)
    ask(cache.model, **X)
    for parameter in cache.model.parameters():
        parameter.data.mul_(1.1)
    check_same(ask(cache.model, **X).logits, plain(cache, **X).logits)
    assert cache.stats().n_hits == 0


@pytest.mark.parametrize("is_counted", [True, False])
def test_prefixes_of_edited_weights(is_counted: bool) -> None:
    """Prefixes computed with other weights serve no call."""
    cache = wrap(build(GENERATORS["llama"]))
    text = tokens(1, 40)
    ask(cache.model, input_ids=text[:, :32])
    with torch.no_grad():
        edited = cache.model.model.layers[2].mlp.up_proj.weight
        (edited if is_counted else edited.data).mul_(3.0)
    check_same(ask(cache.model, input_ids=text).logits, plain(cache, input_ids=text).logits)
    assert cache.stats().n_hits == 0


def reparametrised(model: Any) -> Callable[..., Any]:
    """Return the model with other parameters, which are in it during each call only."""
    others = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
    return lambda **inputs: torch.func.functional_call(model, others, kwargs=inputs)


def instead(holder: Callable[[Any], Any], name: str, value: Any) -> Edit:
    """Return a function that makes a model one whose part has another attribute during each call only."""

    def edited(model: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            part = holder(model.base_model.encoder.layer[1])
            before = getattr(part, name)
            setattr(part, name, value)
            try:
                return model(**inputs)
            finally:
                setattr(part, name, before)

        return run

    return edited


#: Models whose edit leaves no trace once the call has ended.
MOMENTARY: dict[str, Callable[[Any], Any]] = {
    "functional_call": reparametrised,
    "data": instead(lambda layer: layer.output.dense.weight, "data", torch.randn(32, 48)),
    "parameter": instead(lambda layer: layer.output.dense, "weight", nn.Parameter(torch.randn(32, 48))),
    "layer": instead(lambda layer: layer.output, "dense", nn.Linear(48, 32)),
    "activation": instead(lambda layer: layer.intermediate, "intermediate_act_fn", nn.ReLU()),
    "forward": instead(lambda layer: layer.output.dense, "forward", lambda hidden: hidden[..., :32]),
    "epsilon": instead(lambda layer: layer.output.LayerNorm, "eps", 0.5),
}


@pytest.mark.parametrize("kind", [BARE, CLASSIFIERS], ids=["trunk", "classifier"])
@pytest.mark.parametrize("edit", MOMENTARY)
def test_an_edit_for_a_moment(edit: str, kind: Any) -> None:
    """After many calls without an edit, what is computed during one that is undone serves only its like."""
    cache = wrap(build(kind["bert"]))
    for seed in range(80):
        ask(cache.model, input_ids=tokens(1, 5, seed))
    for seed in (80, 81, 3):
        inputs = {"input_ids": tokens(1, 5, seed)}
        expected, before = plain(cache, **inputs), cache.stats().n_hits
        edited = MOMENTARY[edit](cache.model)
        found = ask(edited, **inputs)
        with cache.disabled():
            check_same(found, ask(edited, **inputs))
        for _ in range(2):
            check_same(ask(cache.model, **inputs), expected)
        assert cache.stats().n_hits - before == (1 if seed >= 80 else 2)
    assert cache.stats().errors == 0


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last half": lambda w: w[len(w) // 2 :],
    "a quarter": lambda w: w[len(w) // 4 : len(w) // 2],
    "left half of each row": lambda w: w[:, : w.shape[1] // 2],
}


@pytest.mark.parametrize("part", PARTS)
def test_an_uncounted_edit_of_a_part(part: str) -> None:
    """The cache sees an edit through `.data` of a quarter of one tensor within eight calls."""
    cache = wrap(build(BARE["bert"]))
    ask(cache.model, **X)
    PARTS[part](cache.model.encoder.layer[2].intermediate.dense.weight.data).mul_(-1.0)
    for _ in range(PLACES):
        ask(cache.model, **X)
    check_same(ask(cache.model, **X), plain(cache, **X))


def test_another_process_edits_shared_weights() -> None:
    """The cache sees another process's edit of weights in shared memory."""
    cache = wrap(build(BARE["bert"]).share_memory())
    check(cache)

    def edit() -> None:
        weight(cache.model).data.mul_(1.5)

    in_child(edit)
    check(cache)


@pytest.mark.parametrize("is_counted", [True, False])
def test_an_edit_during_a_call(is_counted: bool) -> None:
    """A call during which weights were edited stores nothing."""
    cache = wrap(build(BARE["bert"]))
    model: Any = cache.model
    edited = model.encoder.layer[3].output.dense.weight

    def edit(*_: object) -> None:
        with torch.no_grad():
            (edited if is_counted else edited.data).mul_(1.5)

    handle = model.encoder.layer[1].output.register_forward_hook(edit)
    ask(model, **X)
    handle.remove()
    edited.data.mul_(1.5)
    check(cache)


def test_what_takes_turns_is_served_again() -> None:
    """Weights that come back find their entries again."""
    cache = wrap(build(BARE["bert"]))
    states = [build(BARE["bert"], seed).state_dict() for seed in (1, 2)]
    for state in states:
        cache.model.load_state_dict(state)
        check(cache)
    before = cache.stats().n_hits
    for state in states:
        cache.model.load_state_dict(state)
        check_same(ask(cache.model, **X), plain(cache, **X))
    assert cache.stats().n_hits - before == 4


REHASHED: dict[str, Callable[[LLMCache], object]] = {
    "clear": lambda cache: cache.clear(),
    "gradients": lambda cache: cache.model(**X),
    "an uncounted write": lambda cache: alias(weight(cache.model)).mul_(2.0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("why", REHASHED)
def test_a_setting_that_was_put_back_has_its_own_digest(why: str) -> None:
    """Weights that are hashed again while known settings are back are not taken for those of the settings between."""
    with wrap(build(BARE["bert"])) as cache:
        norm = cache.model.encoder.layer[1].output.LayerNorm
        before = norm.eps
        for norm.eps in (before, 0.5, before):
            check_same(ask(cache.model, **X), plain(cache, **X))
        REHASHED[why](cache)
        for norm.eps in (before, 0.5, before):
            check_same(ask(cache.model, **X), plain(cache, **X))
        assert cache.stats().n_hits >= len(X["input_ids"])


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_save_of_edited_weights(is_counted: bool, tmp_path: Any) -> None:
    """Only a model with the weights of a save loads it."""
    cache = wrap(build(BARE["bert"]))
    ask(cache.model, **X)
    with torch.no_grad():
        (weight(cache.model) if is_counted else weight(cache.model).data).mul_(1.5)
    edited = copy.deepcopy(cache.model)
    ask(cache.model, **X)
    cache.save(tmp_path)
    with pytest.raises(UnfitBankError):
        LLMCache.load(build(BARE["bert"]), tmp_path)
    with LLMCache.load(edited, tmp_path) as loaded:
        assert loaded.stats().n_stored == 2  # without the rows of the earlier weights
        check_same(ask(edited, **X), plain(cache, **X))
        assert loaded.stats().n_hits == 2


def test_weights_may_move_to_shared_memory() -> None:
    """Moving weights to shared memory, as `multiprocessing` does, frees the old memory; the cache does not read it."""
    config = copy.deepcopy(BARE["bert"]().config)
    config.vocab_size = 300_000  # memory of this size is unmapped when freed
    cache = wrap(tf.BertModel(config).eval())
    check(cache)
    cache.model.share_memory()
    check_same(ask(cache.model, **X), plain(cache, **X))
    assert cache.stats().errors == 0


def test_which_parameters_are_tied_counts() -> None:
    """Tying a parameter or module to another one than before makes stored answers stale."""
    model = build(BARE["bert"])
    layers, cache = model.encoder.layer, wrap(model)
    for number in (0, 1):
        layers[2].output.dense.weight = layers[number].output.dense.weight
        check(cache)
    for number in (0, 1):
        layers[2].intermediate = layers[number].intermediate
        check(cache)


def test_an_edit_within_autocast() -> None:
    """Autocast keeps casts of weights until its outermost block ends: answers from stale casts are not served."""
    cache = wrap(build(BARE["bert"]))
    with torch.autocast("cpu", torch.bfloat16):
        ask(cache.model, **X)
        quietly(lambda m: weight(m).mul_(1.3))(cache.model)
        ask(cache.model, **X)
    with torch.autocast("cpu", torch.bfloat16):
        check_same(ask(cache.model, **X), plain(cache, **X))
