"""PEFT's layers, recognised by their attributes: which adapters are active, and which attributes belong to others.

An inactive adapter affects no state, so it is left out of digests: other adapters may be added or removed beside the
active one. A layer without an active adapter counts as the layer that it wraps, by its path.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from llmcache.models.hashing import describe

# Attributes about all adapters: which exist, which are active, and where they are kept.
_SHARED_ATTRIBUTES = ("_active_adapter", "_disable_adapters", "_adapters", "adapter_layer_names", "other_param_names")
_OFFSETS = "alora_offsets"
_BASES = ("base_layer", "original_module")  # what a layer wraps


class Tuner:
    """A snapshot of one layer with adapters."""

    def __init__(self, path: str, module: Any, is_off: bool = False) -> None:
        """Take the snapshot, with no adapter active if `is_off`; names of tensors and facts begin with `path`."""
        self.path, self.module = path, module
        self.merged = str(getattr(module, "merged_adapters", None))
        self.tensors = tuple(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
        held = _by_adapter(module)
        keys = {key for kept in held.values() for key in kept}
        enabled = [] if is_off or module.disable_adapters else list(getattr(module, "active_adapters", ()))
        self.active = active = [key for key in enabled if key in keys]
        #: Whether it is what it wraps before the columns that an activated LoRA applies to.
        self.is_activated = all(_is_activated(module, key) for key in active)
        idle = [f"{path}.{name}.{key}" for name, kept in held.items() for key in kept if key not in active]
        #: Prefixes of a digest's lines about inactive adapters, or about all adapters.
        self.left_out = (
            *(f"{one}{end}" for one in idle for end in ".:="),
            *(f"{path}.{name}=" for name in _SHARED_ATTRIBUTES),
            *(f"{path}.{name}{end}" for name in held for end in ("=", "._keys=")),
        )
        base = next((name for name in _BASES if name in module._modules), None)
        is_idle = base and not (active or getattr(module, "merged_adapters", None)) and _is_of_peft(module)
        #: Path of the layer that stands for this one, none of whose adapters is active; "" if one is, or was merged.
        self.base = f"{path}.{base}" if is_idle else ""
        if is_idle:
            names = (name for name in (*vars(module), *module._modules, *module._buffers) if name != base)
            self.left_out = (f"{path}:", *(f"{path}.{name}{end}" for name in names for end in ".:= "))
        dicts = ((name, kept) for name, kept in held.items() if isinstance(kept, dict))
        used = {name: own for name, kept in dicts if (own := {key: kept[key] for key in active if key in kept})}
        #: Lines that replace those about all adapters.
        self.facts = [] if is_idle else [f"{path}: {describe(active)} {describe(used)}"]


def _is_activated(module: Any, key: str) -> bool:
    """Whether an adapter of a layer is an activated LoRA, and no adapter is merged into the layer."""
    variant = getattr(module, "lora_variant", {}).get(key)
    return type(variant).__name__ == "ALoraLinearVariant" and not module.merged_adapters


def is_tuner(part: nn.Module) -> bool:
    """Whether a module is a PEFT layer: on whole models `disable_adapters` is a method of transformers."""
    return isinstance(getattr(part, "disable_adapters", None), bool)


def _is_of_peft(module: nn.Module) -> bool:
    """Whether a module runs PEFT's own forward, which is that of the layer it wraps if no adapter is active."""
    forward = vars(module).get("forward", type(module).forward)
    has_names = bool(getattr(module, "adapter_layer_names", ()))  # of attributes that hold a value per adapter
    return has_names and all(str(getattr(one, "__module__", "")).startswith("peft.") for one in (type(module), forward))


def without(line: str, bases: Iterable[str]) -> str:
    """Return a digest's line in which each of these paths is named by the layer around it."""
    if any(name in line for name in _BASES):
        for base in bases:
            line = line.replace(base, base.rpartition(".")[0])
    return line


def are_by_row(hooks: Iterable[Mapping[int, Any]]) -> bool:
    """Whether hooks of PEFT on its layers choose an adapter for each row."""
    every = [hook for held in hooks if held for hook in held.values()]
    offsets = {id(hook.keywords[_OFFSETS]) for hook in every if is_activation(hook)}
    return len(offsets) > 1 or not all(map(is_activation, every))


def activated(hooks: Iterable[Mapping[int, Any]]) -> Sequence[int | None] | None:
    """Return to how many last columns of each row an activated LoRA applies (None: to none); None without one."""
    every = (hook for held in hooks if held for hook in held.values())
    return next((hook.keywords[_OFFSETS] for hook in every if is_activation(hook)), None)


def is_activation(hook: Any) -> bool:
    """Whether a hook passes the offsets of an activated LoRA to a layer."""
    return isinstance(hook, partial) and set(hook.keywords) == {_OFFSETS}


def _by_adapter(module: Any) -> dict[str, Any]:
    """Return the attributes of a layer that hold a value per adapter, by name."""
    declared = {*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())}
    by_adapter = {name: kept for name in declared if hasattr(kept := _get(module, name), "keys")}
    names = {key for kept in by_adapter.values() for key in kept}
    for name, kept in (*vars(module).items(), *module._modules.items()):
        if hasattr(kept, "keys") and name not in by_adapter and names.issuperset(kept.keys()):
            by_adapter[name] = kept
    return by_adapter


def _get(module: Any, path: str) -> Any:
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None
