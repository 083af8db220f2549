"""What modules hold beside parameters, buffers and submodules: settings in attributes, and tensors kept elsewhere.

Settings are numbers, strings, functions and the like (a norm's epsilon, the scaling of attention, an activation), in
the modules' own attributes and in their config's. Tensors kept elsewhere are those in plain attributes, in lists, dicts
and objects there, in modules that are no submodules, in attributes of parameters (bitsandbytes' `quant_state`), within
tensor subclasses (torchao), and the packed ones of torch's quantised modules.

Objects and functions are looked into: their attributes and slots, what they close over, what they are bound to. What
cannot be looked into makes a digest that no other process has.

Not seen: edits of what functions read from globals, of attributes of classes but forwards of modules', and of numpy
arrays in place.
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

from llmcache.models.hashing import content, describe, digests, inner_tensors, is_installed, unlike_any_other
from llmcache.models.hooks import Swap

_OF_MODULES = frozenset(vars(nn.Module()))  # torch's own, which is looked at elsewhere

# Attributes that decide no state: notes about loading, saving, losses, kernels and places.
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
        "peft_config",  # what of it decides states is in PEFT's layers
    )
)
# Of configs: what shapes the output, is part of the key already, or belongs to heads, losses, generation and saving.
_IDLE_IN_CONFIG = frozenset(
    (
        *("return_dict", "use_cache", "architectures", "dtype", "torch_dtype", "model_type", "quantization_config"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("tokenizer_class", "transformers_version", "name_or_path"),
    )
)
_UNREAD: dict[type, frozenset[str]] = {  # by exact class: what its forward does not read
    nn.Linear: frozenset(["in_features", "out_features"]),
    nn.LayerNorm: frozenset(["elementwise_affine"]),
    nn.Embedding: frozenset(["num_embeddings", "embedding_dim", "padding_idx", "scale_grad_by_freq", "sparse"]),
    nn.Dropout: frozenset(["p", "inplace"]),  # in training mode nothing is cached
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# What `describe` tells all of that counts.
_TOLD = (
    *(torch.device, torch.Generator, torch.Size, type, np.ndarray, np.generic, Enum, PurePath, slice),
    *(types.BuiltinFunctionType, types.ModuleType, types.CodeType),
)
# Of whose classes objects are not looked into: they decide nothing, or hang together with the whole program.
_STRANGERS = (
    *("accelerate", "llmcache", "logging", "threading", "_thread", "weakref", "tokenizers"),
    *("torch._dynamo", "torch._inductor", "torch.amp"),
)
_MANY = 256  # elements, from which on a container of settings is not compared in each call
_HOMES = ("__dict__", "__weakref__")  # among slots
_DEPTH = 32  # of objects and containers that are looked into


class _Fields:
    """Attributes of an object that are in no dict, and what a function closes over, as if they were in one."""

    def __init__(self, of: Any, names: Iterable[str], cells: Mapping[str, types.CellType] | None = None) -> None:
        self.of, self.cells = of, cells or {}
        self.names = [*names, *self.cells]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Any:
        return content(self.cells[name]) if name in self.cells else getattr(self.of, name, None)


Space = dict[str, Any] | _Fields


class Attributes:
    """What was found in modules, and how to tell quickly whether it is the same still."""

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        known: Iterable[nn.Module] = (),
        has_values: bool = True,
    ) -> None:
        """Look at modules by path, and at those found with them, but for `known` ones.

        With `has_values` numbers, strings and containers of them count, too, not only classes and functions.
        """
        self.parts: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}  # by path; not those of parameters and buffers
        self.wrapped: dict[int, Tensor] = {}  # by id of a tensor found within another one: that one
        self.facts: list[str] = []  # what settings are, in no order
        self.unseen = ""  # path of something that may hold weights and cannot be read
        self.spaces: list[dict[str, Any]] = []  # attributes of modules and objects
        self.kinds: dict[type, str] = {}  # of modules
        self._has_values = has_values
        self._known = {id(one): "" for one in known} | {id(one): path for path, one in parts.items()}
        self._alive: list[Any] = []
        self._within: set[int] = set()  # ids of what is being looked into
        self._n_found = 0  # tensors and modules, each as often as it was met
        # By how attributes are compared (`same`: by identity; `flat`: by elements; `deep`: by repr), and their names.
        self._groups: dict[tuple[str, tuple[str, ...]], list[Space]] = defaultdict(list)
        self._containers: list[Iterable[Any]] = []
        self._pending = deque(parts.items())
        while self._pending:
            self._read_module(*self._pending.popleft())
        self._getters: dict[str, list[tuple[Callable[[Space], tuple[Any, ...]], list[Space]]]] = defaultdict(list)
        for (kind, names), spaces in self._groups.items():
            names = names * 2 if len(names) == 1 else names  # of a single one itemgetter returns no tuple
            self._getters[kind].append((itemgetter(*names), spaces))

    def state(self) -> tuple[Iterator[Any], Iterator[Any], tuple[Any, ...]]:
        """Settings and what containers of tensors hold, compared by identity; contents, compared by value."""
        contents: tuple[Any, ...] = ()
        if self._getters["flat"] or self._getters["deep"]:
            flat = (tuple(value.items() if isinstance(value, dict) else value) for value in self._values("flat"))
            contents = (*flat, *map(repr, self._values("deep")))
        return self._values("same"), chain.from_iterable(self._containers), contents

    def _values(self, kind: str) -> Iterator[Any]:
        return chain.from_iterable(chain.from_iterable(starmap(map, self._getters[kind])))

    # -- what is read --------------------------------------------------------------------------------------------------

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
        if "forward" in vars(module) and _is_own(module, vars(module)["forward"]):
            idle |= {"forward"}
            self._groups["same", ("forward",)].append(vars(module))  # decides nothing until it is replaced
        names = [name for name in vars(module) if name not in idle and not _is_made(module, name)]
        self._read(path, vars(module), names)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self._read_tensor(f"{path}.{name}", tensor)

    def _read(self, path: str, space: Space, names: Iterable[str]) -> None:
        """Take in attributes, and compare them from now on."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if kind := self._take(f"{path}.{name}", name, space[name]):
                kinds[kind].append(name)
        for kind, alike in kinds.items():
            self._groups[kind, tuple(alike)].append(space)

    def _take(self, path: str, name: str, value: Any) -> str:
        """Take in an attribute; returns how it is compared, or "" where it does not count."""
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
        """Take in the settings of a config, once for all modules that share it."""
        if id(config) in self._known or not self._has_values:
            return
        self._known[id(config)] = path
        space = vars(config)
        self.spaces.append(space)
        # Other checks look at flags for the output, and at the name of the attention implementation.
        names = [name for name in space if not (name.startswith(("_", "output_")) or name in _IDLE_IN_CONFIG)]
        for name in names:
            if hasattr(space[name], "model_type"):
                self._read_config(f"{path}.{name}", space[name])
        self._read(path, space, [name for name in names if isinstance(space[name], (*_PLAIN, list, tuple, dict))])

    def _read_tensor(self, path: str, tensor: Any) -> None:
        """Take in what hangs on a tensor, or is wrapped by it."""
        for name, inner in inner_tensors(tensor).items():
            self.facts.append(f"{path}: {describe(type(tensor))} {describe(tensor.__tensor_flatten__()[1])}")
            self.wrapped[id(inner)] = tensor  # edits count on the outside alone
            self._add(f"{path}.{name}", inner)
        # torch.compile() leaves notes of its own on tensors.
        if more := [name for name in vars(tensor) if name not in _IDLE and not name.startswith("_dynamo_")]:
            self._read(path, vars(tensor), more)

    def _search(self, path: str, value: Any) -> bool:
        """Take in tensors, packed ones, modules and objects wherever they are kept; whether to compare by identity."""
        if isinstance(value, (*_PLAIN, *_TOLD)) or type(value).__module__.startswith(_STRANGERS):
            return False
        self._n_found += isinstance(value, (Tensor, torch.ScriptObject, nn.Module))
        if isinstance(value, Tensor):
            self._add(path, value)
        elif isinstance(value, torch.ScriptObject):
            self._unpack(path, value)
        elif isinstance(value, nn.Module):
            self._adopt(path, value)
        elif id(value) in self._within or len(self._within) > _DEPTH:
            self.facts.append(f"{path} {unlike_any_other(value)}")
        else:
            search = self._search_all if isinstance(value, _CONTAINERS) else self._search_object
            self._within.add(id(value))
            is_held = search(path, value)
            self._within.remove(id(value))
            return is_held
        return True

    def _search_wrapper(self, path: str, forward: Any) -> None:
        """Take in tensors that somebody's forward closes over, and no object: it may be one that counts or records."""
        for space in _spaces_of(forward):
            for name in space:
                if isinstance(value := space[name], Tensor):
                    self._add(f"{path}.{name}", value)
                elif isinstance(value, types.FunctionType | functools.partial) and self._is_new(path, value):
                    self._search_wrapper(f"{path}.{name}", value)

    def _search_all(self, path: str, value: Any) -> bool:
        """Look into a container."""
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found = [self._search(f"{path}.{name}", element) for name, element in pairs]
        if any(found) and not isinstance(value, tuple | frozenset):
            self._containers.append(value.values() if isinstance(value, dict) else value)
        if hasattr(value, "__dict__"):  # of a class of somebody's own
            self.facts.append(f"{path}: {describe(type(value))}")
            self._read(path, vars(value), list(vars(value)))
        return any(found)

    def _search_object(self, path: str, value: Any) -> bool:
        """Look into an object or a function. What class or code it is of is told elsewhere."""
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

    def _adopt(self, path: str, module: nn.Module) -> None:
        """Look at a module that is no submodule of those known, and at its submodules."""
        for name, part in module.named_modules():
            if self._is_new(f"{path}.{name}", part):
                self._pending.append((f"{path}.{name}", part))
            elif part is module:
                break

    def _is_new(self, path: str, value: Any) -> bool:
        """Whether something is met for the first time; of what is met again it counts where it was met before."""
        if id(value) in self._known:
            self.facts.append(f"{path} is {self._known[id(value)]}")
            return False
        self._known[id(value)] = path
        self._alive.append(value)  # an id must not come again
        return True

    def _unpack(self, path: str, packed: Any) -> None:
        """Take in torch's packed weights. They never change but for the bias, a tensor that is shared."""
        if id(packed) in self._known:
            return
        self._known[id(packed)] = path
        if "torch.classes.quantized." not in str(packed._type()):  # others may change without trace
            self.unseen = self.unseen or path
            return
        for number, tensor in enumerate(_tensors_of(packed.__getstate__())):
            if tensor.ndim > 1:
                self.facts.append(f"{path}.{number}={digests([tensor])[0]}")
            else:
                self._add(f"{path}.{number}", tensor)


def _spaces_of(value: Any) -> Iterator[Space]:
    """Where an object keeps what it is made of."""
    if isinstance(value, types.FunctionType):
        if value.__closure__ or not is_installed(value):
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            yield _Fields(value, ("__defaults__", "__kwdefaults__", "__code__"), cells)
    elif isinstance(value, types.MethodType):
        yield _Fields(value, ("__self__", "__func__"))
    elif isinstance(value, functools.partial):
        yield _Fields(value, ("func", "args", "keywords"))
    else:
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if name not in _HOMES]
        if slots:
            yield _Fields(value, slots)
        if hasattr(value, "__dict__"):
            yield vars(value)
        elif not slots:  # made by C
            yield {"state": _state_of(value)}


def _slots_of(kind: type) -> list[str]:
    named = vars(kind).get("__slots__", ())
    names = [named] if isinstance(named, str) else list(named)
    return [f"_{kind.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name for name in names]


def _state_of(value: Any) -> Any:
    """What a pickle would hold of an object; else a name that no other one has."""
    reduce: Any = copyreg.dispatch_table.get(type(value))
    try:
        return value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # whatever it raises
        return unlike_any_other(value)


def _is_made(module: nn.Module, name: str) -> bool:
    """Whether pruning or weight normalisation makes an attribute anew in each call, of parameters that are watched."""
    return f"{name}_orig" in module._parameters or {f"{name}_g", f"{name}_v"} <= module._parameters.keys()


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether a forward among a module's attributes is its class's, maybe with swaps of ours around it."""
    while isinstance(forward, Swap):  # a sentence-transformers model has two of them
        forward = forward.original
    return getattr(forward, "__func__", None) is type(module).forward


def _tensors_of(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _tensors_of(part)
