"""A second module over the same tensors, which nothing hangs on.

A compiler is shown one in place of a wrapped module, and the audit computes with one, unseen by hooks of users.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from llmcache.errors import ConfigError
from llmcache.models.hooks import plain_forward

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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


def make_replicas(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Of a module and each part, a second one with the same tensors and attributes, without hooks; cheap to make.

    Edits of parameters and buffers reach both. An attribute that holds a module, or a function bound to one, is shared.

    Raises:
        ConfigError: Somebody replaced the forward of a part.
    """
    replicas = {part: type(part).__new__(type(part)) for part in module.modules()}
    for part, replica in replicas.items():
        if getattr(plain_forward(part), "__func__", None) is not type(part).forward:
            raise ConfigError(f"the forward of a {type(part).__name__} was replaced, and would be run for the original")
        own = replica.__dict__
        own |= part.__dict__
        own.pop("forward", None)
        own["_modules"] = {name: None if one is None else replicas[one] for name, one in part._modules.items()}
        own["_compiled_call_impl"] = None
        for name in _HOOKS:
            own[name] = OrderedDict()
    return replicas


def run_unseen(module: nn.Module, **inputs: Any) -> Any:
    """What a module returns, without the cache, and without hooks where it can be run so."""
    try:
        return make_replicas(module)[module](**inputs)
    except ConfigError:
        return plain_forward(module)(**inputs)


def _tensors_of(part: nn.Module) -> Iterable[object]:
    return (one for one in chain(part._parameters.values(), part._buffers.values()) if one is not None)
