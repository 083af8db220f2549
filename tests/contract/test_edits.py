"""After an edit of weights, objects, layers, code or settings, by whatever means, no answer comes from before it."""

import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from llmcache import LLMCache
from tests.contract.judge import ask, check_calls, check_edits, check_moment, check_same, wrapped
from tests.contract.models import SIZES
from tests.forks import in_child
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, STRANGERS, build, llama, padded, tokens

X = padded([6, 4])
#: Calls within which the cache sees an edit of part of a tensor that leaves no other trace (inside/reuse.md).
PLACES = 8

Make = Callable[[], nn.Module]
Edit = Callable[[Any], object]


# -- objects that a module holds ---------------------------------------------------------------------------------------


class Act(nn.Module):
    """An activation that scales by what it reads from the object that it holds."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.held)  # type: ignore[no-any-return]


@dataclass
class Scale:
    by: Any = 2.0

    def get(self) -> Any:
        return self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: Any) -> None:
        self.by = by


def closure(by: Any) -> Callable[[], Any]:
    return lambda: by.by if hasattr(by, "by") else by


def default(by: Any) -> Callable[[], Any]:
    return lambda by=by: by


def counted(by: float) -> Callable[[], Any]:
    """Return a function whose closure its `change` rebinds."""

    def get() -> float:
        return by

    def change() -> None:
        nonlocal by
        by += 1.0

    get.change = change  # type: ignore[attr-defined]
    return get


def of(held: Any) -> Any:
    return held.by


def called(held: Any) -> Any:
    return held()


def innermost(held: Any) -> Any:
    while isinstance(held, list):
        (held,) = held
    return held


def cell(m: Any) -> Any:
    return m.held.__closure__[0].cell_contents


def raised(m: Any) -> None:
    m.held.by = 3.0


#: By name: the object that is held, how its factor is read, and an edit of the module that holds it.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Edit]] = {
    "an object replaced": (Scale, of, lambda m: setattr(m, "held", Scale(3.0))),
    "an object edited": (Scale, of, raised),
    "a namespace": (lambda: SimpleNamespace(by=2.0), of, raised),
    "a dict of an object": (lambda: Scale({"a": 2.0}), lambda held: held.by["a"], lambda m: m.held.by.update(a=3.0)),
    "a tensor in a slot": (lambda: Slotted(torch.tensor(2.0)), of, lambda m: m.held.by.add_(1)),
    "an object in a slot": (lambda: Slotted(Scale()), lambda held: held.by.by, lambda m: setattr(m.held.by, "by", 3.0)),
    "an attribute that hides the class's": (lambda: type("Kind", (), {"by": 2.0})(), of, raised),
    "the class of an object": (
        Scale,
        lambda held: held.get(),
        lambda m: setattr(m, "held", type("Scale", (Scale,), {"get": lambda self: -2.0})()),
    ),
    "a function over another number": (lambda: closure(2.0), called, lambda m: setattr(m, "held", closure(3.0))),
    "a tensor in a closure": (lambda: closure(torch.tensor(2.0)), called, lambda m: cell(m).add_(1)),
    "an object in a closure": (lambda: closure(Scale()), called, lambda m: setattr(cell(m), "by", 3.0)),
    "a cell rebound": (lambda: counted(2.0), called, lambda m: m.held.change()),
    "a default of an argument": (lambda: default(2.0), called, lambda m: setattr(m.held, "__defaults__", (3.0,))),
    "the code of a function": (
        lambda: closure(2.0),
        called,
        lambda m: setattr(m.held, "__code__", (lambda by: lambda: -by)(2.0).__code__),
    ),
    "an object in a partial": (lambda: partial(of, Scale()), called, lambda m: setattr(m.held.args[0], "by", 3.0)),
    "the object of a bound method": (lambda: Scale().get, called, lambda m: setattr(m.held.__self__, "by", 3.0)),
    "the order of objects": (lambda: [Scale(), Scale(3.0)], lambda held: held[0].by, lambda m: m.held.reverse()),
    "one object twice": (
        lambda: [one := Scale(), Scale(3.0), one],
        lambda held: held[2].by,
        lambda m: m.held.__setitem__(2, m.held[1]),
    ),
    "an object in a dict": (
        lambda: {"a": [Scale()]},
        lambda held: held["a"][0].by,
        lambda m: m.held["a"].__setitem__(0, Scale(3.0)),
    ),
    "a tensor in a deque": (lambda: deque([torch.tensor(2.0)]), lambda held: held[0], lambda m: m.held[0].add_(1)),
    "far within": (
        lambda: [[[[[[[Scale()]]]]]]],
        lambda held: innermost(held).by,
        lambda m: setattr(innermost(m.held), "by", 3.0),
    ),
    "an iterator": (lambda: iter([2.0] * 9), lambda held: 2.0, lambda m: setattr(m, "read", lambda held: 3.0)),
}


def with_activation(held: Callable[[], Any], read: Callable[[Any], Any] = of) -> Make:
    def make() -> nn.Module:
        model: Any = BARE["bert"]()
        model.encoder.layer[1].intermediate.intermediate_act_fn = Act(held(), read)
        return model  # type: ignore[no-any-return]

    return make


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_that_a_module_holds_count(name: str) -> None:
    """inside/reuse.md: the weights digest covers what modules hold in attributes, objects and functions."""
    held, read, edit = OBJECTS[name]
    edits = [lambda model: edit(model.encoder.layer[1].intermediate.intermediate_act_fn)]
    assert check_edits(with_activation(held, read), edits, X) == [2, 2]


def test_what_an_object_counts_in_every_call_costs_hits_alone() -> None:
    """inside/reuse.md: a call that edits its own settings stores nothing, and answers are right."""

    class Counts(Scale):
        def get(self) -> Any:
            self.by += 1.0
            return self.by

    with wrapped(with_activation(Counts, lambda held: held.get())) as (cache, plain):
        assert sum(check_calls(cache, plain, X, repeats=1) for _ in range(4)) == 0


# -- weights and layers ------------------------------------------------------------------------------------------------


def weight(model: Any) -> Any:
    return model.encoder.layer[1].output.dense.weight


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory with its own version counter, as in another process."""
    return torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


def another() -> nn.Module:
    return build(BARE["bert"], seed=7)


@torch.enable_grad()
def step(model: Any) -> None:
    """Step a fused optimizer, which raises no version counter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(**X).last_hidden_state.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def scaled(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def half(output: Any) -> Any:
    if isinstance(output, tf.utils.ModelOutput):
        output.last_hidden_state = output.last_hidden_state * 0.5
        return output
    return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5


def patched_part(model: Any) -> None:
    part = model.encoder.layer[1].intermediate
    part.forward = types.MethodType(lambda self, hidden: self.dense(hidden) * 0.5, part)


def patched_layer(model: Any) -> None:
    layer = model.encoder.layer[1]
    below = layer.forward
    layer.forward = lambda *args, **kwargs: half(below(*args, **kwargs))


#: By name: edits that come one after the other.
OF_WEIGHTS: dict[str, Sequence[Edit]] = {
    # Edits that leave another trace than values: a version counter, a replaced object, gradients.
    "in place": [lambda m: weight(m).mul_(1.5)],
    "load_state_dict": [lambda m: m.load_state_dict(another().state_dict())],
    "load_state_dict, assigned": [lambda m: m.load_state_dict(another().state_dict(), assign=True)],
    "another parameter": [
        lambda m: setattr(m.encoder.layer[0].output.dense, "weight", nn.Parameter(torch.randn(32, 48)))
    ],
    "a fused step": [step],
    "pruned": [lambda m: prune.l1_unstructured(m.encoder.layer[1].output.dense, "weight", amount=0.5)],
    "quantised": [lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, inplace=True)],
    "swapped": [lambda m: torch.utils.swap_tensors(weight(m), nn.Parameter(torch.randn(32, 48)))],
    "an epsilon": [lambda m: setattr(m.encoder.layer[0].output.LayerNorm, "eps", 0.5)],
    "another attention": [lambda m: m.set_attn_implementation("eager")],
    # Edits that show in the values only.
    ".data of one weight, times": [lambda m: weight(m).data.mul_(1.5)],
    ".data of a bias": [lambda m: m.encoder.layer[3].output.dense.bias.data.add_(0.5)],
    ".data of another": [lambda m: setattr(weight(m), "data", torch.randn(32, 48))],
    "a NumPy view": [lambda m: weight(m).detach().numpy().__imul__(1.5)],
    "a vector of all": [lambda m: vector_to_parameters(parameters_to_vector(m.parameters()) * 1.1, m.parameters())],
    "memory with another counter": [lambda m: alias(weight(m).data).mul_(1.5)],
    # Which parameters and modules are tied.
    "parameters tied": [
        lambda m, n=n: setattr(m.encoder.layer[2].output.dense, "weight", m.encoder.layer[n].output.dense.weight)
        for n in (0, 1)
    ],
    "modules tied": [
        lambda m, n=n: setattr(m.encoder.layer[2], "intermediate", m.encoder.layer[n].intermediate) for n in (0, 1)
    ],
    # Layers.
    "part patched": [patched_part],
    "layer patched": [patched_layer],
    "layer replaced": [lambda m: m.encoder.layer.__setitem__(1, another().encoder.layer[1])],
    "layers exchanged": [lambda m: m.encoder.layer.append(m.encoder.layer.pop(0))],
    "layer dropped": [lambda m: m.encoder.layer.__delitem__(1)],
    "other list": [lambda m: setattr(m.encoder, "layer", another().encoder.layer)],
}


def test_what_takes_turns_is_served_again() -> None:
    """Weights that come back find their entries again."""
    states = [build(BARE["bert"], seed).state_dict() for seed in (1, 2)] * 2
    edits = [lambda m, state=state: m.load_state_dict(state) for state in states]
    assert check_edits(BARE["bert"], edits, X) == [2, 2, 2, 4, 4]


def of_another_process(model: Any) -> None:
    def edit() -> None:
        weight(model).data.mul_(1.5)

    in_child(edit)


def up(model: Any) -> Any:
    return model.model.layers[2].mlp.up_proj.weight


TEXT = tokens(1, 40)
PREFIXES = [{"input_ids": TEXT[:, :32]}, {"input_ids": TEXT}]
BATCHES = [{"input_ids": tokens(3, 5)}, {"input_ids": tokens(3, 5)[1:]}]
#: By name: the model, edits that come one after the other, the calls between them, and settings of the cache.
BETWEEN: dict[str, tuple[Make, Sequence[Edit], list[Any], dict[str, Any]]] = {
    name: (BARE["bert"], edits, [X], {}) for name, edits in OF_WEIGHTS.items()
} | {
    "shared memory": (lambda: BARE["bert"]().share_memory(), [of_another_process], [X], {}),
    "classifier": (CLASSIFIERS["gpt2"], [scaled], [X | {"use_cache": False}], {}),
    "classifier, tau": (CLASSIFIERS["bert"], [scaled], [X], {"tau": 0.9}),
    "classifier, tau of the last layer": (CLASSIFIERS["bert"], [scaled], [X], {"tau": 0.9, "layers": "last"}),
    "prefixes": (GENERATORS["llama"], [lambda m: up(m).mul_(3.0)], PREFIXES, {}),
    "prefixes, values only": (GENERATORS["llama"], [lambda m: up(m).data.mul_(3.0)], PREFIXES, {}),
    "bert to float64": (BARE["bert"], [lambda m: m.double()], BATCHES, {}),
    "bert to bfloat16": (BARE["bert"], [lambda m: m.bfloat16()], BATCHES, {}),
    "gpt2 to bfloat16": (GENERATORS["gpt2"], [lambda m: m.bfloat16()], BATCHES, {}),
    "gpt2 to float16": (GENERATORS["gpt2"], [lambda m: m.half()], BATCHES, {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BETWEEN)
def test_an_edit_between_calls(name: str) -> None:
    """inside/reuse.md: after an edit of weights, layers or settings the next call is computed, its repeat served."""
    make, edits, calls, settings = BETWEEN[name]
    before, *after = check_edits(make, edits, *calls, **settings)
    assert before > 0 and set(after) == {0 if name == "layer dropped" else before}  # the attention is not the family's


@pytest.mark.parametrize("name", ["BertIntermediate", "BertLayer", "BertModel", "Act"])
def test_a_class_patched_after_wrapping_is_run(name: str) -> None:
    """inside/reuse.md: a class patched after wrapping is run, and no older entry is served."""
    make = with_activation(Scale)
    kind: Any = next(type(part) for part in make().modules() if type(part).__name__ == name)
    below = kind.forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return half(below(self, *args, **kwargs))

    try:
        assert check_edits(make, [lambda _: setattr(kind, "forward", patched)], X) == [2, 2]
    finally:
        kind.forward = below


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last half": lambda w: w[len(w) // 2 :],
    "a quarter": lambda w: w[len(w) // 4 : len(w) // 2],
    "left half of each row": lambda w: w[:, : w.shape[1] // 2],
}


@pytest.mark.parametrize("part", PARTS)
def test_an_uncounted_edit_of_a_part(part: str) -> None:
    """The cache sees an edit through `.data` of a quarter of one tensor within eight calls."""
    with wrapped(BARE["bert"]) as (cache, plain):
        ask(cache.model, **X)
        for one in (cache.model, plain):
            PARTS[part](one.encoder.layer[2].intermediate.dense.weight.data).mul_(-1.0)
        for _ in range(PLACES):
            ask(cache.model, **X)
        check_calls(cache, plain, X, repeats=1)


# -- while calls run ---------------------------------------------------------------------------------------------------


def reparametrised(model: Any, **inputs: Any) -> Any:
    return torch.func.functional_call(model, {name: one * 1.5 for name, one in model.named_parameters()}, kwargs=inputs)


def instead(holder: Callable[[Any], Any], name: str, value: Any) -> Callable[..., Any]:
    """Return a function that calls a model whose part has another attribute meanwhile."""

    def call(model: Any, **inputs: Any) -> Any:
        part = holder(model.base_model.encoder.layer[1])
        before = getattr(part, name)
        setattr(part, name, value)
        try:
            return model(**inputs)
        finally:
            setattr(part, name, before)

    return call


#: Calls of a model whose edit leaves no trace once the call has ended.
MOMENTARY: dict[str, Callable[..., Any]] = {
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
def test_an_edit_for_a_moment(edit: str, kind: dict[str, Make]) -> None:
    """After many calls without an edit, what is computed during one that is undone serves only its like."""
    with wrapped(kind["bert"]) as (cache, _):
        check_moment(cache, MOMENTARY[edit])


@pytest.mark.parametrize("is_counted", [True, False])
def test_an_edit_during_a_call(is_counted: bool) -> None:
    """A call during which weights were edited stores nothing."""
    with wrapped(BARE["bert"]) as (cache, plain):
        model: Any = cache.model
        edited = model.encoder.layer[3].output.dense.weight

        def edit(*_: object) -> None:
            with torch.no_grad():
                (edited if is_counted else edited.data).mul_(1.5)

        handle = model.encoder.layer[1].output.register_forward_hook(edit)
        ask(model, **X)
        handle.remove()
        for one, factor in ((edited, 1.5), (plain.encoder.layer[3].output.dense.weight, 1.5**2)):
            one.data.mul_(factor)
        assert check_calls(cache, plain, X) == 2


def test_an_edit_within_autocast() -> None:
    """Autocast keeps casts of weights until its outermost block ends: answers from stale casts are not served."""
    with wrapped(BARE["bert"]) as (cache, plain), torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            ask(cache.model, **X)
            weight(cache.model).mul_(1.3)
            ask(cache.model, **X)
        weight(plain).mul_(1.3)
        with torch.autocast("cpu", torch.bfloat16):
            check_calls(cache, plain, X, repeats=1)


REHASHED: dict[str, Callable[[LLMCache], object]] = {
    "clear": lambda cache: cache.clear(),
    "gradients": lambda cache: cache.model(**X),
    "an uncounted write": lambda cache: alias(weight(cache.model)).mul_(2.0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("why", REHASHED)
def test_a_setting_that_was_put_back_has_its_own_digest(why: str) -> None:
    """Weights that are hashed again while known settings are back are not taken for those of the settings between."""
    with wrapped(BARE["bert"]) as (cache, plain):
        norms = [one.encoder.layer[1].output.LayerNorm for one in (cache.model, plain)]
        before, n_hits = norms[0].eps, 0
        for turn in range(2):
            for eps in (before, 0.5, before):
                for norm in norms:
                    norm.eps = eps
                n_hits += check_calls(cache, plain, X, repeats=1)
            if turn == 0:
                REHASHED[why](cache)
                weight(plain).data.copy_(weight(cache.model).data)
        assert n_hits >= len(X["input_ids"])


def test_weights_may_move_to_shared_memory() -> None:
    """Moving weights to shared memory, as `multiprocessing` does, frees the old memory; the cache does not read it."""
    config = BARE["bert"]().config
    config.vocab_size = 300_000  # memory of this size is unmapped when freed
    with LLMCache.wrap(tf.BertModel(config).eval(), auto_bypass=False) as cache:
        before = ask(cache.model, **X)
        cache.model.share_memory()
        check_same(ask(cache.model, **X), before)
        assert cache.stats().errors == 0


# -- settings ----------------------------------------------------------------------------------------------------------


class Masks(tf.BertModel):
    """Masks the tokens with a given id of its config."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is None:
            attention_mask = (input_ids != getattr(self.config, self.name)).long()
        return super().forward(input_ids, attention_mask, **kwargs)


class MasksByPad(Masks):
    name = "pad_token_id"


class MasksByEnds(Masks):
    name = "sep_token_id"


def last_token_head() -> nn.Module:
    """A classifier that finds the last token by the padding id of its own config, and not its trunk's."""
    model = tf.LlamaForSequenceClassification(llama(use_cache=False))
    model.config = tf.LlamaConfig(**model.config.to_diff_dict())
    return model


IDS = tokens(2, 6)
ENDED = IDS.clone()
ENDED[:, 4:] = 95
PADDING: tuple[Make, str, list[Any], list[Any]] = (
    last_token_head,
    "pad_token_id",
    [0, 95, 0, 95],
    [padded([5, 7]), {"input_ids": ENDED}],
)
#: Model, setting of its config, values that come one after the other, and calls.
CONFIGS: dict[str, tuple[Make, str, list[Any], list[Any]]] = {
    kind.__name__: (
        lambda kind=kind: kind(tf.BertConfig(**SIZES, sep_token_id=0)),
        kind.name,
        [0, int(IDS[0, 2]), int(IDS[1, 3]), 0],
        [{"input_ids": IDS}],
    )
    for kind in (MasksByPad, MasksByEnds)
} | {
    "direction": (
        GENERATORS["llama"],
        "is_causal",
        [None, False, True, None],
        [{"input_ids": TEXT}, {"input_ids": torch.cat([TEXT, tokens(1, 4, seed=2)], dim=1)}],
    ),
    "padding": PADDING,
    "padding, tau": PADDING,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_of_the_config_count(name: str) -> None:
    """inside/reuse.md: the weights digest covers settings, ids of special tokens and the attention's direction too."""
    make, setting, values, calls = CONFIGS[name]
    edits = [lambda model, value=value: setattr(model.config, setting, value) for value in values]
    assert sum(check_edits(make, edits, *calls, **({"tau": 0.999} if "tau" in name else {}))) > 0


def flipped(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(getattr(part, "is_causal", None), bool):
            part.is_causal = not part.is_causal


def lost(model: Any) -> None:
    del model.encoder.layer[1].attention.self.is_causal


@pytest.mark.parametrize(
    ("family", "when", "edit"),
    [
        ("bert", "before wrapping", flipped),
        ("llama", "before wrapping", flipped),
        ("gpt2", "after wrapping", flipped),
        ("bart", "after wrapping", flipped),
        ("modernbert", "after wrapping", flipped),
        ("bert", "after wrapping", lost),
    ],
)
def test_attention_of_another_direction_is_computed(family: str, when: str, edit: Edit) -> None:
    """inside/reuse.md: nothing is served if `is_causal` differs from the family's (`other_attention`)."""

    def make() -> nn.Module:
        model = {**BARE, **STRANGERS}[family]()
        if when == "before wrapping":
            edit(model)
        return model

    row, longer = IDS[:1], torch.cat([IDS[:1], tokens(1, 30, seed=1)], dim=1)
    calls: list[dict[str, Tensor]] = [
        {"input_ids": IDS, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])},
        {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
        *({"input_ids": ids} for ids in (row, longer, torch.cat([longer, tokens(1, 3, seed=2)], dim=1))),
    ]
    before, after = check_edits(make, [edit], *calls)
    assert (before == 0, after == 0) == (when == "before wrapping", when == "after wrapping")


def test_an_attention_function_that_is_registered_anew() -> None:
    """The code of an attention function that a user registered is part of the key (inside/reuse.md)."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def edit(model: Any, factor: float) -> None:
        def attend(*args: Any, **kwargs: Any) -> Any:
            output, weights = sdpa_attention_forward(*args, **kwargs)
            return output * factor, weights

        AttentionInterface.register("of one's own", attend)
        model.set_attn_implementation("of one's own")

    edits = [partial(edit, factor=factor) for factor in (1.0, 0.5)]
    assert check_edits(BARE["bert"], edits, X)[-1] == 2
