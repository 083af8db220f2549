"""PEFT's layers, recognised by their attributes: which adapters are in force, and what belongs to others.

What belongs to an adapter that is not in force decides no state, so it is no part of a digest: adapters may come and go
beside the one that is used.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from llmcache.models.hashing import describe

# Attributes that tell of all adapters: which there are, which are in force, and where they are kept.
_OF_ALL = ("_active_adapter", "_disable_adapters", "_adapters", "adapter_layer_names", "other_param_names")
_OFFSETS = "alora_offsets"


class Tuner:
    """One layer that adapters were put on, as it is when this is made."""

    def __init__(self, path: str, module: Any) -> None:
        """Take note of it; `path` begins the names of its tensors and the facts about it."""
        self.module = module
        self.merged = str(getattr(module, "merged_adapters", None))
        self.tensors = tuple(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
        active = [] if module.disable_adapters else list(getattr(module, "active_adapters", ()))
        held = dict(_by_adapter(module))
        idle = [f"{path}.{name}.{key}" for name, kept in held.items() for key in kept if key not in active]
        #: How lines of a digest begin that are about adapters which are not in force, or about all of them.
        self.left_out = (
            *(f"{one}{end}" for one in idle for end in ".:="),
            *(f"{path}.{name}=" for name in _OF_ALL),
            *(f"{path}.{name}{end}" for name in held for end in ("=", "._keys=")),
        )
        ours = {
            name: {key: kept[key] for key in active if key in kept}
            for name, kept in held.items()
            if isinstance(kept, dict)
        }
        #: Lines that stand for the latter.
        self.facts = [f"{path}: {describe(active)} {describe({name: kept for name, kept in ours.items() if kept})}"]


def is_tuner(part: nn.Module) -> bool:
    """Whether a module is a layer of PEFT's: on whole models transformers has a method of the same name."""
    return isinstance(getattr(part, "disable_adapters", None), bool)


def are_by_row(hooks: Iterable[Mapping[int, Any]]) -> bool:
    """Whether PEFT, by hooks that it hung on its layers, has each row computed with an adapter of its own."""
    found = [hook for held in hooks if held for hook in held.values()]
    offsets = {id(hook.keywords[_OFFSETS]) for hook in found if is_activation(hook)}
    return len(offsets) > 1 or not all(map(is_activation, found))


def activated(hooks: Iterable[Mapping[int, Any]]) -> Sequence[int | None] | None:
    """For how many of each row's last columns an activated LoRA is in force (None: for none); None without one."""
    found = (hook for held in hooks if held for hook in held.values())
    return next((hook.keywords[_OFFSETS] for hook in found if is_activation(hook)), None)


def is_activation(hook: Any) -> bool:
    """Whether a hook hands the offsets of an activated LoRA to a layer."""
    return isinstance(hook, partial) and set(hook.keywords) == {_OFFSETS}


def _by_adapter(module: Any) -> Iterator[tuple[str, Any]]:
    """What a layer keeps by the name of the adapter, by the attribute's name."""
    declared = {*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())}
    found = {name: kept for name in declared if hasattr(kept := _get(module, name), "keys")}
    names = {key for kept in found.values() for key in kept}
    for name, kept in (*vars(module).items(), *module._modules.items()):
        if hasattr(kept, "keys") and name not in found and len(kept) and names.issuperset(kept.keys()):
            found[name] = kept
    return iter(found.items())


def _get(module: Any, path: str) -> Any:
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None
