"""Which weights produced a state: a digest of the trunk, recomputed only when something changed.

Every call compares the address and version counter of each parameter and buffer, the modules that hold them, and the
PEFT adapters in use; that costs some 50 microseconds for BERT-base. Fused optimizers write weights without moving the
counter, so the digest is also renewed after a forward with gradients, and while gradients are held. Edits through
`.data` alone change none of these and are not seen: call `cache.clear()` after one.
"""

import hashlib
import threading
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# Read by the hundred in every call.
_VERSION = attrgetter("_version")


class Weights:
    """Watches one module. Thread-safe."""

    def __init__(self, module: nn.Module, without: nn.Module | None = None) -> None:
        """Remember the module; nothing is read until `digest` is called.

        Args:
            module: The trunk, whose parameters alone decide its hidden states; or a whole model.
            without: A part of it that is not looked at: of a model without its trunk, the head is left.
        """
        self._module = module
        self._without = without
        self._lock = threading.Lock()
        self._holders: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []
        self._n_tensors = 0
        self._dropouts: list[nn.Module] = []
        self._tuners: list[Any] = []
        self._kept: list[Any] = []
        self._is_suspect = True
        self._mark: tuple[Any, ...] | None = None
        self._digest = ""

    def digest(self) -> str:
        """SHA-256 (hex) over names, dtypes, shapes and bytes of all parameters and buffers, and the active adapters."""
        if self._is_stale():
            with self._lock:
                if self._is_stale():  # another thread may have refreshed meanwhile
                    self._refresh()
        return self._digest

    def mark(self) -> tuple[Any, ...]:
        """What every edit makes another one, also an edit that was taken back."""
        return self._take_mark()

    def suspect(self) -> None:
        """Say that a forward with gradients ran, so that an optimizer may write the weights from now on."""
        self._is_suspect = True

    @property
    def samples(self) -> bool:
        """Whether a dropout layer is in training mode although the model is not (Monte Carlo dropout)."""
        return any(dropout.training for dropout in self._dropouts)

    @property
    def can_be_watched(self) -> bool:
        """False when a tensor was made under `inference_mode`: it has no version counter, so edits would go unseen."""
        return len(self._tensors) == self._n_tensors

    @property
    def differ_by_row(self) -> bool:
        """Whether PEFT is serving each row with an adapter of its own, which it does by hooks on its layers."""
        return any(tuner._forward_pre_hooks for tuner in self._tuners)

    def _is_stale(self) -> bool:
        return self._is_suspect or self._take_mark() != self._mark

    def _refresh(self) -> None:
        self._is_suspect = False  # before anything is read: what another thread suspects meanwhile must stay
        left_out = set() if self._without is None else set(self._without.modules())
        parts = [part for part in self._module.modules() if part not in left_out]
        self._dropouts = [part for part in parts if isinstance(part, nn.modules.dropout._DropoutNd)]
        self._holders = [
            holder for part in parts for holder in (part._parameters, part._buffers, part._modules) if holder
        ]
        held = list(chain.from_iterable(holder.values() for holder in self._holders))
        tensors = [tensor for tensor in held if isinstance(tensor, Tensor)]
        self._n_tensors = len(tensors)
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        # Kept alive until the next look: what replaces them can then not be mistaken for them by its address.
        self._kept = [held, [tensor.untyped_storage() for tensor in tensors]]
        # PEFT's layers carry a flag of this name; on whole models transformers has a method of the same name.
        self._tuners = [part for part in parts if isinstance(getattr(part, "disable_adapters", None), bool)]
        mark = self._take_mark()
        self._digest = self._hash()
        self._mark = mark
        # While gradients are held a step may follow at any time.
        if any(tensor.is_leaf and tensor.grad is not None for tensor in self._tensors):
            self._is_suspect = True

    def _take_mark(self) -> tuple[Any, ...]:
        """What changes when a weight does, without reading the weight."""
        held = map(id, chain.from_iterable(map(dict.values, self._holders)))
        tensors = self._tensors
        return (
            *held,
            *map(Tensor.data_ptr, tensors),
            *map(_VERSION, tensors),
            *self._adapters(),
        )

    def _adapters(self) -> list[str]:
        """What PEFT's layers apply, scales and merges included: those are written through `.data`."""
        facts = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
        return [str([getattr(tuner, fact, None) for fact in facts]) for tuner in self._tuners]

    def _hash(self) -> str:
        sha = hashlib.sha256("|".join(self._adapters()).encode())
        with torch.no_grad():
            # Not state_dict(): buffers that are not saved (rotary tables) decide the output as well.
            other = self._without
            left_out = set() if other is None else set(map(id, chain(other.parameters(), other.buffers())))
            for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
                if id(tensor) in left_out:
                    continue
                sha.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
                sha.update(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy().data)
        return sha.hexdigest()
