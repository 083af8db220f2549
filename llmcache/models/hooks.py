"""The only file that assigns `module.forward`.

Native hooks cannot skip a layer, so each layer's forward is swapped once. The trunk's forward is swapped as well, not
hooked: some callers (sentence-transformers 6) call `trunk.forward(...)`, which runs no native hook. Removal is in
reverse order and restores each module's `__dict__` exactly, a foreign wrapper that was there before (accelerate's, say)
included.

A copy of a module shares what is in its `__dict__`, and would run the original. So copies, pickles and DataParallel's
replicas are made without anything of ours: Python and torch look for the functions that make them on the module itself
before they look at its class.
"""

import copy
import logging
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn.modules import module as _every_module

from llmcache.errors import WrapError
from llmcache.models.adapters import Trunk
from llmcache.models.arguments import Arguments
from llmcache.models.tuners import is_activation

logger = logging.getLogger("llmcache")

_CAPTURING = "transformers.utils.output_capturing"
_KEPT = "logits_to_keep"


class Listener(Protocol):
    """Who stands behind a swap."""

    @property
    def last(self) -> Sequence[Any]:
        """What became of each row of this thread's last call."""


class Reader(Listener, Protocol):
    """Who wants to know what a head reads."""

    def reads_last(self, n_columns: int | None, /) -> object:
        """Before a head: it reads so many columns, the last ones; None: maybe all. After it: None."""


class Watcher(Listener, Protocol):
    """Who stands in for a trunk's forward, and shows its calls to an observer."""

    is_retired: bool
    #: Within the whole model's forward: trunk calls that were closed. Else None.
    seen: ContextVar[list[Any] | None]

    def observe(self, call: Any, output: Any) -> None:
        """Take a call that was closed, and what the whole model returned."""

    def withdraw(self, call: Any) -> None:
        """Take back what waits for an answer of a call, which raised."""


class _StandIn:
    """Hangs on a module under the name of a function of its class; in a copy that gets hold of it, it is that."""

    name: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own(memo[id(self.module)], self.name)

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.name)  # as a bound method; where it is loaded, the module has only its class


class _Reduce(_StandIn):
    """Copies and pickles a module without anything of ours."""

    name = "__reduce_ex__"

    def __call__(self, protocol: Any) -> Any:
        if any(swap.is_of_trunk for swap in _beneath(self.module.forward)):  # once for a whole model
            logger.info("llmcache: a copy of a %s is made without its cache", type(self.module).__name__)
        return _cleaned(_own(self.module, self.name)(protocol))


class _Replicate(_StandIn):
    """Has DataParallel copy a module likewise."""

    name = "_replicate_for_data_parallel"

    def __call__(self) -> nn.Module:
        replica: nn.Module = _own(self.module, self.name)()
        replica.__dict__ = _plain(vars(replica))
        return replica


def shield(module: nn.Module) -> None:
    """Have copies of a module be made without what we have just hung on it."""
    for kind in (_Reduce, _Replicate):
        vars(module).setdefault(kind.name, kind(module))


def unshield(module: nn.Module) -> None:
    """Undo that, if nothing of ours is left."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if not (_beneath(vars(module).get("forward")) or any(map(_is_ours, hooks))):
        for kind in (_Reduce, _Replicate):
            vars(module).pop(kind.name, None)


def _cleaned(value: Any) -> Any:
    """What a module is to be made of, with its attributes without anything of ours, wherever its class puts them."""
    if type(value) is tuple:
        return tuple(map(_cleaned, value))
    if type(value) is not dict:
        return value
    if isinstance(value.get(_Reduce.name), _Reduce):
        return _plain(value)
    return {key: _cleaned(one) for key, one in value.items()}


def _plain(space: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes without anything of ours."""
    plain = {name: value for name, value in space.items() if not isinstance(value, (_Reduce, _Replicate))}
    if swaps := _beneath(plain.get("forward")):
        del plain["forward"]
        if swaps[-1].had_own_forward:
            plain["forward"] = swaps[-1].original
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        if (hooks := plain.get(name)) and any(map(_is_ours, hooks.values())):
            plain[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
    return plain


def _beneath(forward: Any) -> "list[Swap]":
    """Swaps that a forward consists of, outermost first: more than one may hang on the same module."""
    swaps: list[Swap] = []
    forward = getattr(forward, "__func__", forward)  # accelerate binds what it unwraps to the module once more
    while isinstance(forward, Swap):
        swaps.append(forward)
        forward = forward.original
    return swaps


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", None)).startswith("llmcache.")


def _own(module: nn.Module, name: str) -> Callable[..., Any]:
    """A function of a module's class, bound to it."""
    return types.MethodType(getattr(type(module), name), module)


class Swap(_StandIn):
    """Stands in for one module's forward."""

    name = "forward"
    is_of_trunk = False

    def __init__(self, module: nn.Module, listener: Listener) -> None:
        """Take the forward's place.

        Args:
            module: The trunk or a layer.
            listener: Receives the calls.
        """
        super().__init__(module)
        self._original: Callable[..., Any] = module.forward
        self.had_own_forward = "forward" in module.__dict__
        self.__wrapped__ = self._original  # inspect.signature() then shows the module's own
        # What torch.compile() returns for a module takes anything.
        self.arguments = Arguments(getattr(module, "_orig_mod", module).forward)
        self.listener = listener
        module.forward = self
        shield(module)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward beneath: what was on the module, else its class's of now, which may be patched at any time."""
        if self.had_own_forward or torch.compiler.is_compiling():  # a compiler cannot follow what is made here
            return self._original
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # bound once more, as accelerate does when it unwraps a model
            module, *rest = args
            return (self.run if module is self.module else _own(module, self.name))(*rest, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the module puts out."""
        raise NotImplementedError

    def remove(self) -> None:
        """Give the module its forward back.

        Raises:
            WrapError: Somebody else has put a forward on top meanwhile.
        """
        forward = self.module.__dict__.get("forward")
        if forward is not None and getattr(forward, "__func__", forward) is self:
            if self.had_own_forward:
                self.module.forward = self.original
            else:
                del self.module.forward
        elif forward is not None and not self._was_on_top_of(forward):
            raise WrapError(
                f"{type(self.module).__name__}: its forward was replaced after wrapping "
                f"(by a {type(self.module.forward).__name__}); remove that first, then call unwrap() again"
            )
        unshield(self.module)

    def _was_on_top_of(self, forward: Any) -> bool:
        """Whether a forward is one that lay beneath this, which somebody took off."""
        sought = getattr(forward, "__func__", forward)
        below: Any = self.original
        while below is not None:
            if getattr(below, "__func__", below) is sought:
                return True
            below = getattr(below, "__wrapped__", None)
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module computes with its own weights: it gets its class's forward, bound to the copy."""
        return copy.deepcopy(self.original, memo) if self.had_own_forward else super().__deepcopy__(memo)


class HeadSwap(Swap):
    """Stands in for a language-model head's forward: tells how many columns it reads, from the last on."""

    def __init__(self, module: nn.Module, reader: Reader) -> None:
        """Take the forward's place, and tell `reader`."""
        super().__init__(module, reader)
        self._reader = reader

    def run(self, *args: Any, **kwargs: Any) -> Any:
        n_kept = self.arguments.get(args, kwargs, _KEPT)
        self._reader.reads_last(n_kept if isinstance(n_kept, int) and n_kept > 0 else None)
        try:
            return self.original(*args, **kwargs)
        finally:
            self._reader.reads_last(None)


class ModelForward(Swap):
    """Stands in for the forward of the whole model: shows its output to the observer, which learns from answers."""

    def __init__(self, model: nn.Module, forward: Watcher) -> None:
        """Take the place of the model's forward; `forward` stands in for its trunk's."""
        super().__init__(model, forward)
        self._forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, and show it to the observer."""
        if self._forward.is_retired or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        calls: list[Any] = []
        token = self._forward.seen.set(calls)
        try:
            output = self.original(*args, **kwargs)
        except BaseException:
            for call in calls:
                self._forward.withdraw(call)
            raise
        finally:
            self._forward.seen.reset(token)
        if len(calls) == 1:  # of several nobody knows which of them made which answer
            self._forward.observe(calls[0], output)
        return output


class _OutputHook:
    """Hands a module's output to the listener; in a copy that gets hold of it, it does nothing."""

    def __init__(self, receive: Callable[[Any], Any] | None = None) -> None:
        self._receive = receive

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self._receive is None else self._receive(output)

    def __reduce__(self) -> tuple[type["_OutputHook"], tuple[()]]:
        return _OutputHook, ()


class Installed:
    """What hangs on a model, and how to take it off."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._removals: list[Callable[[], None]] = []

    def add(self, remove: Callable[[], None]) -> None:
        """Remember how to take one thing off."""
        self._removals.append(remove)

    @property
    def is_empty(self) -> bool:
        """Whether nothing hangs on the model any more."""
        return not self._removals

    def remove(self) -> None:
        """Take everything off, last first. What cannot be taken off now is tried again at the next call.

        Raises:
            WrapError: A foreign wrapper lies on top of a swap; everything else was taken off.
        """
        left: list[Callable[[], None]] = []
        trouble: WrapError | None = None
        for remove in reversed(self._removals):
            try:
                remove()
            except WrapError as error:
                left.insert(0, remove)
                trouble = trouble or error
        self._removals = left
        if trouble is not None:
            raise trouble


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """What a trunk's forward does where no cache hangs on it."""
    forward: Callable[..., Any] = module.forward
    return forward.original if isinstance(forward, Swap) else forward


def parts_of(module: nn.Module) -> list[nn.Module]:
    """All modules within one, each once. `modules()` takes several times as long, and this is asked in each call."""
    found, seen = [module], {module}
    for part in found:
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found[1:]


def are_hooked(modules: Sequence[nn.Module], only_before: bool = False) -> bool:
    """Whether one of these modules has hooks that are not ours, or all modules have some; `only_before`: pre-hooks."""
    if _every_module._global_forward_pre_hooks or (_every_module._global_forward_hooks and not only_before):
        return True
    if not modules:
        return False
    hooked = [module for module in modules if module._forward_hooks or module._forward_pre_hooks]
    before = (hook for one in hooked for hook in one._forward_pre_hooks.values())
    after = () if only_before else (hook for one in hooked for hook in one._forward_hooks.values())
    hooks = chain(before, after)
    return not all(_is_ours(hook) or _is_of_weights(hook) or _is_idle_capture(hook) for hook in hooks)


def _is_of_weights(hook: Callable[..., Any]) -> bool:
    """Whether a hook decides states alone: torch's own (pruning, weight_norm), or PEFT's for an activated LoRA."""
    return str(getattr(hook, "__module__", None)).startswith("torch.nn.utils.") or is_activation(hook)


def _is_idle_capture(hook: Callable[..., Any]) -> bool:
    """Whether a hook is transformers' own, with nothing to do: once hidden states were asked for, it stays for good.

    What the trunk is asked to capture shows in its arguments; here it is about a model around it.
    """
    if getattr(hook, "__module__", None) != _CAPTURING:
        return False
    collector = getattr(sys.modules[_CAPTURING], "_active_collector", None)
    return collector is not None and not collector.get()


def is_wrapped(trunk: Trunk) -> bool:
    """Whether a cache already hangs on this trunk or a layer of it."""
    return any(isinstance(module.__dict__.get("forward"), Swap) for module in (trunk.module, *trunk.layers))


def listener_of(model: nn.Module) -> Listener | None:
    """Who listens to the trunk of a model; None where no cache hangs on it."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return next((one.listener for one in forwards if isinstance(one, Swap) and one.is_of_trunk), None)


def listen(module: nn.Module, receive: Callable[[Any], Any]) -> Callable[[], None]:
    """Hand on what a module puts out, or put out what `receive` returns; returns what takes the hook off."""
    return _hang(module, _OutputHook(receive))


def _hang(module: nn.Module, hook: _OutputHook) -> Callable[[], None]:
    """Hang a hook on a module, but not on its copies; returns what takes it off."""
    handle = module.register_forward_hook(hook)
    shield(module)

    def remove() -> None:
        handle.remove()
        unshield(module)

    return remove


def find_lm_head(model: nn.Module, trunk: Trunk) -> nn.Module | None:
    """A language-model head of transformers right around the trunk that can be asked for the last logits alone."""
    for module in model.modules():
        is_theirs = type(module).__module__.startswith("transformers.")
        if is_theirs and trunk.module in module.children() and _KEPT in Arguments(module.forward).names:
            return module
    return None
