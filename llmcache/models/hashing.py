"""Digests of tensors, and names of values that mean the same in every process."""

import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MANY_BYTES = 32 << 20  # from which on threads are worth starting
_DEPTH = 6  # of containers within containers that are described


# -- tensors -----------------------------------------------------------------------------------------------------------


def inner_tensors(tensor: Any) -> dict[str, Tensor]:
    """The tensors that a subclass wraps (quantised weights of torchao), by name; nothing for a plain one."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def is_readable(tensor: Tensor) -> bool:
    """Whether all that a tensor holds can be read, and its address and version seen."""
    if nn.parameter.is_lazy(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_nested


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """SHA-256 (hex) over dtype, shape and bytes of each. Many bytes are shared among torch's number of threads."""
    with torch.no_grad():
        detached = [tensor.detach() for tensor in tensors]
    n_threads = min(torch.get_num_threads(), len(detached))
    if n_threads < 2 or sum(tensor.nbytes for tensor in detached) < _MANY_BYTES:
        return [_digest(tensor) for tensor in detached]
    with ThreadPoolExecutor(n_threads) as pool:  # hashing lets go of the interpreter's lock
        return list(pool.map(_digest, detached))


def _digest(tensor: Tensor) -> str:
    with torch.no_grad():
        sha = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)};".encode())
        for piece in _pieces(tensor):
            flat = piece.resolve_conj().resolve_neg().reshape(-1).cpu()
            sha.update(flat.view(torch.uint8).numpy().data)
        return sha.hexdigest()


def _pieces(tensor: Any) -> list[Tensor]:
    """What to hash of a tensor: itself, or a quantised one's numbers and scales."""
    if not tensor.is_quantized:
        return [tensor]
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scales = [torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64, device="cpu")]
    else:
        scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return [tensor.int_repr(), *scales]


# -- values ------------------------------------------------------------------------------------------------------------


@singledispatch
def describe(value: Any, depth: int = 0) -> str:
    """What a value is, alike in every process that made it alike; of an object no more than its class."""
    return _name(type(value))


def _describe_repr(value: Any, depth: int = 0) -> str:
    return repr(value)


for _plain in (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.layout, np.generic, slice):
    describe.register(_plain, _describe_repr)


@describe.register
def _(value: Enum, depth: int = 0) -> str:
    return f"{_name(type(value))}.{value.name}"


@describe.register
def _(value: np.ndarray, depth: int = 0) -> str:
    if value.dtype.hasobject:
        return describe(value.tolist(), depth + 1)
    return f"{value.dtype}{value.shape}{hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()}"


@describe.register(list)
@describe.register(tuple)
def _(value: Sequence[Any], depth: int = 0) -> str:
    return f"[{','.join(_describe_all(value, depth))}]"  # a list that was saved as JSON may have been a tuple


@describe.register(set)
@describe.register(frozenset)
def _(value: Iterable[Any], depth: int = 0) -> str:
    return f"{{{','.join(sorted(_describe_all(value, depth)))}}}"


@describe.register(dict)
def _(value: Mapping[Any, Any], depth: int = 0) -> str:
    items = zip(map(str, value), _describe_all(value.values(), depth), strict=True)  # JSON's keys are strings, too
    return f"{{{','.join(sorted(f'{key}:{told}' for key, told in items))}}}"


@describe.register
def _(value: type, depth: int = 0) -> str:
    return _name(value)


@describe.register(functools.partial)
def _(value: Any, depth: int = 0) -> str:
    return f"partial({','.join(_describe_all((value.func, value.args, value.keywords), depth))})"


@describe.register
def _(value: types.MethodType, depth: int = 0) -> str:
    return f"{_name(type(value.__self__))}.{describe(value.__func__, depth + 1)}"


@describe.register
def _(value: types.BuiltinFunctionType, depth: int = 0) -> str:
    return _name(value)


@describe.register
def _(value: types.FunctionType, depth: int = 0) -> str:
    """A function that can be imported is told by its name; another one by its code and what it closes over."""
    home = vars(sys.modules.get(value.__module__, types))
    if home.get(value.__qualname__) is value or depth > _DEPTH:
        return _name(value)
    cells = [] if value.__closure__ is None else [_content(cell) for cell in value.__closure__]
    captured = (value.__defaults__, value.__kwdefaults__, cells)
    return f"{_name(value)}({','.join([describe(value.__code__, depth), *_describe_all(captured, depth)])})"


@describe.register
def _(value: types.CodeType, depth: int = 0) -> str:
    made_of = (value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_consts)
    return hashlib.sha256("".join(_describe_all(made_of, depth)).encode()).hexdigest()


def _describe_all(values: Iterable[Any], depth: int) -> list[str]:
    return [describe(value, depth + 1) if depth < _DEPTH else _name(type(value)) for value in values]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(type(value)))}"
