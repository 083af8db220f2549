"""A second module over the same parameters, which nothing hangs on: it is compiled or tried in place of the first."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import MethodType

import torch
from torch import nn

from llmcache.errors import ConfigError

_HOOKS = frozenset(name for name in vars(nn.Module()) if "_forward_" in name and "_hooks" in name)


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


def make_trial(
    module: nn.Module, replaced: Mapping[nn.Module, nn.Module] | None = None, runs_functions: bool = False
) -> nn.Module:
    """A copy in eval mode that shares nothing but parameters, without anybody's hooks, to be run uncompiled.

    Args:
        module: Not touched.
        replaced: Parts of it that are not copied, and what stands for each in the copy.
        runs_functions: Functions that were put in place of the forward of its parts may be run, though they may call
            the parts of `module`.

    Raises:
        TypeError: A forward was replaced by a function that must not be run.
        Exception: Whatever copying a part's attributes raises.
    """
    trial = _copy(module, (), {id(part): other for part, other in (replaced or {}).items()})
    for part in trial.modules():
        is_own = isinstance(part.__dict__.get("forward"), MethodType | partial | None)  # bound to the copy
        if not is_own and (part is trial or not runs_functions):
            raise TypeError(f"the forward of a {type(part).__name__} was replaced")
        for name, child in part._modules.items():
            part._modules[name] = getattr(child, "_orig_mod", child)  # of what torch.compile() made
    return trial.eval() if module.training else trial


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Within: no gradients and no autocast, and random numbers are as before afterwards."""
    devices = [device] if device.type == "cuda" and torch.cuda.is_available() else []
    plain = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    with torch.no_grad(), plain, torch.random.fork_rng(devices):
        yield


def _copy(module: nn.Module, shared: Iterator[object] | tuple[()], memo: dict[int, object]) -> nn.Module:
    parameters = (one for part in module.modules() for one in part._parameters.values())
    memo |= {id(one): one for one in chain(parameters, shared) if one is not None}
    for part in module.modules():  # what hooks hold on to is not copied
        memo |= {id(hooks): type(hooks)() for name, hooks in vars(part).items() if name in _HOOKS}
    return copy.deepcopy(module, memo)
