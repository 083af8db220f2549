"""State of modules beside parameters, buffers and submodules: settings in attributes, and tensors kept elsewhere.

Settings are numbers, strings, functions and the like (a norm's epsilon, the scaling of attention, an activation), in
attributes of the modules and of their configs. Tensors are found in attributes, and in containers and objects there, in
modules that are not submodules, in attributes of parameters (bitsandbytes' `quant_state`), within tensor subclasses
(torchao), and in the packed weights of torch's quantised modules.

Objects and functions are read recursively. An unreadable value gives a digest that no other process has.

Not detected: edits of globals that functions read, of class attributes but a module's forward, and in numpy arrays.
"""

import copyreg
import functools
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain, starmap
from operator import itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmcache.models.hashing import content, describe, digests, inner_tensors, is_installed, tensors_in, unique_name
from llmcache.models.hooks import Swap

_OF_MODULES = frozenset(vars(nn.Module()))  # torch's own attributes, which are read elsewhere

# Attributes that affect no state: notes about loading, saving, losses, kernels and devices.
_IDLE = frozenset(
    (
        *("_is_hf_initialized", "_output_capturing_hooks_installed", "_hf_hook", "_old_forward", "hf_device_map"),
        *("__reduce_ex__", "_replicate_for_data_parallel", "_compiled_call_impl", "_is_buffer", "persistent"),
        *("name_or_path", "generation_config", "kernel_config", "_use_kernels", "loss_type", "warnings_issued"),
        *("gradient_checkpointing", "_gradient_checkpointing_func", "_attn_implementation", "_weight_conversions"),
        *("all_tied_weights_keys", "_tied_weights_keys", "_no_split_modules", "_skip_keys_device_placement"),
        *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_save"),
        *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"),
        *("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_device_mesh", "tensor_model_parallel"),
        *("peft_config", "_hf_peft_config_loaded"),  # settings that affect states are in PEFT's layers
    )
)
# Config attributes that shape the output, are part of the key already, or concern heads, losses, generation and saving.
_IDLE_IN_CONFIG = frozenset(
    (
        *("return_dict", "use_cache", "architectures", "dtype", "torch_dtype", "model_type", "quantization_config"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("tokenizer_class", "transformers_version", "name_or_path"),
    )
)
_UNREAD: dict[type, frozenset[str]] = {  # by exact class: attributes that its forward does not read
    nn.Linear: frozenset(["in_features", "out_features"]),
    nn.LayerNorm: frozenset(["elementwise_affine"]),
    nn.Embedding: frozenset(["num_embeddings", "embedding_dim", "padding_idx", "scale_grad_by_freq", "sparse"]),
    nn.Dropout: frozenset(["p", "inplace"]),  # in training mode nothing is cached
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# Types that `describe` describes in full.
_DESCRIBED = (
    *(torch.device, torch.Generator, torch.Size, type, np.ndarray, np.generic, Enum, PurePath, slice),
    *(types.BuiltinFunctionType, types.ModuleType, types.CodeType),
)
# Packages whose objects are not read: they affect no state, or refer to the whole program.
_SKIPPED_PACKAGES = (
    *("accelerate", "llmcache", "logging", "threading", "_thread", "weakref", "tokenizers"),
    *("torch._dynamo", "torch._inductor", "torch.amp"),
)
_MANY = 256  # elements; a larger container of settings is not compared in each call
_NO_FIELDS = ("__dict__", "__weakref__")  # slots that are not fields
_DEPTH = 32  # levels of objects and containers that are read


class _Fields:
    """Attributes of an object without a `__dict__`, and the closure of a function, read like a dict."""

    def __init__(self, of: Any, names: Iterable[str], cells: Mapping[str, types.CellType] | None = None) -> None:
        self.of, self.cells = of, cells or {}
        self.names = [*names, *self.cells]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Any:
        return content(self.cells[name]) if name in self.cells else getattr(self.of, name, None)


Space = dict[str, Any] | _Fields


class Attributes:
    """Settings and tensors found in modules, and the means to detect changes quickly."""

    def __init__(self, parts: Mapping[str, nn.Module], known: Iterable[nn.Module], has_values: bool) -> None:
        """Read modules by path, and modules found in them, except `known` ones.

        With `has_values`, numbers, strings and containers of them count, too, not only classes and functions.
        """
        self.parts: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}  # by path, without parameters and buffers
        self.wrapped: dict[int, Tensor] = {}  # outer tensor, by id of the tensor that it wraps
        self.facts: list[str] = []  # descriptions of settings, in no order
        self.unseen = ""  # path of a value that may hold weights and cannot be read
        self.spaces: list[dict[str, Any]] = []  # attributes of modules and objects
        self.kinds: dict[type, str] = {}  # descriptions of module classes
        self._has_values = has_values
        self._known = {id(one): "" for one in known} | {id(one): path for path, one in parts.items()}
        self._alive: list[Any] = []
        self._within: set[int] = set()  # ids of objects and containers that are being read
        self._n_found = 0  # tensors and modules, repeats included
        # By comparison (`same`: by identity; `flat`: by elements; `deep`: by repr) and names of attributes.
        self._groups: dict[tuple[str, tuple[str, ...]], list[Space]] = defaultdict(list)
        self._containers: list[Iterable[Any]] = []
        self._pending = deque(parts.items())
        while self._pending:
            self._read_module(*self._pending.popleft())
        self._getters: dict[str, list[tuple[Callable[[Space], tuple[Any, ...]], list[Space]]]] = defaultdict(list)
        for (kind, names), spaces in self._groups.items():
            names = names * 2 if len(names) == 1 else names  # with one name, itemgetter returns no tuple
            self._getters[kind].append((itemgetter(*names), spaces))

    def state(self) -> tuple[Iterator[Any], Iterator[Any], tuple[Any, ...]]:
        """Return settings and elements of containers of tensors, both compared by identity, and contents, by value."""
        contents: tuple[Any, ...] = ()
        if self._getters["flat"] or self._getters["deep"]:
            flat = (tuple(value.items() if isinstance(value, dict) else value) for value in self._values("flat"))
            contents = (*flat, *map(repr, self._values("deep")))
        return self._values("same"), chain.from_iterable(self._containers), contents

    def _values(self, kind: str) -> Iterator[Any]:
        return chain.from_iterable(chain.from_iterable(starmap(map, self._getters[kind])))

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_module(self, path: str, module: nn.Module) -> None:
        self.parts[path] = module
        self.spaces.append(vars(module))
        if isinstance(module, torch.jit.ScriptModule):
            self.unseen = self.unseen or path
            return
        kind = type(module)
        self.kinds[kind] = self.kinds.get(kind) or describe(kind)
        self.facts.append(f"{path}: {self.kinds[kind]}")
        idle = _IDLE | _OF_MODULES | _UNREAD.get(kind, frozenset())
        if "forward" in vars(module) and _is_class_forward(module, vars(module)["forward"]):
            idle |= {"forward"}
            self._groups["same", ("forward",)].append(vars(module))  # affects no state until it is replaced
        names = [name for name in vars(module) if name not in idle and not _is_recomputed(module, name)]
        self._read(path, vars(module), names)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self._read_tensor(f"{path}.{name}", tensor)

    def _read(self, path: str, space: Space, names: Iterable[str]) -> None:
        """Read attributes, and add them to the values that `state` returns."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if kind := self._read_value(f"{path}.{name}", name, space[name]):
                kinds[kind].append(name)
        for kind, alike in kinds.items():
            self._groups[kind, tuple(alike)].append(space)

    def _read_value(self, path: str, name: str, value: Any) -> str:
        """Read an attribute; return its comparison (see `_groups`), or "" if it does not count."""
        value = value.original if isinstance(value, Swap) else value
        if (name == "config" or hasattr(type(value), "model_type")) and hasattr(value, "__dict__"):
            self._read_config(path, value)
            return "same"
        if name == "forward" and not isinstance(value, nn.Module):
            self._search_wrapper(path, value)
            self.facts.append(f"{path}={describe(value)}")
            return "same"
        has_tensors = self._search(path, value)
        if not (has_tensors or self._has_values) and isinstance(value, (*_PLAIN, *_CONTAINERS, np.ndarray)):
            return ""
        if not isinstance(value, torch.device):
            self.facts.append(f"{path}={describe(value)}")
        if isinstance(value, list | dict | set | deque) and not has_tensors and len(value) <= _MANY:
            of = chain(value.keys(), value.values()) if isinstance(value, dict) else value
            return "flat" if all(isinstance(one, _PLAIN) for one in of) else "deep"
        return "same"

    def _read_config(self, path: str, config: Any) -> None:
        """Read the settings of a config, once for all modules that share it."""
        if id(config) in self._known or not self._has_values:
            return
        self._known[id(config)] = path
        space = vars(config)
        self.spaces.append(space)
        # Flags for outputs and the name of the attention implementation are checked elsewhere.
        names = [name for name in space if not (name.startswith(("_", "output_")) or name in _IDLE_IN_CONFIG)]
        for name in names:
            if hasattr(space[name], "model_type"):
                self._read_config(f"{path}.{name}", space[name])
        self._read(path, space, [name for name in names if isinstance(space[name], (*_PLAIN, list, tuple, dict))])

    def _read_tensor(self, path: str, tensor: Any) -> None:
        """Read a tensor's attributes and the tensors that it wraps."""
        for name, inner in inner_tensors(tensor).items():
            self.facts.append(f"{path}: {describe(type(tensor))} {describe(tensor.__tensor_flatten__()[1])}")
            self.wrapped[id(inner)] = tensor  # only the outer tensor counts edits
            self._add(f"{path}.{name}", inner)
        # torch.compile() sets attributes of its own on tensors.
        if more := [name for name in vars(tensor) if name not in _IDLE and not name.startswith("_dynamo_")]:
            self._read(path, vars(tensor), more)

    def _search(self, path: str, value: Any) -> bool:
        """Read tensors, packed weights, modules and objects at any depth; return whether to compare by identity."""
        if isinstance(value, (*_PLAIN, *_DESCRIBED)) or type(value).__module__.startswith(_SKIPPED_PACKAGES):
            return False
        self._n_found += isinstance(value, (Tensor, torch.ScriptObject, nn.Module))
        if isinstance(value, Tensor):
            self._add(path, value)
        elif isinstance(value, torch.ScriptObject):
            self._unpack(path, value)
        elif isinstance(value, nn.Module):
            self._queue_module(path, value)
        elif id(value) in self._within or len(self._within) > _DEPTH:
            self.facts.append(f"{path} {unique_name(value)}")
        else:
            search = self._search_all if isinstance(value, _CONTAINERS) else self._search_object
            self._within.add(id(value))
            is_held = search(path, value)
            self._within.remove(id(value))
            return is_held
        return True

    def _search_wrapper(self, path: str, forward: Any) -> None:
        """Read tensors in the closure of a foreign forward, but no objects: they may count or record calls."""
        for space in _spaces_of(forward):
            for name in space:
                if isinstance(value := space[name], Tensor):
                    self._add(f"{path}.{name}", value)
                elif isinstance(value, types.FunctionType | functools.partial) and self._is_new(path, value):
                    self._search_wrapper(f"{path}.{name}", value)

    def _search_all(self, path: str, value: Any) -> bool:
        """Read a container; return as `_search` does."""
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found = [self._search(f"{path}.{name}", element) for name, element in pairs]
        if any(found) and not isinstance(value, tuple | frozenset):
            self._containers.append(value.values() if isinstance(value, dict) else value)
        if hasattr(value, "__dict__"):  # a user's own container class
            self.facts.append(f"{path}: {describe(type(value))}")
            self._read(path, vars(value), list(vars(value)))
        return any(found)

    def _search_object(self, path: str, value: Any) -> bool:
        """Read an object or a function, except its class or code, which `describe` covers; return as `_search` does."""
        if not self._is_new(path, value):
            return self._has_values
        n_before = self._n_found
        for space in _spaces_of(value):
            if isinstance(space, dict):
                self.spaces.append(space)
            self._read(path, space, list(space))
        return self._has_values or self._n_found > n_before

    def _add(self, path: str, tensor: Tensor) -> None:
        if self._is_new(path, tensor):
            self.tensors[path] = tensor
            self._read_tensor(path, tensor)

    def _queue_module(self, path: str, module: nn.Module) -> None:
        """Queue a module that is not a submodule of the known ones, and its submodules."""
        for name, part in module.named_modules():
            if self._is_new(f"{path}.{name}", part):
                self._pending.append((f"{path}.{name}", part))
            elif part is module:
                break

    def _is_new(self, path: str, value: Any) -> bool:
        """Whether a value is met for the first time; if not, its first path is added to the facts."""
        if id(value) in self._known:
            self.facts.append(f"{path} is {self._known[id(value)]}")
            return False
        self._known[id(value)] = path
        self._alive.append(value)  # so that its id is not reused
        return True

    def _unpack(self, path: str, packed: Any) -> None:
        """Read torch's packed weights. They never change, except the bias, a shared tensor."""
        if id(packed) in self._known:
            return
        self._known[id(packed)] = path
        if "torch.classes.quantized." not in str(packed._type()):  # other types may change undetected
            self.unseen = self.unseen or path
            return
        for number, tensor in enumerate(tensors_in(packed.__getstate__())):
            if tensor.ndim > 1:
                self.facts.append(f"{path}.{number}={digests([tensor])[0]}")
            else:
                self._add(f"{path}.{number}", tensor)


def _spaces_of(value: Any) -> Iterator[Space]:
    """Yield the dicts and slots that hold an object's attributes, and a function's closure and defaults."""
    if isinstance(value, types.FunctionType):
        if value.__closure__ or not is_installed(value):
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            yield _Fields(value, ("__defaults__", "__kwdefaults__", "__code__"), cells)
    elif isinstance(value, types.MethodType):
        yield _Fields(value, ("__self__", "__func__"))
    elif isinstance(value, functools.partial):
        yield _Fields(value, ("func", "args", "keywords"))
    else:
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if name not in _NO_FIELDS]
        if slots:
            yield _Fields(value, slots)
        if hasattr(value, "__dict__"):
            yield vars(value)
        elif not slots:  # a C type
            yield {"state": _state_of(value)}


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    return [f"_{kind.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name for name in names]


def _state_of(value: Any) -> Any:
    """Return an object's state as pickle reads it; a unique name if it cannot be pickled."""
    reduce: Any = copyreg.dispatch_table.get(type(value))
    try:
        return value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # may be of any type
        return unique_name(value)


def _is_recomputed(module: nn.Module, name: str) -> bool:
    """Whether pruning or weight normalisation recomputes an attribute in each call from watched parameters."""
    return f"{name}_orig" in module._parameters or {f"{name}_g", f"{name}_v"} <= module._parameters.keys()


def _is_class_forward(module: nn.Module, forward: Any) -> bool:
    """Whether a forward in a module's `__dict__` is its class's, perhaps within our swaps."""
    while isinstance(forward, Swap):  # a sentence-transformers model has two
        forward = forward.original
    return getattr(forward, "__func__", None) is type(module).forward
