"""A save serves models of the same weights, objects and code, and no others."""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache
from tests.contract.judge import ask, carries, check_calls, wrapped
from tests.tiny_models import BARE, build, padded

X = padded([6, 4])
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
#: By name of what changes: text of the code, its replacement, and the attribute of an object.
REVISIONS: dict[str, Any] = {
    "nothing": ("", ""),
    "comment": ("# nothing", "# else"),
    "forward": ("helper(self.how", "helper(-self.how"),
    "function of the file": ("return x + 0.0", "return x + 1.0"),
    "function of another file": ("return x - 0.0", "return x - 1.0"),
    "constant of the file": ("FACTOR = 2.0", "FACTOR = 3.0"),
    "attribute of the class": ("    by = 1.0", "    by = 3.0"),
    "default of an argument": ("scale=1.0", "scale=3.0"),
    "base class": ("return x * 1.0", "return x * 3.0"),
    "class of an object": ("return x * self.by", "return x + self.by"),
    "inner function": ("return x * by", "return x + by"),
    "attribute of an object": ("", "", 3.0),
}


@pytest.fixture
def version(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Returns a BERT whose activation runs the code with one text replaced."""
    folder = tmp_path / "code"
    folder.mkdir()
    sys.path.insert(0, str(folder))
    files = {"own_code": CODE, "own_helpers": HELPERS}

    def make(old: str = "", new: str = "", by: float = 2.0) -> nn.Module:
        assert old in CODE + HELPERS
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text.replace(old, new) if old else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        own = importlib.import_module("own_code")
        return with_activation(own.Act(own.How(by)))

    yield make
    sys.path.remove(str(folder))
    for name in files:
        sys.modules.pop(name, None)


def with_activation(act: Any) -> nn.Module:
    model: Any = build(BARE["bert"])
    model.encoder.layer[1].intermediate.intermediate_act_fn = act
    return model.eval()  # type: ignore[no-any-return]


def check_carried(before: nn.Module, after: nn.Module, folder: Path) -> bool:
    """Save a cache of one model; return whether it serves the other."""
    with LLMCache.wrap(before, auto_bypass=False) as cache:
        cache(**X)
        return carries(cache, after, folder, **X)


@pytest.mark.parametrize("name", REVISIONS)
def test_edited_code_of_the_same_name_is_told_apart(
    name: str, version: Callable[..., nn.Module], tmp_path: Path
) -> None:
    """inside/reuse.md: the weights digest covers the code of classes and functions, however often it is imported."""
    is_same = name in ("nothing", "comment")
    assert check_carried(version(), version(*REVISIONS[name]), tmp_path / "save") == is_same


def test_what_cannot_be_read_is_shared_with_nobody(tmp_path: Path) -> None:
    """inside/reuse.md: a model that holds an unreadable object is served its own repeats, and shares nothing."""

    def make() -> nn.Module:
        act: Any = nn.ReLU()
        act.source = (n for n in range(9))
        return with_activation(act)

    assert not check_carried(make(), make(), tmp_path)
    with LLMCache.wrap(make(), auto_bypass=False) as cache:
        assert check_calls(cache, make(), X, repeats=3) == 4


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_save_of_edited_weights(is_counted: bool, tmp_path: Path) -> None:
    """Only a model with the weights of a save loads it, without the rows of earlier weights."""
    with wrapped(BARE["bert"]) as (cache, plain):
        ask(cache.model, **X)
        weight = cache.model.encoder.layer[1].output.dense.weight
        with torch.no_grad():
            (weight if is_counted else weight.data).mul_(1.5)
        edited = deepcopy(cache.model)
        ask(cache.model, **X)
        assert not carries(cache, plain, tmp_path, **X)
        assert carries(cache, edited, tmp_path, **X)
