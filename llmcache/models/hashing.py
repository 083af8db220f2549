"""Digests of tensors, and descriptions of values that are the same in every process.

Classes and functions of installed packages are described by their names, all others by their code as well: the code as
it was loaded, not as its file is now, including classes and functions that it reads from globals.
"""

import functools
import hashlib
import sys
import sysconfig
import types
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import lru_cache, singledispatch
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MANY_BYTES = 32 << 20  # hashed by several threads
_DEPTH = 6  # levels of nested containers that are described
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen", "<string>", "<attrs")
_PACKAGES = ("site-packages", "dist-packages")
_UNREAD: list[tuple[Any, str]] = []  # unreadable values and their names, never removed, so that no id is reused


# -- tensors -----------------------------------------------------------------------------------------------------------


def inner_tensors(tensor: Any) -> dict[str, Tensor]:
    """Return the tensors that a subclass wraps (torchao's quantised weights), by name; {} for a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's values, address and version can be read."""
    if nn.parameter.is_lazy(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_nested


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """Return the SHA-256 (hex) of dtype, shape and bytes of each tensor; many bytes use torch's number of threads."""
    with torch.no_grad():
        detached = [tensor.detach() for tensor in tensors]
    n_threads = min(torch.get_num_threads(), len(detached))
    if n_threads < 2 or sum(tensor.nbytes for tensor in detached) < _MANY_BYTES:
        return [_digest(tensor) for tensor in detached]
    with ThreadPoolExecutor(n_threads) as pool:  # hashing releases the GIL
        return list(pool.map(_digest, detached))


def _digest(tensor: Tensor) -> str:
    with torch.no_grad():
        sha = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)};".encode())
        for piece in _pieces(tensor):
            flat = piece.resolve_conj().resolve_neg().reshape(-1).cpu()
            sha.update(flat.view(torch.uint8).numpy().data)
        return sha.hexdigest()


def _pieces(tensor: Any) -> list[Tensor]:
    """Return the tensors to hash: the tensor itself, or the integers, scales and zero points of a quantised one."""
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
    """Return a description of a value, equal for equal values in every process; for an object, its class alone."""
    kind: Any = type(value)
    return _describe_kind(kind)


def unique_name(value: Any) -> str:
    """Return a name for an unreadable value: the same for the same object, different in every process."""
    for known, name in _UNREAD:
        if known is value:
            return name
    _UNREAD.append((value, f"{_name(type(value))} {uuid.uuid4().hex}"))
    return _UNREAD[-1][1]


for _plain in (*_CONSTANTS, torch.dtype, torch.layout, np.generic, slice, PurePath):
    describe.register(_plain, lambda value, depth=0: repr(value))


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
@describe.register(deque)
def _(value: Sequence[Any], depth: int = 0) -> str:
    return f"[{','.join(_describe_all(value, depth))}]"  # like a list: JSON turns a tuple into one


@describe.register(set)
@describe.register(frozenset)
def _(value: Iterable[Any], depth: int = 0) -> str:
    return f"{{{','.join(sorted(_describe_all(value, depth)))}}}"


@describe.register(dict)
def _(value: Mapping[Any, Any], depth: int = 0) -> str:
    items = zip(map(str, value), _describe_all(value.values(), depth), strict=True)  # JSON turns keys into strings
    return f"{{{','.join(sorted(f'{key}:{text}' for key, text in items))}}}"


@describe.register
def _(value: type, depth: int = 0) -> str:
    forward = getattr(value, "forward", None)
    return f"{_name(value)} {'' if forward is None else _name(forward)} {_code_of(value)}"


_describe_kind = lru_cache(1024)(describe)  # of classes: many objects may have the same one


@describe.register(functools.partial)
def _(value: Any, depth: int = 0) -> str:
    return f"partial({','.join(_describe_all((value.func, value.args, value.keywords), depth))})"


@describe.register
def _(value: types.MethodType, depth: int = 0) -> str:
    kind: Any = type(value.__self__)
    return f"{_describe_kind(kind)}.{describe(value.__func__, depth + 1)}"


@describe.register
def _(value: types.BuiltinFunctionType, depth: int = 0) -> str:
    return _name(value)


@describe.register
def _(value: types.FunctionType, depth: int = 0) -> str:
    """Return the name of an installed function without a closure; for others also code, defaults and closure."""
    if not value.__closure__ and is_installed(value):
        return _name(value)
    captured = (value.__defaults__, value.__kwdefaults__, list(map(content, value.__closure__ or ())))
    return f"{_name(value)}({','.join([_code_of(value), *_describe_all(captured, depth)])})"


@describe.register
def _(value: types.CodeType, depth: int = 0) -> str:
    return _digest_code(value)


def _describe_all(values: Iterable[Any], depth: int) -> list[str]:
    return [describe(value, depth + 1) if depth < _DEPTH else unique_name(value) for value in values]


def content(cell: types.CellType) -> Any:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(type(value)))}"


# -- code --------------------------------------------------------------------------------------------------------------


def is_installed(value: Any) -> bool:
    """Whether a class or function is of Python or an installed package, so that its name identifies it."""
    if not isinstance(value, type):
        return _is_packaged(value.__code__.co_filename)
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return _is_packaged(file or ("" if value.__module__ == "__main__" else "<frozen"))


@lru_cache(4096)
def _is_packaged(file: str) -> bool:
    return file.startswith(_STDLIB) or any(name in file for name in _PACKAGES)


def _code_of(value: Any) -> str:
    """Return a digest of the code outside installed packages that a class or function depends on; "" without any."""
    pending, seen, lines = [value], set(), set()
    for one in pending:
        if id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, type):
            lines.add(_digest_code(one.__code__))
        for name, part in _members(one) if isinstance(one, type) else _reads(one):
            part = getattr(part, "fget", getattr(part, "__func__", part))  # function of a property or static method
            if isinstance(part, (type, types.FunctionType)):
                lines.add(f"{_name(one)} {name}={_name(part)}")
                if not is_installed(part):
                    pending.append(part)
            elif isinstance(part, _CONSTANTS):
                lines.add(f"{_name(one)} {name}={part!r}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's own and inherited members outside installed packages, patches of installed classes included."""
    for base in kind.__mro__:
        is_own = not is_installed(base)
        for name, part in vars(base).items():
            is_patch = isinstance(part, types.FunctionType) and not is_installed(part)
            if is_patch or (is_own and not name.startswith("__")):
                yield name, part


def _reads(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield names and values that a function reads from globals, modules there, its closure and its defaults."""
    names, space = set(_names_in(function.__code__)), function.__globals__
    for name in sorted(names & space.keys()):
        part = space[name]
        if isinstance(part, types.ModuleType):
            if not _is_packaged(getattr(part, "__file__", None) or "<frozen"):
                yield from ((f"{name}.{one}", vars(part)[one]) for one in sorted(names & vars(part).keys()))
        else:
            yield name, part
    yield from zip(function.__code__.co_freevars, map(content, function.__closure__ or ()), strict=True)
    yield from ((f"default {number}", one) for number, one in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names_in(one)


@lru_cache(4096)
def _digest_code(code: types.CodeType) -> str:
    # The repr of a frozenset differs between processes; that of code contains its address.
    constants = (describe(one) if isinstance(one, frozenset | types.CodeType) else repr(one) for one in code.co_consts)
    made_of = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, *constants)
    return hashlib.sha256(repr(made_of).encode()).hexdigest()
