"""Tensors that are of a GPU as far as the library can tell, on a machine without one; every transfer is counted.

Their numbers lie on the host: what is computed of them is computed there. As on a GPU, what is not copied to the host
first cannot be read there, and an operation on tensors of both fails. What the host would wait for is counted by what
PyTorch does on CUDA: a copy to the host waits unless it is `non_blocking`, and so do a number that is read, an
operation whose output is as large as its input says (`nonzero`, a mask as an index), and the synchronisation of a
stream. What is copied to the device is counted by itself.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")

#: Operations whose result the host has to know.
_READS = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero", "allclose"})
#: Operations whose output's shape hangs on values.
_SIZED = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "repeat_interleave"})
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)

#: Operations between tensors of the host and of the device.
_BETWEEN = frozenset({"copy_", "_to_copy"})

#: What was done: `read` the host waited for numbers, `sent` copies to the device, `fetched` copies from it.
moved: Counter[str] = Counter()


class OnDevice(Tensor):
    """A tensor of the device that is none: `held` has its numbers."""

    device = DEVICE  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    is_meta = False  # type: ignore[assignment]
    held: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        # To the dispatcher, a tensor of a device that this build knows and that has no numbers; never an inference one.
        shape: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        with torch.inference_mode(False):
            made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, held.shape, **shape, dtype=held.dtype, device="meta"
            )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        asked = kwargs.pop("device", None)
        to_host = asked is not None and torch.device(asked).type == "cpu"
        _refuse_to_mix(func, args, kwargs)
        _count(func, args, kwargs, to_host)
        wrappers = {id(one.held): one for one in tree_flatten((args, kwargs))[0] if isinstance(one, OnDevice)}
        made = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        is_written_host = func.overloadpacket is torch.ops.aten.copy_ and not isinstance(args[0], OnDevice)
        if to_host or is_written_host:
            return made

        def wrap(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            return wrappers[id(one)] if id(one) in wrappers else OnDevice(one)  # written in place: what was passed

        return tree_map(wrap, made)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.held!r})"


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _refuse_to_mix(func: Any, args: Any, kwargs: Any) -> None:
    """Fail as CUDA does where a tensor of the host takes part that is no single number."""
    if func.overloadpacket.__name__ in _BETWEEN:
        return
    for one in tree_flatten((args, kwargs))[0]:
        is_of_host = isinstance(one, Tensor) and not isinstance(one, OnDevice) and one.ndim > 0
        if is_of_host:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} was passed one of the host")


def _count(func: Any, args: Any, kwargs: Any, to_host: bool) -> None:
    name = func.overloadpacket.__name__
    waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    if name == "copy_":
        is_sent = isinstance(args[0], OnDevice) and not isinstance(args[1], OnDevice)
        moved["sent"] += is_sent
        to_host = not isinstance(args[0], OnDevice)
    if to_host:
        moved["fetched"] += 1
        moved["read"] += waits
    indices = args[1] if name in ("index", "index_put_", "index_put") else ()
    is_masked = any(one is not None and one.dtype == torch.bool for one in indices)
    moved["read"] += name in _READS or name in _SIZED or is_masked


class _Factories(TorchFunctionMode):
    """Makes what is asked of the device, and counts what is sent there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.to, Tensor.cuda):
            return self._to(func, args, kwargs)
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], OnDevice):
            x, index, *rest = args
            sent = tuple(map(_sent, index)) if isinstance(index, tuple) else _sent(index)
            return func(x, sent, *rest)
        if func is scaled_dot_product_attention and isinstance(args[0], OnDevice):  # one kernel
            return OnDevice(func(*tree_map(_held, args), **tree_map(_held, kwargs)))
        if func is torch.where and isinstance(args[0], OnDevice):  # its numbers would be made of a device without any
            args = tuple(OnDevice(torch.tensor(one)) if isinstance(one, (int, float)) else one for one in args)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        if args and isinstance(args[0], OnDevice):
            return func(*args, **{**kwargs, "device": "meta"})
        moved["sent"] += func in _FROM_HOST
        return OnDevice(func(*args, **{**kwargs, "device": "cpu"}))

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, *rest = args
        given = [*rest, *kwargs.values()]
        if func is Tensor.cuda or any(_is_of_device(one) for one in given):
            dtypes = [one for one in given if isinstance(one, torch.dtype)]
            dtypes += [one.dtype for one in given if isinstance(one, Tensor)]
            options: dict[str, Any] = {"dtype": dtypes[0]} if dtypes else {}
            made = x.to(**options, copy=kwargs.get("copy", False))
            if isinstance(x, OnDevice):
                return made
            moved["sent"] += 1
            return OnDevice(made)
        return func(*args, **kwargs)


def _sent(index: Any) -> Any:
    """An index; numbers of the host are sent to the device for it."""
    if isinstance(index, OnDevice) or not isinstance(index, (list, np.ndarray, Tensor)):
        return index
    moved["sent"] += 1
    return OnDevice(torch.as_tensor(index))


def _is_of_device(target: Any) -> bool:
    if isinstance(target, Tensor):
        return isinstance(target, OnDevice)
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cuda"


@contextmanager
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within: there is such a device, and the library takes its tensors for plain ones."""

    def wait() -> None:
        moved["read"] += 1

    stream = SimpleNamespace(synchronize=wait)
    with monkeypatch.context() as patched, _Factories():
        patched.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patched.setattr(torch.cuda, "synchronize", lambda device=None: wait())
        for module in ("request.bypass", "execution.meter", "execution.eager"):
            patched.setattr(f"llmcache.{module}.is_traced", lambda values: False)
        yield


def place(model: nn.Module) -> Any:
    """A model that is on the device."""
    placed: dict[int, Any] = {}  # weights that parts share stay shared
    for part in model.modules():
        for name, held in [*part._parameters.items(), *part._buffers.items()]:
            if held is None:
                continue
            if id(held) not in placed:
                moved_up = OnDevice(held.detach())
                is_weight = isinstance(held, nn.Parameter)
                placed[id(held)] = nn.Parameter(moved_up, requires_grad=False) if is_weight else moved_up
            (part._parameters if name in part._parameters else part._buffers)[name] = placed[id(held)]
    return model


def counted(call: Any, *args: Any) -> tuple[Any, Counter[str]]:
    """What a call returns, and what it made the host and the device exchange."""
    moved.clear()
    returned = call(*args)
    return returned, moved.copy()
