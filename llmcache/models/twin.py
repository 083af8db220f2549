"""A second module over the same tensors, which nothing hangs on.

It is compiled in place of a wrapped one, tried before anything is wrapped, or computes for the audit, unseen by hooks.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn

from llmcache.errors import ConfigError
from llmcache.models.hooks import plain_forward


def make_twin(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers, without anybody's hooks, each part with the forward of its class.

    Raises:
        ConfigError: Somebody replaced the forward of a part, or the module cannot be copied.
    """
    try:
        twin = _copy(module, (one for part in module.modules() for one in part._buffers.values()), {})
    except Exception as error:  # whatever a part's attributes raise
        raise ConfigError(f"compile: {type(module).__name__} cannot be copied: {error}") from error
    for part in twin.modules():
        forward = part.__dict__.pop("forward", None)
        if forward is not None and getattr(forward, "__func__", None) is not type(part).forward:
            raise ConfigError(
                f"compile: the forward of a {type(part).__name__} was replaced (by a {type(forward).__name__}), which "
                "no graph would run: take that off first"
            )
    return twin


def make_trial(module: nn.Module, replaced: Mapping[nn.Module, nn.Module] | None = None) -> nn.Module:
    """A copy in eval mode that shares nothing but parameters, without anybody's hooks, to be run uncompiled.

    Args:
        module: Not touched.
        replaced: Parts of it that are not copied, and what stands for each in the copy.

    Raises:
        TypeError: A part's forward was replaced by a function that may call the part itself.
        Exception: Whatever copying a part's attributes raises.
    """
    trial = _copy(module, (), {id(part): other for part, other in (replaced or {}).items()})
    for part in trial.modules():
        if not isinstance(part.__dict__.get("forward"), MethodType | partial | None):
            raise TypeError(f"the forward of a {type(part).__name__} was replaced")
        for name, child in part._modules.items():
            part._modules[name] = getattr(child, "_orig_mod", child)  # of what torch.compile() made
    return trial.eval() if module.training else trial


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
        own = {name: value for name, value in part.__dict__.items() if name != "forward"}
        own |= {name: OrderedDict() for name in own if name.endswith(("ward_hooks", "ward_pre_hooks"))}
        own["_modules"] = {name: None if one is None else replicas[one] for name, one in part._modules.items()}
        own["_compiled_call_impl"] = None
        replica.__dict__ = own
    return replicas


def run_unseen(module: nn.Module, **inputs: Any) -> Any:
    """What a module returns, without the cache, and without hooks where it can be run so."""
    try:
        return make_replicas(module)[module](**inputs)
    except ConfigError:
        return plain_forward(module)(**inputs)


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Within: no gradients and no autocast, and random numbers are as before afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.random.fork_rng(devices):
        yield


def _copy(module: nn.Module, shared: Iterator[object] | tuple[()], memo: dict[int, object]) -> nn.Module:
    parameters = (one for part in module.modules() for one in part._parameters.values())
    memo |= {id(one): one for one in chain(parameters, shared) if one is not None}
    twin = copy.deepcopy(module, memo)
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return twin
