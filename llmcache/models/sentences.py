"""Sentence-transformers models whose trunk is served one vector a text, and what is owed to others that read states.

An entry that keeps one vector is enough only where one pooling layer reads the states, right after the trunk. So that
is looked for when a model is wrapped, and again in each call, since modules and modes can be exchanged. What the model
puts out holds the states of all tokens as well: they are computed when somebody reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from llmcache.models.hooks import Listener, Swap, are_hooked

_TOKENS = "token_embeddings"
_SENTENCE = "sentence_embedding"
_AFTER_POOLING = ("Normalize", "Dense", "Dropout", "LayerNorm")  # of sentence-transformers: they read what was pooled
Kept = Literal["mean", "cls", "last"]
_MODES: dict[str, Kept] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
Compute = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pooled:
    """A pooling layer that alone reads what a trunk puts out."""

    parent: nn.Module  # the model whose modules run one after the other
    modules: tuple[nn.Module, ...]  # these, as they were when it was wrapped
    pooling: nn.Module
    kept: Kept

    def has_changed(self) -> bool:
        """Whether something else may read the states now."""
        first, _, *later = self.modules
        return (
            tuple(self.parent._modules.values()) != self.modules  # modules are equal where they are the same
            or _kept(self.pooling) != self.kept
            or not _puts_out_tokens(first)
            or not all(map(_is_on_sentence, later))
            or _is_altered(*self.modules)
        )


def find_pooled(model: nn.Module) -> Pooled | None:
    """The pooling layer of a sentence-transformers model, if it alone reads the states, one vector of them."""
    for parent in model.modules():
        modules = tuple(module for module in parent._modules.values() if module is not None)
        if len(modules) < 2 or not _is_named(parent, "SentenceTransformer"):
            continue
        first, pooling, *later = modules
        is_first = _is_named(first, "Transformer") and _puts_out_tokens(first)
        if is_first and _is_named(pooling, "Pooling") and all(map(_reads_pooled, later)):
            kept = None if _is_altered(*modules) else _kept(pooling)
            return Pooled(parent, modules, pooling, kept) if kept else None
    return None


def _kept(pooling: Any) -> Kept | None:
    """What of the states a pooling layer reads; None: several modes, others, or a prompt that is left out."""
    if not getattr(pooling, "include_prompt", True):
        return None
    mode = pooling.get_pooling_mode_str() if hasattr(pooling, "get_pooling_mode_str") else pooling.pooling_mode
    return _MODES.get(mode) if isinstance(mode, str) else None


def _is_altered(*modules: nn.Module) -> bool:
    """Whether somebody else's hook or forward may read the states, or change them before they are pooled.

    Later modules count as well: they are passed the states beside what was pooled.
    """
    forwards = (vars(module).get("forward", type(module).forward) for module in modules)
    return are_hooked(modules) or not all(one.__module__.startswith("sentence_transformers.") for one in forwards)


def _puts_out_tokens(module: nn.Module) -> bool:
    return getattr(module, "module_output_name", _TOKENS) == _TOKENS


def _is_on_sentence(module: nn.Module) -> bool:
    """Whether a module reads what was pooled, and writes nothing in place of the states."""
    is_taken = getattr(module, "module_input_name", _SENTENCE) == _SENTENCE
    return is_taken and getattr(module, "module_output_name", _SENTENCE) != _TOKENS


def _reads_pooled(module: nn.Module) -> bool:
    """Whether a module reads what was pooled, and nothing else."""
    return _is_on_sentence(module) and any(_is_named(module, name) for name in _AFTER_POOLING)


def _is_named(module: nn.Module, name: str) -> bool:
    """Whether it is of sentence-transformers' own class of this name."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__.split(".")[0] == "sentence_transformers"


class Features(dict[str, Any]):
    """What the model puts out: a dict. States of tokens that were left out are computed when they are first read."""

    def __init__(self, features: Mapping[str, Any], compute: Compute) -> None:
        """Hold the same; `compute` makes the states."""
        super().__init__(features)
        self._compute: Compute | None = compute

    def _fill(self) -> None:
        """Compute the states, unless that was done, or others were put in their place."""
        if (compute := self._compute) is not None:
            super().__setitem__(_TOKENS, compute())
            self._compute = None  # not before: if it raises, what stands there is still none of the states

    def __getitem__(self, key: str) -> Any:
        if key == _TOKENS:
            self._fill()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def __setitem__(self, key: str, value: Any) -> None:
        if key == _TOKENS:
            self._compute = None
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:  # its own, so that dict() asks for each value
        return super().__iter__()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _filled(name: str) -> Callable[..., Any]:
    """A method of dict before which the states are computed."""
    method = getattr(dict, name)

    def run(self: Features, *args: Any, **kwargs: Any) -> Any:
        self._fill()
        return method(self, *args, **kwargs)

    return run


for _name in ("items", "values", "copy", "pop", "popitem", "setdefault", "update", "clear"):
    setattr(Features, _name, _filled(_name))
for _name in ("__delitem__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__"):
    setattr(Features, _name, _filled(_name))


class SentenceSwap(Swap):
    """Stands in for the forward of a sentence-transformers model: tells the trunk that its states will be pooled."""

    def __init__(self, module: nn.Module, listener: Listener, pooled: ContextVar[list[Compute] | None]) -> None:
        """Take the forward's place; within it, the trunk adds to `pooled` what computes states that it left out."""
        super().__init__(module, listener)
        self._pooled = pooled

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        left_out: list[Compute] = []
        token = self._pooled.set(left_out)
        try:
            output = self.original(*args, **kwargs)
        finally:
            self._pooled.reset(token)
        if not left_out:
            return output
        features = Features(output, left_out[-1])
        output.pop(_TOKENS, None)  # it is the caller's own dict, where nobody may take the vector for states
        return features


def later(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Compute:
    """Computes a trunk's states of these arguments, which are copied: without gradients, in the autocast of now."""
    is_on = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_on else None
    args, kwargs = tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}

    def compute() -> Any:
        with torch.no_grad(), torch.autocast(device, dtype, enabled=is_on):
            return run(*args, **kwargs)[0]

    return compute


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
