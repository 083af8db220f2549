"""Trials of a trunk on tokens that are made up: their rows, their tolerance, and their results by digest.

Sizes: B rows, T tokens.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from llmcache.models.adapters import Trunk, device_of, special_ids, vocabulary_size
from llmcache.models.weights import Snapshot, Weights
from llmcache.support.threads import forkable

#: By dtype: see `rounding_of`. TF32 has float16's.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_MAX_STATES = 16  # digests whose result is kept

T = TypeVar("T")


class Tried(Generic[T]):
    """The result of a trial, by digest of the weights; tried again after edits beyond weight values. Thread-safe."""

    def __init__(self, weights: Weights, find: Callable[[], T]) -> None:
        """Watch `weights`; `find` makes the trial."""
        self._weights, self._find = weights, find
        self._known: OrderedDict[str, T] = OrderedDict()  # by digest
        self._latest: tuple[str, Snapshot | None, T] | None = None
        self._lock = forkable(threading.Lock(), is_waited_for=False)

    def of(self, digest: str) -> T:
        """Return the result with the present weights, whose digest this is."""
        latest = self._latest
        return latest[2] if latest is not None and latest[0] == digest else self._add(digest)

    def _add(self, digest: str) -> T:
        with self._lock:
            if digest in self._known:
                result = self._known[digest]
            elif self._latest and self._latest[1] and self._weights.differs_in_values(self._latest[1]):
                result = self._latest[2]
            else:
                result = self._find()
            self._known[digest] = result
            if len(self._known) > _MAX_STATES:
                self._known.popitem(last=False)
            self._latest = digest, self._weights.snapshot_of(digest), result
            return result


def trial_rows(trunk: Trunk, n_rows: int, n_tokens: int) -> Tensor:
    """Return rows of content tokens (B, T), the same each time."""
    special, size = special_ids(trunk), vocabulary_size(trunk)
    content = torch.tensor(sorted(set(range(min(size, 4096))) - set(special)) or [0], device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    places = torch.randint(len(content), (n_rows, n_tokens), generator=generator, device="cpu")
    return content[places].to(device_of(trunk.module))


def rounding_of(trial: nn.Module, states: Tensor) -> float:
    """Return how far a state of a row beside others may be off, as a share of the largest state."""
    may_be_tf32 = torch.get_float32_matmul_precision() != "highest"
    may_be_tf32 |= any(isinstance(part, nn.modules.conv._ConvNd) for part in trial.modules())  # cuDNN's default
    is_tf32 = may_be_tf32 and states.dtype == torch.float32 and not states.is_cpu
    return _ROUNDING[torch.float16 if is_tf32 else states.dtype]
