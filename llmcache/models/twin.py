"""A second module over the same tensors, which nothing hangs on: what a compiler is shown in place of a wrapped one."""

import copy
from collections.abc import Iterable
from itertools import chain

from torch import nn

from llmcache.errors import ConfigError


def make_twin(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers, without anybody's hooks, each part with the forward of its class.

    Raises:
        ConfigError: Somebody replaced the forward of a part, or the module cannot be copied.
    """
    shared = {id(tensor): tensor for part in module.modules() for tensor in _tensors_of(part)}
    try:
        twin = copy.deepcopy(module, dict(shared))
    except Exception as error:  # whatever a part's attributes raise
        raise ConfigError(f"compile: {type(module).__name__} cannot be copied: {error}") from error
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
        forward = part.__dict__.pop("forward", None)
        if forward is not None and getattr(forward, "__func__", None) is not type(part).forward:
            raise ConfigError(
                f"compile: the forward of a {type(part).__name__} was replaced (by a {type(forward).__name__}), which "
                "no graph would run: take that off first"
            )
    return twin


def _tensors_of(part: nn.Module) -> Iterable[object]:
    return (one for one in chain(part._parameters.values(), part._buffers.values()) if one is not None)
