"""Whether the layers that were wrapped are still those that the trunk runs."""

from functools import reduce
from itertools import repeat
from typing import Any

from torch import nn

from llmcache.models.adapters import Trunk


class Layers:
    """Looks at the layers of one wrapped trunk, at each call: at their attributes only, a microsecond in all."""

    def __init__(self, trunk: Trunk) -> None:
        self._trunk = trunk
        self._path = trunk.adapter.layers.split(".")
        self._attributes = [layer.__dict__ for layer in dict.fromkeys(trunk.layers)]

    def find_reason(self) -> str | None:
        """Why a call cannot use the cache, a key of `bypass.CURES`, or None when it can."""
        if any(map(dict.get, self._attributes, repeat("_compiled_call_impl"))):
            return "compiled_layers"
        if None in map(dict.get, self._attributes, repeat("forward")):
            return "other_layers"
        return None if self._are_the_same() else "other_layers"

    def _are_the_same(self) -> bool:
        """Whether the trunk's list holds the layers that it held, in the same order."""
        try:
            held: Any = reduce(_child, self._path, self._trunk.module)
            return tuple(held._modules.values() if isinstance(held, nn.ModuleList) else held) == self._trunk.layers
        except (AttributeError, TypeError):
            return False


def _child(module: nn.Module, name: str) -> Any:
    """A module's child; through its attributes only where it is none of its own, which takes longer."""
    return module._modules[name] if name in module._modules else getattr(module, name)
