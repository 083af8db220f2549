"""Second modules over the same tensors, without hooks.

They are compiled in place of a wrapped module, tried before anything is wrapped, or compute for the audit.
"""

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

_MOST_COPIED = 1 << 20  # numbers of a buffer in a trial: larger ones hold weights (of GPTQ, say), and are shared
_HOOKS = frozenset(name for name in vars(nn.Module()) if "ward_" in name and "_hooks" in name)


def make_twin(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers, without hooks, each part with the forward of its class.

    `ConfigError` if somebody replaced the forward of a part, or the module cannot be copied.
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


def make_trial(
    module: nn.Module, replaced: Mapping[nn.Module, nn.Module] | None = None, runs_functions: bool = False
) -> nn.Module:
    """A copy in eval mode without hooks, to be run uncompiled, which shares parameters and large buffers.

    `replaced` names parts that are not copied, and what stands for each in the copy; then whatever copying raises is
    raised. Else, where an attribute cannot be copied (a lock, say), attributes are shared as well; `ConfigError` if the
    forward of a part was replaced then. A function in place of the forward of a part, which may call parts of the
    original, is a `TypeError` unless `runs_functions`; in place of the module's own it always is one.
    """
    try:
        buffers = (one for part in module.modules() for one in part._buffers.values())
        shared = (one for one in buffers if one is not None and one.numel() > _MOST_COPIED)
        trial = _copy(module, shared, {id(part): other for part, other in (replaced or {}).items()})
    except Exception:  # whatever a part's attributes raise
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
            part._modules[name] = getattr(child, "_orig_mod", child)  # of what torch.compile() made
        part.training = False  # not by eval(), in which some layers merge adapters into weights that are shared
    return trial


def make_replicas(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Of a module and each part, a second one with the same tensors and attributes, without hooks; cheap to make.

    Edits of parameters and buffers reach both. An attribute that holds a module, or a function bound to one, is shared.
    `ConfigError` if somebody replaced the forward of a part.
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


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Within: no gradients and no autocast, and random numbers are as before afterwards."""
    devices = [device] if device.type == "cuda" and torch.cuda.is_available() else []
    plain = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    with torch.no_grad(), plain, torch.random.fork_rng(devices):
        yield


def _copy(module: nn.Module, shared: Iterator[object], memo: dict[int, object]) -> nn.Module:
    """A copy that shares parameters and `shared`, and takes from `memo` what stands there by id; without hooks."""
    parts = list(module.modules())
    parameters = (one for part in parts for one in part._parameters.values())
    made = (one for part in parts for one in vars(part).values() if isinstance(one, Tensor))
    memo |= {id(one): one.detach().clone() for one in made}  # computed ones (by weight_norm, say) cannot be copied
    memo |= {id(one): one for one in chain(parameters, shared) if one is not None}
    for part in parts:  # what hooks hold on to is not copied
        memo |= {id(hooks): type(hooks)() for name, hooks in vars(part).items() if name in _HOOKS}
    return copy.deepcopy(module, memo)
