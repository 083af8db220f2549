"""Edits of a trunk's objects, functions, code and config values: nothing is served stale."""

import functools
import importlib
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache, UnfitBankError
from tests.contract.judge import ask, check_same
from tests.contract.models import SIZES
from tests.tiny_models import BARE, GENERATORS, STRANGERS, build, padded, tokens

X = padded([6, 4])


class Act(nn.Module):
    """An activation that delegates to an object."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x)  # type: ignore[no-any-return]


@dataclass
class Scale:
    by: float = 2.0
    more: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by + self.more.get("shift", 0.0)

    def method(self, x: Tensor) -> Tensor:
        return self(x)


class Slotted:
    __slots__ = ("by", "inner")

    def __init__(self, by: float, inner: Any = None) -> None:
        self.by = torch.tensor(by)
        self.inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x * self.by) if self.inner else x * self.by


class Reads:
    """Scales by a value read from the object that it holds."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        self.held = held
        self.read = read

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.read(self.held)


def closure(by: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (by.by if hasattr(by, "by") else by)


def default(by: float) -> Callable[[Tensor], Tensor]:
    def act(x: Tensor, by: float = by) -> Tensor:
        return x * by

    return act


def counted(by: float) -> Callable[[Tensor], Tensor]:
    """Return a function whose closure its `change` rebinds."""

    def act(x: Tensor) -> Tensor:
        return x * by

    def change() -> None:
        nonlocal by
        by += 1.0

    act.change = change  # type: ignore[attr-defined]
    return act


def times(by: Any, x: Tensor) -> Tensor:
    return x * by


def first(held: Any) -> Any:
    return held[0].by


def exchange(held: Any) -> None:
    held[0], held[1] = held[1], held[0]


#: By name: how the activation's object is made, and an edit of the module that holds it.
EDITS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "dataclass replaced": (Scale, lambda m: setattr(m, "how", Scale(3.0))),
    "dataclass edited": (Scale, lambda m: setattr(m.how, "by", 3.0)),
    "container of a dataclass edited": (Scale, lambda m: m.how.more.update(shift=1.0)),
    "namespace edited": (
        lambda: Reads(SimpleNamespace(by=2.0), lambda held: held.by),
        lambda m: setattr(m.how.held, "by", 3.0),
    ),
    "tensor of a slotted edited": (lambda: Slotted(2.0), lambda m: m.how.by.add_(1)),
    "object of a slotted replaced": (lambda: Slotted(2.0, Scale()), lambda m: setattr(m.how, "inner", Scale(3.0))),
    "closure over a number": (lambda: closure(2.0), lambda m: setattr(m, "how", closure(3.0))),
    "tensor in a closure edited": (
        lambda: closure(torch.tensor(2.0)),
        lambda m: m.how.__closure__[0].cell_contents.add_(1),
    ),
    "object in a closure edited": (
        lambda: closure(Scale()),
        lambda m: setattr(m.how.__closure__[0].cell_contents, "by", 3.0),
    ),
    "cell rebound": (lambda: counted(2.0), lambda m: m.how.change()),
    "default of an argument edited": (lambda: default(2.0), lambda m: setattr(m.how, "__defaults__", (3.0,))),
    "code of a function": (
        lambda: closure(2.0),
        lambda m: setattr(m.how, "__code__", (lambda by: lambda x: x + by)(1.0).__code__),
    ),
    "tensor in a partial edited": (
        lambda: functools.partial(times, torch.tensor(2.0)),
        lambda m: m.how.args[0].add_(1),
    ),
    "object of a bound method": (lambda: Scale().method, lambda m: setattr(m.how.__self__, "by", 3.0)),
    "order of objects": (lambda: Reads([Scale(), Scale(3.0)], first), lambda m: exchange(m.how.held)),
    "one object twice": (
        lambda: Reads([s := Scale(), Scale(3.0), s], lambda held: held[2].by),
        lambda m: m.how.held.__setitem__(2, m.how.held[1]),
    ),
    "object in a dict": (
        lambda: Reads({"a": [Scale()]}, lambda held: held["a"][0].by),
        lambda m: m.how.held["a"].__setitem__(0, Scale(3.0)),
    ),
    "tensor in a deque": (
        lambda: Reads(deque([torch.tensor(2.0)]), lambda held: held[0]),
        lambda m: m.how.held[0].add_(1),
    ),
    "attribute of an object that hid its class's": (
        lambda: Reads(type("Kind", (), {"by": 2.0})(), lambda held: held.by),
        lambda m: setattr(m.how.held, "by", 3.0),
    ),
    "class of an object": (
        Scale,
        lambda m: setattr(m, "how", type("Scale", (Scale,), {"__call__": lambda s, x: -x})()),
    ),
    "far within": (
        lambda: Reads([[[[[[[Scale()]]]]]]], lambda held: held[0][0][0][0][0][0][0].by),
        lambda m: setattr(m.how.held[0][0][0][0][0][0][0], "by", 3.0),
    ),
    "iterator": (lambda: Reads(iter([2.0] * 9), lambda held: 2.0), lambda m: setattr(m.how, "read", lambda held: 3.0)),
}


def bert() -> nn.Module:
    return tf.BertModel(tiny_config())


def with_activation(how: Any) -> nn.Module:
    model = build(bert)
    model.encoder.layer[1].intermediate.intermediate_act_fn = Act(how)
    return model.eval()


def activation(model: Any) -> Any:
    return model.encoder.layer[1].intermediate.intermediate_act_fn


def check_edit(model: nn.Module, plain: nn.Module, edit: Callable[[Any], object]) -> None:
    """Warm a cache, edit its model and a plain one alike, and compare their answers."""
    before = ask(plain, **X)
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        for _ in range(2):
            check_same(cache(**X), before)
        assert cache.stats().n_hits == 2
        with torch.no_grad():
            edit(model)
            edit(plain)
        after = ask(plain, **X)
        assert not torch.equal(after[0], before[0]), "the edit decides nothing"
        for _ in range(2):
            check_same(cache(**X), after)
        assert cache.stats().n_requests == 8
    check_same(ask(model, **X), after, exact=True)


@pytest.mark.parametrize("name", EDITS)
def test_objects_that_a_module_holds_count(name: str) -> None:
    """docs/reuse.md: the weights digest covers what modules hold in attributes, objects and functions."""
    make, edit = EDITS[name]
    model, plain = with_activation(make()), with_activation(make())
    check_edit(model, plain, lambda one: edit(activation(one)))


def test_what_an_object_counts_in_every_call_costs_hits_alone() -> None:
    """docs/reuse.md: a call that edits its own settings stores nothing, and answers are right."""

    class Counts(Scale):
        def __call__(self, x: Tensor) -> Tensor:
            self.by += 1.0
            return x * self.by

    model, plain = with_activation(Counts()), with_activation(Counts())
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        for _ in range(4):
            check_same(cache(**X), ask(plain, **X))
        assert cache.stats().n_hits == 0


# -- layers and classes ------------------------------------------------------------------------------------------------


def other_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return self.dense(hidden_states) * 0.5


def patched(model: Any) -> None:
    part = model.encoder.layer[1].intermediate
    part.forward = types.MethodType(other_forward, part)


def layer_patched(model: Any) -> None:
    layer = model.encoder.layer[1]
    below = layer.forward
    layer.forward = lambda *args, **kwargs: _half(below(*args, **kwargs))


def _half(output: Any) -> Any:
    return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5


def layer_replaced(model: Any) -> None:
    model.encoder.layer[1] = build(bert, seed=3).encoder.layer[1]


def layers_exchanged(model: Any) -> None:
    layers = model.encoder.layer
    layers[0], layers[1] = layers[1], layers[0]


def layer_dropped(model: Any) -> None:
    del model.encoder.layer[1]


def other_list(model: Any) -> None:
    model.encoder.layer = build(bert, seed=3).encoder.layer


@pytest.mark.parametrize(
    "edit",
    [patched, layer_patched, layer_replaced, layers_exchanged, layer_dropped, other_list],
)
def test_a_layer_replaced_or_patched_after_wrapping_is_run(edit: Callable[[Any], None]) -> None:
    """docs/reuse.md: layers replaced or patched after wrapping are run, and no older entry is served."""
    model, plain = build(bert), build(bert)
    cache = LLMCache.wrap(model, auto_bypass=False)  # not unwrapped: the patches lie on top
    for _ in range(2):
        check_same(cache(**X), ask(plain, **X))
    edit(model)
    edit(plain)
    for _ in range(2):
        check_same(cache(**X), ask(plain, **X))


@pytest.fixture
def patch_class() -> Iterator[Callable[[type, Any], None]]:
    """Patches a class's forward until the test ends."""
    before: list[tuple[type, Any]] = []

    def patch(kind: type, forward: Any) -> None:
        before.append((kind, kind.__dict__["forward"]))
        kind.forward = forward  # type: ignore[attr-defined]

    yield patch
    for kind, forward in reversed(before):
        kind.forward = forward  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["BertIntermediate", "BertLayer", "BertModel", "Act"])
def test_a_class_patched_after_wrapping_is_run(name: str, patch_class: Callable[[type, Any], None]) -> None:
    """docs/reuse.md: a class patched after wrapping is run, and no older entry is served."""
    model: Any = with_activation(Scale())
    parts = {type(part).__name__: type(part) for part in model.modules()}
    below = parts[name].forward

    def half(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = below(self, *args, **kwargs)
        if name != "BertModel":
            return _half(output)
        output.last_hidden_state = output.last_hidden_state * 0.5
        return output

    with LLMCache.wrap(model, auto_bypass=False) as cache:
        for _ in range(2):
            before = cache(**X)[0]
        patch_class(parts[name], half)
        after = ask(with_activation(Scale()), **X)
        assert not torch.equal(after[0], before)
        for _ in range(2):
            check_same(cache(**X), after)


# -- config ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", [MasksByPad, MasksByEnds])
def test_ids_that_a_trunk_reads_of_its_config_count(kind: Any) -> None:
    """docs/reuse.md: the weights digest covers settings, including ids of special tokens in the config."""
    ids = {"input_ids": tokens(2, 6)}
    model, plain = build(lambda: kind(tiny_config())), build(lambda: kind(tiny_config()))
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        for value in (0, int(ids["input_ids"][0, 2]), int(ids["input_ids"][1, 3]), 0):
            for one in (model, plain):
                setattr(one.config, kind.name, value)
            for _ in range(2):
                check_same(cache(**ids), ask(plain, **ids))
        assert cache.stats().n_hits > 0


def tiny_config() -> tf.BertConfig:
    return tf.BertConfig(**SIZES, sep_token_id=0)


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
def test_attention_of_another_direction_is_computed(family: str, when: str, edit: Callable[[Any], None]) -> None:
    """docs/reuse.md: nothing is served if `is_causal` differs from the family's (`other_attention`)."""
    table = {**BARE, **STRANGERS}
    model, plain = build(table[family]), build(table[family])

    def edit_both() -> None:
        for one in (model, plain):
            edit(one)

    rows = tokens(2, 6)
    calls = [
        {"input_ids": rows, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])},
        {"input_ids": rows, "attention_mask": torch.ones_like(rows)},
        {"input_ids": rows[:1]},
        {"input_ids": torch.cat([rows[:1], tokens(1, 30, seed=1)], dim=1)},
        {"input_ids": torch.cat([rows[:1], tokens(1, 30, seed=1), tokens(1, 3, seed=2)], dim=1)},
    ]
    if when == "before wrapping":
        edit_both()
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        for turn in ("before wrapping", "after wrapping"):
            before = cache.stats().n_hits
            for _ in range(2):
                for call in calls:
                    check_same(cache(**call), ask(plain, **call))
            assert (cache.stats().n_hits == before) == (when == turn)
            if turn == "before wrapping":
                edit_both()


def test_a_direction_that_the_config_names_counts_after_wrapping() -> None:
    """docs/reuse.md: the weights digest covers settings, including the config's `is_causal`."""
    model, plain = build(GENERATORS["llama"]), build(GENERATORS["llama"])
    calls = [{"input_ids": tokens(1, 40)}, {"input_ids": torch.cat([tokens(1, 40), tokens(1, 4, seed=2)], dim=1)}]
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        for value in (None, False, True, None):
            for one in (model, plain):
                one.config.is_causal = value
            for _ in range(2):
                for call in calls:
                    check_same(cache(**call), ask(plain, **call))


# -- saves -------------------------------------------------------------------------------------------------------------

CODE = """
import torch
from torch import nn
# nothing
import own_helpers as helpers

FACTOR = 2.0

class Base(nn.Module):
    def prepared(self, x):
        return x * 1.0

class How:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return x * self.by

def helper(x):
    return x + 0.0

def outer(by):
    def inner(x):
        return x * by
    return inner

class Act(Base):
    by = 1.0

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.inner = outer(1.0)

    def forward(self, x, scale=1.0):
        return self.inner(helpers.other(helper(self.how(self.prepared(x)))) * self.by * scale * FACTOR)
"""
HELPERS = """
def other(x):
    return x - 0.0
"""
REVISIONS = {
    "forward": ("helper(self.how", "helper(-self.how"),
    "function of the file": ("return x + 0.0", "return x + 1.0"),
    "function of another file": ("return x - 0.0", "return x - 1.0"),
    "constant of the file": ("FACTOR = 2.0", "FACTOR = 3.0"),
    "attribute of the class": ("    by = 1.0", "    by = 3.0"),
    "default of an argument": ("scale=1.0", "scale=3.0"),
    "base class": ("return x * 1.0", "return x * 3.0"),
    "class of an object": ("return x * self.by", "return x + self.by"),
    "inner function": ("return x * by", "return x + by"),
}


class Versions:
    """A user's model code in files, one version at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._n = 0

    def model(self, old: str = "", new: str = "", by: float = 2.0) -> nn.Module:
        """Return a BERT whose activation runs the code with `old` replaced by `new`."""
        for name, text in (("own_code", CODE), ("own_helpers", HELPERS)):
            assert not old or old in CODE + HELPERS
            (self._folder / f"{name}.py").write_text(text.replace(old, new) if old else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        for file in self._folder.glob("__pycache__/*"):
            file.unlink()
        own = importlib.import_module("own_code")
        model = build(bert)
        model.encoder.layer[1].intermediate.intermediate_act_fn = own.Act(own.How(by))
        return model.eval()


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[Versions]:
    folder = tmp_path / "code"
    folder.mkdir()
    sys.path.insert(0, str(folder))
    yield Versions(folder)
    sys.path.remove(str(folder))
    for name in ("own_code", "own_helpers"):
        sys.modules.pop(name, None)


def carries(before: nn.Module, after: nn.Module, folder: Path) -> bool:
    """Whether a save of one model serves the other, whose answers must be right then."""
    with LLMCache.wrap(before, auto_bypass=False) as cache:
        cache(**X)
        cache.save(folder)
    expected = ask(after, **X)
    try:
        with LLMCache.load(after, folder) as cache:
            check_same(cache(**X), expected)
            assert cache.stats().n_hits == 2
    except UnfitBankError:
        return False
    return True


@pytest.mark.parametrize("name", REVISIONS)
def test_edited_code_of_the_same_name_is_told_apart(name: str, versions: Versions, tmp_path: Path) -> None:
    """docs/reuse.md: the weights digest covers the code of classes and functions outside installed packages."""
    assert not carries(versions.model(), versions.model(*REVISIONS[name]), tmp_path / "save")


def test_equal_code_is_told_alike(versions: Versions, tmp_path: Path) -> None:
    """docs/reuse.md: a save serves an equal model, even if its code was imported anew."""
    assert carries(versions.model(), versions.model(), tmp_path / "save")
    assert carries(versions.model(by=3.0), versions.model("# nothing", "# else", by=3.0), tmp_path / "save")
    assert not carries(versions.model(by=2.0), versions.model(by=3.0), tmp_path / "save")


def test_what_cannot_be_read_is_shared_with_nobody(tmp_path: Path) -> None:
    """docs/reuse.md: a model that holds an unreadable object is served its own repeats, and shares nothing."""

    def make() -> nn.Module:
        model = with_activation(Scale())
        activation(model).source = (n for n in range(9))
        return model

    assert not carries(make(), make(), tmp_path)
    with LLMCache.wrap(make(), auto_bypass=False) as cache:
        for n_hits in (0, 2, 4):
            check_same(cache(**X), ask(make(), **X))
            assert cache.stats().n_hits == n_hits


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_equal_models_are_told_alike(family: str, tmp_path: Path) -> None:
    """README: a save serves an equal model."""
    make = {**BARE, **STRANGERS}[family]
    assert carries(build(make), build(make), tmp_path)
    assert not carries(build(make), build(make, seed=1), tmp_path)


def test_an_attention_function_that_is_registered_anew() -> None:
    """The code of an attention function that a user registered is part of the key (docs/reuse.md)."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def scaled(factor: float) -> Callable[..., Any]:
        def attend(*args: Any, **kwargs: Any) -> Any:
            output, weights = sdpa_attention_forward(*args, **kwargs)
            return output * factor, weights

        return attend

    model, plain = build(bert), build(bert)
    AttentionInterface.register("of one's own", scaled(1.0))
    with LLMCache.wrap(model, auto_bypass=False):
        for factor in (1.0, 0.5):
            AttentionInterface.register("of one's own", scaled(factor))
            for one in (model, plain):
                one.set_attn_implementation("of one's own")
            for _ in range(2):
                check_same(ask(model, **X), ask(plain, **X))
