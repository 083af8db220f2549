"""Sentence-transformers models: entries keep one vector per text; token states are computed when they are read.

A pooling layer reads the states of valid tokens alone, so padding is not part of the key. One vector is enough only if
it reads one, and is the only reader, right after the trunk. This is checked when a model is wrapped, and again in each
call, since modules and pooling modes can be replaced. The model's output holds the states of all tokens as well: where
they were left out, they are computed at the first access.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from llmcache.models.hooks import Listener, Swap, are_hooked

_TOKENS = "token_embeddings"
_SENTENCE = "sentence_embedding"
_AFTER_POOLING = ("Normalize", "Dense", "Dropout", "LayerNorm")  # sentence-transformers' modules that read the vector
Kept = Literal["mean", "cls", "last", "sequence"]
_MODES: dict[str, Kept] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_HEEDING = re.compile("((cls|max|mean|mean_sqrt_len_tokens|weightedmean|lasttoken)(_|$))+")  # modes that heed the mask
#: Poolings that read the states of valid tokens alone, by model.
_POOLINGS = {"SentenceTransformer": "Pooling", "SparseEncoder": "SpladePooling"}
_OPERATORS = ("eq", "ne", "or", "ror", "ior")  # of dicts that read all values
Compute = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pooled:
    """A pooling layer that is the only reader of a trunk's states."""

    parent: nn.Module  # the model whose modules run one after the other
    modules: tuple[nn.Module, ...]  # its modules when it was wrapped
    pooling: nn.Module
    kept: Kept  # `sequence`: it needs several tokens
    reads_first: bool  # it may read the first token, even if that is padding

    def has_changed(self) -> bool:
        """Whether another module may read the states now, or the pooling reads others."""
        first, _, *later = self.modules
        return (
            tuple(self.parent._modules.values()) != self.modules  # modules are equal if identical
            or (_kept(self.pooling), _reads_first(self.pooling)) != (self.kept, self.reads_first)
            or not _puts_out_tokens(first)
            or not all(map(_is_on_sentence, later))
            or _is_altered(*self.modules)
        )


def find_pooled(model: nn.Module) -> Pooled | None:
    """Return a sentence-transformers model's pooling layer; None unless it alone reads the states."""
    for parent in model.modules():
        modules = tuple(module for module in parent._modules.values() if module is not None)
        names = [name for name in _POOLINGS if _is_named(parent, name)]
        if len(modules) < 2 or not names:
            continue
        first, pooling, *later = modules
        is_first = any(_is_named(first, name) for name in ("Transformer", "MLMTransformer")) and _puts_out_tokens(first)
        if is_first and _is_named(pooling, _POOLINGS[names[0]]) and all(map(_reads_pooled, later)):
            kept = None if _is_altered(*modules) else _kept(pooling)
            return Pooled(parent, modules, pooling, kept, _reads_first(pooling)) if kept else None
    return None


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that a sentence-transformers model holds; None for other models."""
    has_own = any(_is_named(model, name) for name in ("SentenceTransformer", "CrossEncoder"))
    found = model.tokenizer if has_own else None
    return found if isinstance(found, PreTrainedTokenizerBase) else None


def _mode_of(pooling: Any) -> str:
    """Return a pooling layer's modes, joined by `_`; "" if it has none."""
    has_method = hasattr(pooling, "get_pooling_mode_str")
    mode = pooling.get_pooling_mode_str() if has_method else getattr(pooling, "pooling_mode", "")
    return mode if isinstance(mode, str) else "_".join(mode)


def _kept(pooling: Any) -> Kept | None:
    """Return what a pooling layer reads: one vector, or valid tokens (`sequence`); None: padding too, maybe."""
    mode = _mode_of(pooling)
    if mode and not _HEEDING.fullmatch(mode):
        return None
    return _MODES.get(mode, "sequence") if getattr(pooling, "include_prompt", True) else "sequence"


def _reads_first(pooling: Any) -> bool:
    """Whether a pooling layer may read the first column whatever the mask, as versions before 6 do for `cls`."""
    return "cls" in _mode_of(pooling)


def _is_altered(*modules: nn.Module) -> bool:
    """Whether a foreign hook or forward may read the states, or change them before pooling.

    Later modules count as well: they receive the states beside the pooled vector.
    """
    forwards = (vars(module).get("forward", type(module).forward) for module in modules)
    return are_hooked(modules) or not all(one.__module__.startswith("sentence_transformers.") for one in forwards)


def _puts_out_tokens(module: nn.Module) -> bool:
    return getattr(module, "module_output_name", _TOKENS) == _TOKENS


def _is_on_sentence(module: nn.Module) -> bool:
    """Whether a module reads the pooled vector and does not overwrite the states."""
    is_taken = getattr(module, "module_input_name", _SENTENCE) == _SENTENCE
    return is_taken and getattr(module, "module_output_name", _SENTENCE) != _TOKENS


def _reads_pooled(module: nn.Module) -> bool:
    """Whether a module reads the pooled vector alone."""
    return _is_on_sentence(module) and any(_is_named(module, name) for name in _AFTER_POOLING)


def _is_named(module: Any, name: str) -> bool:
    """Whether a module is of sentence-transformers' own class of this name."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__.split(".")[0] == "sentence_transformers"


class Features(dict[str, Any]):
    """The model's output, a dict, whose missing token states are computed when they are first read."""

    def __init__(self, features: Mapping[str, Any], compute: Compute) -> None:
        """Copy `features`; `compute` returns the token states."""
        super().__init__(features)
        self._compute: Compute | None = compute

    def _fill(self) -> None:
        """Compute the states, unless they were computed or replaced."""
        if (compute := self._compute) is not None:
            super().__setitem__(_TOKENS, compute())
            self._compute = None  # not earlier: if it raises, the states are still missing

    def __setitem__(self, key: str, value: Any) -> None:
        if key == _TOKENS:
            self._compute = None
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:  # overridden so that dict() reads each value by our `__getitem__`
        return super().__iter__()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _filled(name: str, is_of_one_key: bool) -> Callable[..., Any]:
    """Return a method of dict that computes the states first; a method of one key, only if the key is theirs."""
    method = getattr(dict, name)

    def run(self: Features, *args: Any, **kwargs: Any) -> Any:
        if not is_of_one_key or args[:1] == (_TOKENS,):
            self._fill()
        return method(self, *args, **kwargs)

    return run


for _name in ("__getitem__", "get", "pop", "setdefault", "__delitem__"):
    setattr(Features, _name, _filled(_name, is_of_one_key=True))
for _name in ("items", "values", "copy", "popitem", "update", "clear", *(f"__{one}__" for one in _OPERATORS)):
    setattr(Features, _name, _filled(_name, is_of_one_key=False))


class SentenceSwap(Swap):
    """Replaces a sentence-transformers model's forward: lets the trunk know that its states will be pooled."""

    def __init__(self, module: nn.Module, listener: Listener, pooled: ContextVar[list[Compute] | None]) -> None:
        """Replace the forward, within which the trunk appends to `pooled` a function that computes omitted states."""
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
        output.pop(_TOKENS, None)  # the caller's own dict: its vector must not be taken for states
        return features


def deferred(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Compute:
    """Return a function that computes a trunk's states of these arguments, copied: no gradients, present autocast."""
    is_on = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_on else None
    args, kwargs = tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}

    def compute() -> Any:
        with torch.no_grad(), torch.autocast(device, dtype, enabled=is_on):
            return run(*args, **kwargs)[0]

    return compute


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
