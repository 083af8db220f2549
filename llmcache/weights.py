"""Which weights produced a state: a digest of the trunk, recomputed only when something changed.

Every call compares the address, version counter and dtype of each parameter and buffer, the modules that hold them, and
the PEFT adapters in use; that costs some 50 microseconds for BERT-base. Edits through `.data` change none of these and
are not seen (PyTorch notes, "Autograd mechanics", in-place correctness checks): call `cache.clear()` after one.
"""

import hashlib
import threading
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


class Weights:
    """Watches one module. Thread-safe."""

    def __init__(self, module: nn.Module) -> None:
        """Remember the module; nothing is read until `digest` is called.

        Args:
            module: The trunk. Parameters outside it (the head's) do not decide its hidden states.
        """
        self._module = module
        self._lock = threading.Lock()
        self._holders: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []
        self._tuners: list[Any] = []
        self._mark: tuple[Any, ...] | None = None
        self._digest = ""

    def digest(self) -> str:
        """SHA-256 (hex) over names, dtypes, shapes and bytes of all parameters and buffers, and the active adapters."""
        if self._is_stale():
            with self._lock:
                if self._is_stale():  # another thread may have refreshed meanwhile
                    self._refresh()
        return self._digest

    def _is_stale(self) -> bool:
        return self._mark is None or self._take_mark() != self._mark

    def _refresh(self) -> None:
        parts = list(self._module.modules())
        self._holders = [
            holder for part in parts for holder in (part._parameters, part._buffers, part._modules) if holder
        ]
        held = chain.from_iterable(holder.values() for holder in self._holders)
        # Inference tensors keep no version counter; they cannot be written outside inference mode.
        self._tensors = [tensor for tensor in held if isinstance(tensor, Tensor) and not tensor.is_inference()]
        # PEFT's layers carry a flag of this name; on whole models transformers has a method of the same name.
        self._tuners = [part for part in parts if isinstance(getattr(part, "disable_adapters", None), bool)]
        mark = self._take_mark()
        self._digest = self._hash()
        self._mark = mark

    def _take_mark(self) -> tuple[Any, ...]:
        """What changes when a weight does, without reading the weight."""
        held = map(id, chain.from_iterable([holder.values() for holder in self._holders]))
        tensors = [(tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in self._tensors]
        return *held, *tensors, *self._adapters()

    def _adapters(self) -> list[str]:
        return [f"{tuner.disable_adapters}:{tuner.active_adapters}" for tuner in self._tuners]

    def _hash(self) -> str:
        sha = hashlib.sha256("|".join(self._adapters()).encode())
        with torch.no_grad():
            # Not state_dict(): buffers that are not saved (rotary tables) decide the output as well.
            for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
                sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
                sha.update(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy().data)
        return sha.hexdigest()
