"""What modules hold beside parameters, buffers and submodules: settings in attributes, and tensors kept elsewhere.

Settings are numbers, strings, functions and the like (a norm's epsilon, the scaling of attention, an activation), in
the modules' own attributes and in their config's. Tensors kept elsewhere are those in plain attributes, in lists, dicts
and objects there, in modules that are no submodules, in attributes of parameters (bitsandbytes' `quant_state`), within
tensor subclasses (torchao), and the packed ones of torch's quantised modules.

Not seen: what functions read from globals, attributes of classes, settings within objects that are neither modules nor
configs, and edits to numpy arrays in place.
"""

import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmcache.models.hashing import describe, digests, inner_tensors
from llmcache.models.hooks import Swap

_OF_MODULES = frozenset(vars(nn.Module()))  # torch's own, which is looked at elsewhere

# Attributes that decide no state: notes of transformers and accelerate about loading, saving, losses and places.
_IDLE = frozenset(
    [
        "_is_hf_initialized",
        "_output_capturing_hooks_installed",
        "_hf_hook",
        "_old_forward",
        "__reduce_ex__",
        "_replicate_for_data_parallel",
        "hf_device_map",
        "name_or_path",
        "generation_config",
        "kernel_config",
        "loss_type",
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "warnings_issued",
        "all_tied_weights_keys",
        "_tied_weights_keys",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
        "_keys_to_ignore_on_load_missing",
        "_no_split_modules",
        "_keys_to_ignore_on_load_unexpected",
        "_keys_to_ignore_on_save",
        "_skip_keys_device_placement",
        "_tp_plan",
        "_ep_plan",
        "_pp_plan",
        "_fsdp_plan",
        "_tp_size",
        "_device_mesh",
        "_attn_implementation",
        "_compiled_call_impl",
        "_use_kernels",
        "_weight_conversions",
        "_is_buffer",
        "persistent",
        "tensor_model_parallel",
    ]
)
# Of configs: what shapes the output, is part of the key already, or belongs to heads, losses, generation and saving.
_IDLE_IN_CONFIG = frozenset(
    [
        "return_dict",
        "use_cache",
        "architectures",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "tokenizer_class",
        "model_type",
        "transformers_version",
        "name_or_path",
        "finetuning_task",
        "task_specific_params",
        "quantization_config",
    ]
)
_UNREAD: dict[type, frozenset[str]] = {  # by exact class: what its forward does not read
    nn.Linear: frozenset(["in_features", "out_features"]),
    nn.LayerNorm: frozenset(["elementwise_affine"]),
    nn.Embedding: frozenset(["num_embeddings", "embedding_dim", "padding_idx", "scale_grad_by_freq", "sparse"]),
    nn.Dropout: frozenset(["p", "inplace"]),  # in training mode nothing is cached
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_WITHOUT_TENSORS = (
    *(torch.device, torch.Generator, type, np.ndarray, np.generic),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
_STRANGERS = ("accelerate", "llmcache", "logging", "threading", "_thread", "weakref", "tokenizers")
_KINDS = ("same", "flat", "deep")  # how attributes are compared: by identity, by elements, by what they print as
_MANY = 256  # elements, from which on a container of settings is not compared in each call
_DEPTH = 4  # of objects and containers in which tensors are looked for

Space = dict[str, Any]


class Attributes:
    """What was found in modules, and how to tell quickly whether it is the same still."""

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        known: Iterable[nn.Module] = (),
        has_values: bool = True,
    ) -> None:
        """Look at modules, and at those found with them.

        Args:
            parts: By path.
            known: Not to be looked at where they turn up.
            has_values: Numbers, strings and containers of them count, too, not only classes and functions.
        """
        self.parts: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}  # by path; not those of parameters and buffers
        self.wrapped: dict[int, Tensor] = {}  # by id of a tensor found within another one: that one
        self.facts: list[str] = []  # what settings are, in no order
        self.unseen = ""  # path of something that may hold weights and cannot be read
        self.spaces: list[Space] = []  # attributes of modules
        self._has_values = has_values
        self._known = {*map(id, known), *map(id, parts.values())}
        self._groups: dict[tuple[str, tuple[str, ...]], list[Space]] = defaultdict(list)
        self._containers: list[Iterable[Any]] = []
        self._pending = deque(parts.items())
        while self._pending:
            self._read_module(*self._pending.popleft())
        self._getters = {kind: self._make_getters(kind) for kind in _KINDS}

    def settings(self) -> tuple[Any, ...]:
        """What the attributes are now, to be compared by identity."""
        return tuple(chain.from_iterable(chain.from_iterable(map(*get)) for get in self._getters["same"]))

    def held(self) -> Iterator[Any]:
        """What containers hold that hold tensors, likewise."""
        return chain.from_iterable(self._containers)

    def contents(self) -> tuple[Any, ...]:
        """What containers of settings hold now, to be compared by value."""
        flat = (_freeze(value) for get in self._getters["flat"] for values in map(*get) for value in values)
        deep = (repr(value) for get in self._getters["deep"] for values in map(*get) for value in values)
        return (*flat, *deep)

    def _make_getters(self, kind: str) -> list[tuple[Callable[[Space], tuple[Any, ...]], list[Space]]]:
        groups = ((names, spaces) for (of, names), spaces in self._groups.items() if of == kind)
        return [(itemgetter(*_twice(names)), spaces) for names, spaces in groups]

    # -- what is read --------------------------------------------------------------------------------------------------

    def _read_module(self, path: str, module: nn.Module) -> None:
        self.parts[path] = module
        self.spaces.append(vars(module))
        self.facts.append(f"{path}: {describe(type(module))}")
        if isinstance(module, torch.jit.ScriptModule):
            self.unseen = self.unseen or path
            return
        idle = _IDLE | _OF_MODULES | _UNREAD.get(type(module), frozenset())
        if "forward" in vars(module) and _is_own(module, vars(module)["forward"]):
            idle |= {"forward"}
        self._read(
            path, vars(module), [name for name in vars(module) if name not in idle and not _is_made(module, name)]
        )
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
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
        if name == "config" and hasattr(value, "__dict__"):
            self._read_config(path, value)
            return "same"
        has_tensors = self._search(path, value, 0)
        if not (has_tensors or self._has_values) and isinstance(value, (*_PLAIN, list, tuple, dict, set, np.ndarray)):
            return ""
        if not isinstance(value, torch.device):
            self.facts.append(f"{path}={describe(value)}")
        if isinstance(value, list | dict | set) and not has_tensors and len(value) <= _MANY:
            of = chain(value.keys(), value.values()) if isinstance(value, dict) else value
            return "flat" if all(isinstance(one, _PLAIN) for one in of) else "deep"
        return "same"

    def _read_config(self, path: str, config: Any) -> None:
        """Take in the settings of a config, once for all modules that share it."""
        if id(config) in self._known or not self._has_values:
            return
        self._known.add(id(config))
        space = vars(config)
        self.spaces.append(space)
        names = [name for name in space if _counts_in_config(name)]
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

    def _search(self, path: str, value: Any, depth: int) -> bool:
        """Take in tensors, packed ones and modules wherever they are kept; whether there are any."""
        if isinstance(value, (*_PLAIN, *_WITHOUT_TENSORS)) or depth > _DEPTH:
            return False
        if isinstance(value, Tensor):
            self._add(path, value)
            return True
        if isinstance(value, torch.ScriptObject):
            self._unpack(path, value)
            return True
        if isinstance(value, nn.Module):
            self._adopt(path, value)
            return True
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._search_all(path, value, depth)
        return self._search_object(path, value, depth)

    def _search_all(self, path: str, value: Any, depth: int) -> bool:
        elements = value.values() if isinstance(value, dict) else value
        names = value if isinstance(value, dict) else range(len(value))
        pairs = zip(names, elements, strict=True)
        found = [self._search(f"{path}.{name}", element, depth + 1) for name, element in pairs]
        if any(found) and not isinstance(value, tuple | frozenset):
            self._containers.append(elements)
        return any(found)

    def _search_object(self, path: str, value: Any, depth: int) -> bool:
        space = getattr(value, "__dict__", None)
        if id(value) in self._known or not isinstance(space, dict) or type(value).__module__.startswith(_STRANGERS):
            return False
        self._known.add(id(value))
        found = [name for name, inner in space.items() if self._search(f"{path}.{name}", inner, depth + 1)]
        if found:
            self._groups["same", tuple(found)].append(space)
        return bool(found)

    def _add(self, path: str, tensor: Tensor) -> None:
        if id(tensor) not in self._known:
            self._known.add(id(tensor))
            self.tensors[path] = tensor
            self._read_tensor(path, tensor)

    def _adopt(self, path: str, module: nn.Module) -> None:
        """Look at a module that is no submodule of those known, and at its submodules."""
        for name, part in module.named_modules():
            if id(part) not in self._known:
                self._known.add(id(part))
                self._pending.append((f"{path}.{name}", part))

    def _unpack(self, path: str, packed: Any) -> None:
        """Take in torch's packed weights. They never change but for the bias, a tensor that is shared."""
        if id(packed) in self._known:
            return
        self._known.add(id(packed))
        if "torch.classes.quantized." not in str(packed._type()):  # others may change without trace
            self.unseen = self.unseen or path
            return
        for number, tensor in enumerate(_tensors_of(packed.__getstate__())):
            if tensor.ndim > 1:
                self.facts.append(f"{path}.{number}={digests([tensor])[0]}")
            else:
                self._add(f"{path}.{number}", tensor)


def _is_made(module: nn.Module, name: str) -> bool:
    """Whether pruning or weight normalisation makes an attribute anew in each call, of parameters that are watched."""
    return f"{name}_orig" in module._parameters or {f"{name}_g", f"{name}_v"} <= module._parameters.keys()


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether a forward among a module's attributes is its class's, maybe with a cache around it."""
    forward = forward.original if isinstance(forward, Swap) else forward
    return getattr(forward, "__func__", None) is type(module).forward


def _counts_in_config(name: str) -> bool:
    """Whether a config's value may decide states, which other checks do not look at."""
    return not (name.startswith(("_", "output_")) or name in _IDLE_IN_CONFIG)


def _tensors_of(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _tensors_of(part)


def _twice(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names with which `itemgetter` returns a tuple: of a single one it would return the bare value."""
    return names * 2 if len(names) == 1 else names


def _freeze(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else tuple(value)
