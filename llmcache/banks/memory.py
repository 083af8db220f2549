"""Entries in memory, of the host or of a device.

A small tensor of its own costs several hundred bytes beside its payload. Small entries therefore share blocks: one
slot an entry, one slab of blocks for all entries with the same names, shapes and dtypes.
"""

import threading
from collections.abc import Mapping
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from llmcache.banks.entry import Entry
from llmcache.threads import forkable

SMALL_BYTES = 16 * 1024
BLOCK_BYTES = 1024 * 1024
SLOTS = 2**32  # handle of a small entry = slab number * SLOTS + slot
LARGE = -1  # handle of any other
LEAST_BYTES = 64  # taken for smaller entries when a block is divided, so that it has not too many slots

Signature: TypeAlias = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Memory:
    """A dict of the entries of one bank; small ones (up to 16 KiB) in shared blocks.

    Entries are given away, and nobody writes to them again. Puts and deletes come one at a time, reads from many
    threads beside them: each returns a whole entry of its key, or raises `KeyError`. What is returned is normal tensors
    without gradient, also in inference mode.

    Getting a small entry copies it, for its slot may be used again: under a lock, which no put or delete gives another
    entry the slot meanwhile. Slots of removed entries are kept for later ones of the same signature, and released with
    the last of these. A large entry is returned as it is stored, and stored as it is put wherever `adopt` can.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Open an empty store; entries are kept and returned on `device`, whatever device they come from."""
        self.device = torch.device(device)
        self._handle_of: dict[str, int] = {}  # slab number and slot in one int, to save memory; or LARGE
        self._large: dict[str, Entry] = {}
        self._slabs: dict[int, Slab] = {}
        self._number_of: dict[Signature, int] = {}
        self._numbers = count()
        self._lock = forkable(threading.RLock())  # a signal's handler may ask for the stats

    def __getitem__(self, key: str) -> Entry:
        with self._lock:
            handle = self._handle_of[key]
            if handle == LARGE:
                return self._large[key]
            number, slot = divmod(handle, SLOTS)
            return Entry(self._slabs[number].get(slot))

    def __setitem__(self, key: str, entry: Entry) -> None:
        held = None
        if entry.nbytes > SMALL_BYTES:  # which is copied, if at all, while others read
            held = Entry({name: adopt(x, self.device) for name, x in entry.tensors.items()})
        with self._lock:
            handle = LARGE if held is not None else self._put_small(entry.tensors)
            self._discard(key)
            self._handle_of[key] = handle
            if held is not None:
                self._large[key] = held

    def __delitem__(self, key: str) -> None:
        with self._lock:
            if key not in self._handle_of:
                raise KeyError(key)
            self._discard(key)

    def _discard(self, key: str) -> None:
        handle = self._handle_of.pop(key, None)
        if handle is None:
            return
        if handle == LARGE:
            del self._large[key]
            return
        number, slot = divmod(handle, SLOTS)
        slab = self._slabs[number]
        slab.free(slot)
        if not len(slab):
            del self._slabs[number], self._number_of[slab.signature]

    def _put_small(self, tensors: Mapping[str, Tensor]) -> int:
        """Copy tensors into a slot of their signature's slab, and return the handle."""
        signature = tuple((name, x.shape, x.dtype) for name, x in tensors.items())
        if signature not in self._number_of:
            number = next(self._numbers)
            self._slabs[number] = Slab(signature, self.device)
            self._number_of[signature] = number
        number = self._number_of[signature]
        return number * SLOTS + self._slabs[number].put(tensors)


class Slab:
    """Slots for entries of one signature, in blocks of about `BLOCK_BYTES`: growing never moves or doubles anything."""

    def __init__(self, signature: Signature, device: torch.device) -> None:
        self.signature = signature
        self.entry_nbytes = sum(shape.numel() * dtype.itemsize for _, shape, dtype in signature)
        self._device = device
        self._slots_per_block = BLOCK_BYTES // max(self.entry_nbytes, LEAST_BYTES)
        self._blocks: list[dict[str, Tensor]] = []  # tensors (slots a block, *shape) by name
        self._free: list[int] = []
        self._n_opened = 0  # slots below are in use or free; the others were never touched

    def put(self, tensors: Mapping[str, Tensor]) -> int:
        slot = self._free[-1] if self._free else self._n_opened
        if slot == len(self._blocks) * self._slots_per_block:
            self._blocks.append(self._open_block())
        for name, held in self._views(slot).items():
            held.copy_(tensors[name].detach())
        # Taken only now: after a copy that failed the slot is still free.
        if self._free:
            self._free.pop()
        else:
            self._n_opened += 1
        return slot

    def get(self, slot: int) -> dict[str, Tensor]:
        with torch.inference_mode(False):
            return {name: held.clone() for name, held in self._views(slot).items()}

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def __len__(self) -> int:
        """Slots in use."""
        return self._n_opened - len(self._free)

    def _open_block(self) -> dict[str, Tensor]:
        n = self._slots_per_block
        with torch.inference_mode(False):
            return {
                name: torch.empty((n, *shape), dtype=dtype, device=self._device)
                for name, shape, dtype in self.signature
            }

    def _views(self, slot: int) -> dict[str, Tensor]:
        number, row = divmod(slot, self._slots_per_block)
        return {name: held[row] for name, held in self._blocks[number].items()}


def copy_owned(x: Tensor, device: torch.device) -> Tensor:
    """Return a detached, contiguous copy that is a normal tensor in inference mode, too."""
    with torch.inference_mode(False):
        return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x.detach())


def adopt(x: Tensor, device: torch.device) -> Tensor:
    """A tensor that was given away, detached: itself, or a copy where it is no normal, whole tensor of the device."""
    x = x.detach()
    is_whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if is_whole and x.device == device and not x.is_inference() else copy_owned(x, device)
