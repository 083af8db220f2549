"""Copies of modules without hooks that share their tensors: to compile, to try before wrapping, to audit."""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.errors import ConfigError
from llmcache.models.hooks import plain_forward

_MOST_COPIED = 1 << 20  # elements of a buffer: a trial shares larger ones, which hold weights (GPTQ)
_HOOKS = frozenset(name for name in vars(nn.Module()) if "ward_" in name and "_hooks" in name)


def make_twin(module: nn.Module) -> nn.Module:
    """Return a copy that shares parameters and buffers, without hooks, each part with the forward of its class.

    `ConfigError` if a part's forward was replaced, or the module cannot be copied.
    """
    try:
        twin = _copy(module, (one for part in module.modules() for one in part._buffers.values()), {})
    except Exception as error:  # attributes may raise anything
        raise ConfigError(f"no graph can be made: {type(module).__name__} cannot be copied: {error}") from error
    for part in twin.modules():
        forward = part.__dict__.pop("forward", None)
        if forward is not None and getattr(forward, "__func__", None) is not type(part).forward:
            replaced = f"the forward of a {type(part).__name__} was replaced (by a {type(forward).__name__})"
            raise ConfigError(f"no graph can be made: {replaced}, which no graph would run: remove it first")
    return twin


def make_trial(
    module: nn.Module, replaced: Mapping[nn.Module, nn.Module] | None = None, runs_functions: bool = False
) -> nn.Module:
    """Return a copy in eval mode without hooks, to be run uncompiled, which shares parameters and large buffers.

    `replaced` maps parts that are not copied to their substitutes. Without it, attributes that cannot be copied (a
    lock) are shared. `TypeError` if a part's forward was replaced by a function, which may call parts of the original,
    unless `runs_functions` (never allowed for the module itself).
    """
    try:
        buffers = (one for part in module.modules() for one in part._buffers.values())
        shared = (one for one in buffers if one is not None and one.numel() > _MOST_COPIED)
        trial = _copy(module, shared, {id(part): other for part, other in (replaced or {}).items()})
    except Exception:  # attributes may raise anything
        if replaced:
            raise
        trial = make_replicas(module)[module]
        for part in trial.modules():
            part._buffers = {name: None if one is None else one.clone() for name, one in part._buffers.items()}
    for part in trial.modules():
        is_own = isinstance(part.__dict__.get("forward"), MethodType | partial | None)  # bound to the copy
        if not is_own and (part is trial or not runs_functions):
            raise TypeError(f"the forward of a {type(part).__name__} was replaced")
        for name, child in part._modules.items():
            part._modules[name] = getattr(child, "_orig_mod", child)  # the module that torch.compile() wrapped
        part.training = False  # not by eval(), in which some layers merge adapters into shared weights
    return trial


def make_replicas(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return a shallow copy of a module and each part, by original, without hooks; all but submodules is shared.

    `ConfigError` if a part's forward was replaced.
    """
    replicas = {part: type(part).__new__(type(part)) for part in module.modules()}
    for part, replica in replicas.items():
        if getattr(plain_forward(part), "__func__", None) is not type(part).forward:
            raise ConfigError(f"the forward of a {type(part).__name__} was replaced, and would run on the original")
        own = replica.__dict__
        own |= part.__dict__
        own.pop("forward", None)
        own["_modules"] = {name: None if one is None else replicas[one] for name, one in part._modules.items()}
        own["_compiled_call_impl"] = None
        for name in _HOOKS:
            own[name] = OrderedDict()
    return replicas


def run_uncached(module: nn.Module, **inputs: Any) -> Any:
    """Return a module's output without the cache, and without hooks unless a part's forward was replaced."""
    try:
        return make_replicas(module)[module](**inputs)
    except ConfigError:
        return plain_forward(module)(**inputs)


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Disable gradients and autocast within this context, and restore the random state of CPU and device afterwards."""
    devices = [device] if device.type == "cuda" and torch.cuda.is_available() else []
    plain = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    with torch.no_grad(), plain, torch.random.fork_rng(devices):
        yield


def _copy(module: nn.Module, shared: Iterator[object], memo: dict[int, object]) -> nn.Module:
    """Return a deep copy without hooks that shares parameters and `shared`; `memo` maps ids to substitutes."""
    parts = list(module.modules())
    parameters = (one for part in parts for one in part._parameters.values())
    computed = (one for part in parts for one in vars(part).values() if isinstance(one, Tensor))
    memo |= {id(one): one.detach().clone() for one in computed}  # deepcopy refuses computed tensors (of weight_norm)
    memo |= {id(one): one for one in chain(parameters, shared) if one is not None}
    for part in parts:  # neither hooks nor objects that they refer to are copied
        memo |= {id(hooks): type(hooks)() for name, hooks in vars(part).items() if name in _HOOKS}
    return copy.deepcopy(module, memo)
