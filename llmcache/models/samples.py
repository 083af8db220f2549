"""Samples of every tensor's bytes, compared in each call: only they show edits through `.data` or by another process.

A comparison reads 64 bytes of each tensor in host memory, at the next of eight places, which differ between tensors:
some 5 microseconds for BERT-base. Other devices need a synchronisation: there, one call in 64 compares all places.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

N_PLACES = 8
_WIDTH = 64  # bytes: a cache line
_GOLDEN = 0.618  # its multiples modulo 1 are spread evenly
_FAR_INTERVAL = 64  # comparisons between two that read other devices


class _View:
    """Chunks of some tensors' memory that are read together, and their bytes when last sampled (`seen`)."""

    def __init__(self, chunks: Sequence[tuple[Tensor, Any]], read: Callable[[list[Any]], bytes]) -> None:
        self._chunks = chunks
        self.read = partial(read, [chunk for _, chunk in chunks])
        self.seen = b""

    def edited(self) -> Iterator[Tensor]:
        """Yield the tensor of each chunk whose bytes have changed."""
        now, end = self.read(), 0
        for tensor, chunk in self._chunks:
            begin, end = end, end + len(chunk)
            if now[begin:end] != self.seen[begin:end]:
                yield tensor


class Samples:
    """Samples of tensors' bytes as of the last `take`. Comparing is thread-safe."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        """Choose the places; tensors whose memory cannot be read are left out."""
        near: list[tuple[Tensor, memoryview]] = []
        self._mapped: list[Tensor] = []
        far: dict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for tensor in tensors:
            memory = _memory(tensor)
            if memory is not None and memory.is_cpu:
                near.append((tensor, memory.numpy().data))
                self._mapped.append(memory)
            elif memory is not None:
                far[memory.device].append((tensor, memory))
        self._near = [_View(_chunks(near, [place]), b"".join) for place in range(N_PLACES)]
        self._far = [_View(_chunks(held, range(N_PLACES)), _read_far) for held in far.values()]
        self._addresses = list(map(Tensor.data_ptr, self._mapped))
        self._n_looks = 0
        self._differ = False

    @property
    def are_in_place(self) -> bool:
        """False once `share_memory_` has moved a tensor's bytes: the old memory is freed and must not be read."""
        return list(map(Tensor.data_ptr, self._mapped)) == self._addresses

    def take(self) -> None:
        """Store the tensors' present bytes at all places."""
        for view in (*self._near, *self._far):
            view.seen = view.read()
        self._differ = False

    def differ(self) -> bool:
        """Whether bytes differ from the samples at the next places, or did in an earlier call since `take`."""
        self._n_looks = n = self._n_looks + 1
        near, far = self._near[n % N_PLACES], () if n % _FAR_INTERVAL else self._far
        if near.read() != near.seen or any(view.read() != view.seen for view in far):
            self._differ = True
        return self._differ

    def edited(self) -> list[Tensor]:
        """Return the tensors whose bytes differ at any place from the samples, each once; `differ` then is true."""
        found = {id(tensor): tensor for view in (*self._near, *self._far) for tensor in view.edited()}
        self._differ = self._differ or bool(found)
        return list(found.values())


def _memory(tensor: Tensor) -> Tensor | None:
    """Return a uint8 view of a tensor's memory, from its first byte to its last; None if it cannot be read."""
    try:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        if storage.device.type == "meta" or tensor.numel() == 0:
            return None
        spread = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return memory.set_(storage, tensor.storage_offset() * size, (spread * size,), (1,))
    except (NotImplementedError, RuntimeError):
        return None


def _chunks(held: Sequence[tuple[Tensor, Any]], places: Iterable[int]) -> list[tuple[Tensor, Any]]:
    """Return 64 bytes of each tensor's memory at each place, shifted by the tensor's number."""
    chunks = []
    for number, (tensor, memory) in enumerate(held):
        for place in places:
            share = (place + number * _GOLDEN % 1) / N_PLACES
            begin = int(max(0, len(memory) - _WIDTH) * share) // _WIDTH * _WIDTH
            chunks.append((tensor, memory[begin : begin + _WIDTH]))
    return chunks


def _read_far(chunks: list[Tensor]) -> bytes:
    return torch.cat(chunks).cpu().numpy().tobytes()
