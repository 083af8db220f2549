"""The only file that assigns `module.forward`.

Native hooks cannot skip a layer, so each layer's forward is swapped once; the trunk gets native hooks that open and
close a call. Removal is in reverse order and restores each module's `__dict__` exactly, a foreign wrapper that was
there before (accelerate's, say) included.
"""

import copy
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn, Protocol

from torch import nn

from llmcache.adapters import Arguments, Trunk
from llmcache.errors import WrapError


class Listener(Protocol):
    """What the hooks call; one forward of the trunk is `opened`, then `layer` once a layer, then `closed`."""

    def opened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None: ...

    def layer(self, layer: "SwappedForward", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def normed(self, output: Any) -> Any: ...

    def closed(self) -> None: ...


class SwappedForward:
    """Stands in for one layer's forward."""

    def __init__(self, module: nn.Module, number: int, listener: Listener) -> None:
        """Remember what the layer's forward was.

        Args:
            module: The layer.
            number: Its place, 0 for the first.
            listener: Decides whether the layer is computed.
        """
        self.module = module
        self.number = number
        self.original: Callable[..., Any] = module.forward
        self.__wrapped__ = self.original  # inspect.signature() then shows the layer's own
        self.arguments = Arguments(self.original)
        self._listener = listener
        self._had_own_forward = "forward" in module.__dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._listener.layer(self, args, kwargs)

    def remove(self) -> None:
        """Give the layer its forward back, if it still carries this one."""
        if self.module.__dict__.get("forward") is not self:
            raise WrapError(
                f"layer {self.number}: its forward was replaced by {self.module.forward!r} after wrapping; "
                "remove that wrapper first, then call unwrap()"
            )
        if self._had_own_forward:
            self.module.forward = self.original
        else:
            del self.module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied layer computes with its own weights: it gets its class's forward, bound to the copy."""
        if self._had_own_forward:
            return copy.deepcopy(self.original, memo)
        return types.MethodType(type(self.module).forward, memo[id(self.module)])

    def __reduce__(self) -> NoReturn:
        raise WrapError("a wrapped model cannot be pickled: call cache.unwrap() first, or save its state_dict()")


class _TrunkHook:
    """A native hook that forwards to the listener, and does nothing in a copy of the model."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> Any:
        return self._act(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_TrunkHook":
        return _TrunkHook(_do_nothing)

    __reduce__ = SwappedForward.__reduce__


def _do_nothing(*_: Any) -> None:
    return None


def is_wrapped(trunk: Trunk) -> bool:
    """Whether a cache already hangs on this trunk."""
    return any(isinstance(layer.__dict__.get("forward"), SwappedForward) for layer in trunk.layers)


def install(trunk: Trunk, listener: Listener) -> ExitStack:
    """Hook the trunk and swap the forward of every layer.

    Args:
        trunk: Where to install.
        listener: Receives the calls.

    Returns:
        A stack whose `close()` restores everything, in reverse order. An error half-way restores what was done.

    Raises:
        WrapError: The trunk already carries a cache.
    """
    if is_wrapped(trunk):
        raise WrapError("this model is already wrapped: use the existing cache, or call its unwrap() first")
    with ExitStack() as stack:
        for number, module in enumerate(trunk.layers):
            swap = SwappedForward(module, number, listener)
            module.forward = swap
            stack.callback(swap.remove)
        if trunk.norm is not None:
            normed = _TrunkHook(lambda _module, _args, output: listener.normed(output))
            stack.callback(trunk.norm.register_forward_hook(normed).remove)
        opened = _TrunkHook(lambda _module, args, kwargs: listener.opened(args, kwargs))
        stack.callback(trunk.module.register_forward_pre_hook(opened, with_kwargs=True).remove)
        closed = _TrunkHook(lambda *_: listener.closed())
        # always_call: an exception in the model must not leave the call open for the thread's next forward.
        stack.callback(trunk.module.register_forward_hook(closed, always_call=True).remove)
        return stack.pop_all()
