"""Wraps each model when a test puts it into eval mode, and makes its calls as the way requires.

off    nothing is patched
twice  unwrapped, every call made twice: shows which tests count calls, hooks or random numbers
cold   wrapped; the cache is cleared before every call, so each is computed
hit    wrapped; every call is made without the cache, then twice with it, and the last result is judged

Models are wrapped in `eval`, which nearly every test calls on the outermost model, and unwrapped after each test.
Tests save, copy and train the wrapped model, as users do.
"""

import copy
import functools
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from judge.comparing import compare
from llmcache import LLMCache, LLMCacheError
from llmcache.models.sentences import SentenceSwap

WAYS = ("off", "twice", "cold", "hit")


class Judge:
    """Holds the caches of the running test, and the findings of all tests."""

    def __init__(self, way: str) -> None:
        """Nothing is patched before `start`."""
        self.way = way
        self.test = ""
        self.hits: dict[str, Counter[str]] = defaultdict(Counter)
        self.bypassed: dict[str, Counter[str]] = defaultdict(Counter)
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.refused: dict[str, str] = {}
        self.differences: list[dict[str, Any]] = []
        self._caches: list[LLMCache] = []
        self._owners: dict[int, LLMCache] = {}
        self._patches: list[Callable[[], None]] = []
        self._thread = threading.local()

    def start(self, *sentences: type[nn.Module]) -> None:
        """Patch transformers' model class, and those of sentence-transformers, which call `forward` themselves."""
        if self.way == "off":
            return
        for one in (transformers.PreTrainedModel, *sentences):
            self._patches.append(_patch(one, "eval", self._eval))
        self._patches.append(_patch(transformers.PreTrainedModel, "__call__", self._call))
        for one in sentences:
            self._patches.append(_patch(one, "forward", self._call))
        if sentences:  # above the cache's own forward, which computes token states where they are read
            self._patches.append(_patch(SentenceSwap, "run", self._call_swap))

    def stop(self) -> None:
        """Unwrap all models, and undo the patches."""
        self.finish_test()
        while self._patches:
            self._patches.pop()()

    def finish_test(self) -> None:
        """Unwrap all models, and add up their statistics."""
        for cache in list(self._caches):
            self._take_off(cache)
        self._owners.clear()

    def _take_off(self, cache: LLMCache) -> None:
        name = type(cache.model).__name__
        stats = cache.stats()
        self.hits[name].update(stats.hits)
        self.bypassed[name].update({why: n for why, n in stats.bypassed.items() if why != "disabled"})
        self.counts[name].update(errors=stats.errors, misses=stats.n_misses)
        try:
            cache.unwrap()
        except LLMCacheError as error:
            self._note(name, "unwrap", field=str(error))
        self._caches.remove(cache)
        self._owners = {key: owner for key, owner in self._owners.items() if owner is not cache}

    def wrap(self, model: nn.Module) -> None:
        """Wrap a model, unless it is wrapped already or refused; unwrap its inner models first."""
        if self.way == "twice" or id(model) in self._owners:
            return
        for inner in {id(cache): cache for m in model.modules() if (cache := self._owners.get(id(m)))}.values():
            self._take_off(inner)
        name = type(model).__name__
        self.counts[name]["wrapped"] += 1
        try:
            cache = LLMCache.wrap(model, auto_bypass=False, prefix={"block": 2})  # their prompts have few tokens
        except LLMCacheError as error:
            self.refused[name] = f"{type(error).__name__}: {error}"
            return
        self._caches.append(cache)
        self._owners.update((id(module), cache) for module in model.modules())

    # -- patches -------------------------------------------------------------------------------------------------------

    def _eval(self, original: Callable[..., Any], model: nn.Module) -> nn.Module:
        result: nn.Module = original(model)
        if not torch.compiler.is_compiling():
            self.wrap(model)
        return result

    def _call(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_grad_enabled() or model.training:
            return original(model, *args, **kwargs)
        cache = self._owners.get(id(model))
        if getattr(self._thread, "is_inside", False) or (cache is None and self.way != "twice"):
            return original(model, *args, **kwargs)
        self._thread.is_inside = True
        try:
            return self._call_as_asked(cache, lambda a, k: original(model, *a, **k), args, kwargs)
        finally:
            self._thread.is_inside = False

    def _call_swap(self, original: Callable[..., Any], swap: SentenceSwap, *args: Any, **kwargs: Any) -> Any:
        return self._call(lambda _, *a, **k: original(swap, *a, **k), swap.module, *args, **kwargs)

    def _call_as_asked(self, cache: LLMCache | None, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute without the cache, then as the way requires; run a call that the plain model refuses once."""
        numbers = _random_state()
        try:
            with nullcontext() if cache is None else cache.disabled():
                plain = run(_copied(args), _copied(kwargs))
        except Exception:
            _restore(numbers)
            return run(args, kwargs)
        first = None
        if cache is not None and self.way == "cold":
            cache.clear()
        if cache is not None and self.way == "hit":
            _restore(numbers)
            first = run(_copied(args), _copied(kwargs))
        _restore(numbers)
        n_prefixes = 0 if cache is None else cache.stats().hits.get("prefix", 0)
        judged = run(args, kwargs)
        if cache is not None:
            had_prefix = cache.stats().hits.get("prefix", 0) > n_prefixes
            self._judge(type(cache.model).__name__, plain, first, judged, had_prefix)
        return judged

    def _judge(self, name: str, plain: Any, first: Any, judged: Any, had_prefix: bool) -> None:
        """Record where the judged output differs from the plain one, or from that of the same call before."""
        self.counts[name]["calls"] += 1
        from_plain = compare(judged, plain)
        self.counts[name]["bit_equal"] += not from_plain
        self.counts[name]["close"] += bool(from_plain) and all(one.is_close for one in from_plain)
        for one in from_plain:
            if not one.is_close or self.way == "cold":  # computed output must be bit-equal
                self._note(name, "plain", one.field, one.most)
        if first is None:
            return
        from_first = compare(judged, first)
        self.counts[name]["repeated"] += not from_first
        for one in from_first:
            if not (one.is_close and had_prefix):
                self._note(name, "repeat", one.field, one.most)

    def _note(self, name: str, kind: str, field: str, most: float = 0.0) -> None:
        self.differences.append({"test": self.test, "class": name, "kind": kind, "field": field, "most": most})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        per_class = {
            name: {"hits": dict(self.hits[name]), "bypassed": dict(self.bypassed[name]), **self.counts[name]}
            for name in sorted(self.counts)
        }
        return {"classes": per_class, "refused": self.refused, "differences": self.differences}


def _patch(owner: type[Any], name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of a class; return a function that restores it."""
    had_own = name in vars(owner)
    original = getattr(owner, name)

    @functools.wraps(original)  # sentence-transformers read the signature of `forward`
    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(owner, name, patched)
    return lambda: setattr(owner, name, original) if had_own else delattr(owner, name)


def _copied(value: Any) -> Any:
    """Copy the arguments with their K/V caches, which a call fills.

    Copy mappings too: sentence-transformers writes a module's outputs into its input mapping.
    """
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, MutableMapping):
        return copy.copy(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_copied(one) for one in value)
    return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value


def seed(number: int = 0) -> None:
    """Seed all generators, so that a test sees the same random numbers in every way."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _random_state() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
