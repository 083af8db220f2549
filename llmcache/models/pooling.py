"""Which module of a sentence-transformers model reads the trunk's states, and what is owed to others that may.

An entry that keeps one vector is enough only where one pooling layer reads the states, right after the trunk. So that
is looked for when a model is wrapped, and looked at again in each call, since modules and modes can be exchanged. What
else may read the states comes later (`encode(output_value="token_embeddings")`, modules that follow). `mean` puts its
vector on every token, and nothing would tell it from states: so the trunk puts out NaN for rows that were served, as
with `cls` and `last`, and the vector is there for the time of the pooling alone.

Sizes: B rows, T tokens, D hidden width.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llmcache.models.hooks import are_hooked, shield, unshield
from llmcache.threads import forkable

_TOKENS = "token_embeddings"
_SENTENCE = "sentence_embedding"
_MARK, _VEILED = "_llmcache_pooled", "_llmcache_veiled"  # attributes of states
_AFTER_POOLING = ("Normalize", "Dense", "Dropout", "LayerNorm")  # of sentence-transformers: they read what was pooled
Kept = Literal["mean", "cls", "last"]
_MODES: dict[str, Kept] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class Pooled:
    """A pooling layer that alone reads what a trunk puts out."""

    parent: nn.Module  # the model whose modules run one after the other
    modules: tuple[nn.Module, ...]  # these, as they were when it was wrapped
    pooling: nn.Module
    kept: Kept

    def has_changed(self) -> bool:
        """Whether something else may read the states now."""
        first, *later = self.modules
        return (
            tuple(self.parent._modules.values()) != self.modules  # modules are equal where they are the same
            or _kept(self.pooling) != self.kept
            or not _puts_out_tokens(first)
            or not all(map(_takes_sentence, later[1:]))
            or _is_altered(first, self.pooling)
        )


def find_pooled(model: nn.Module) -> Pooled | None:
    """The pooling layer of a sentence-transformers model, if it alone reads the states, one vector of them."""
    for parent in model.modules():
        modules = tuple(module for module in parent._modules.values() if module is not None)
        if len(modules) < 2 or not _is_named(parent, "SentenceTransformer"):
            continue
        is_first = _is_named(modules[0], "Transformer") and _puts_out_tokens(modules[0])
        if is_first and _is_named(modules[1], "Pooling") and all(map(_reads_pooled, modules[2:])):
            kept = None if _is_altered(*modules[:2]) else _kept(modules[1])
            return Pooled(parent, modules, modules[1], kept) if kept else None
    return None


class Veil:
    """Has nobody but one pooling layer see rows in which one vector stands for all tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = forkable(threading.Lock())
        self._is_off = False
        self._pending: dict[int, weakref.ref[Tensor]] = {}  # states that no pooling layer has read, by id

    def draw(self, output: Any, places: Mapping[int, int]) -> None:
        """Make rows NaN but for the pooling layer, in the trunk's states and what its pooler made of them.

        Of each such row a valid token is given.
        """
        if isinstance(output, Tensor):
            output = (output,)
        states, *others = output.values() if isinstance(output, Mapping) else output
        rows, is_whole = sorted(places), len(places) == len(states)
        vectors = torch.stack([states[row, places[row]] for row in rows])[:, None]  # (R, 1, D), copied
        with self._lock:
            if self._is_off:  # unwrapped meanwhile: nobody is left to lift it
                return
            for other in (states, *others):
                if isinstance(other, Tensor) and other.is_floating_point() and len(other) == len(states):
                    if is_whole:  # picking rows takes ten times as long
                        other.fill_(torch.nan)
                    else:
                        other[rows] = torch.nan
            setattr(states, _MARK, (None if is_whole else rows, vectors))
            number = id(states)
            self._pending[number] = weakref.ref(states, lambda _: self._pending.pop(number, None))

    def listen(self, pooling: nn.Module) -> Callable[[], None]:
        """Let a pooling layer see what is behind the veil; returns what takes the hooks off."""
        before = pooling.register_forward_pre_hook(_lift)
        after = pooling.register_forward_hook(self._drop)
        shield(pooling)

        def remove() -> None:
            self._lift_pending()
            before.remove()
            after.remove()
            unshield(pooling)

        return remove

    def _lift_pending(self) -> None:
        """Show the vectors of calls that are under way: their pooling layer comes too late for its hooks."""
        with self._lock, torch.inference_mode():
            self._is_off = True
            for found in list(self._pending.values()):
                if (states := found()) is not None:
                    rows, vectors = getattr(states, _MARK)
                    states[slice(None) if rows is None else rows] = vectors

    def _drop(self, module: nn.Module, args: Any, features: Any) -> None:
        """Give back what was there before."""
        if not torch.compiler.is_compiling():
            states = features.get(_TOKENS)
            veiled = features[_TOKENS] = getattr(states, _VEILED, states)
            self._pending.pop(id(veiled), None)


def _lift(module: nn.Module, args: Any) -> None:
    """Put each vector on every token of its row, for the time of the pooling."""
    if torch.compiler.is_compiling() or not args:
        return
    veiled = args[0].get(_TOKENS)
    if isinstance(veiled, Tensor) and (found := getattr(veiled, _MARK, None)):
        rows, vectors = found
        states = vectors.expand(veiled.shape) if rows is None else veiled.clone()
        if rows is not None:
            states[rows] = vectors
        setattr(states, _VEILED, veiled)
        args[0][_TOKENS] = states


def _kept(pooling: Any) -> Kept | None:
    """What of the states a pooling layer reads; None: several modes, others, or a prompt that is left out."""
    if not getattr(pooling, "include_prompt", True):
        return None
    mode = pooling.get_pooling_mode_str() if hasattr(pooling, "get_pooling_mode_str") else pooling.pooling_mode
    return _MODES.get(mode) if isinstance(mode, str) else None


def _is_altered(*modules: nn.Module) -> bool:
    """Whether somebody else's hook or forward may read the states, or change them before they are pooled."""
    forwards = (vars(module).get("forward", type(module).forward) for module in modules)
    return are_hooked(modules) or not all(one.__module__.startswith("sentence_transformers.") for one in forwards)


def _puts_out_tokens(module: nn.Module | None) -> bool:
    return getattr(module, "module_output_name", _TOKENS) == _TOKENS


def _reads_pooled(module: nn.Module | None) -> bool:
    """Whether a module reads what was pooled, and nothing else."""
    return _takes_sentence(module) and any(_is_named(module, name) for name in _AFTER_POOLING)


def _takes_sentence(module: nn.Module | None) -> bool:
    return getattr(module, "module_input_name", _SENTENCE) == _SENTENCE


def _is_named(module: nn.Module | None, name: str) -> bool:
    """Whether it is of sentence-transformers' own class of this name."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__.split(".")[0] == "sentence_transformers"
