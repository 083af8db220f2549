"""Applies a codec to the states of one layer: collects the rows to fit it on, and measures its loss.

Sizes: R rows of a tensor, D hidden width.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from llmcache.models.packing import cosine_distance
from llmcache.paper.codecs import Codec

logger = logging.getLogger("llmcache")

_MEASURED_EVERY = 16  # the loss is measured once in so many entries, as unpacking doubles the cost of packing


class Packer:
    """Packs states of one layer and one state of the weights. Not thread-safe: the caller holds a lock.

    Tensors are stored unpacked until the codec has seen enough rows; the caller then packs the earlier ones again.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.loss = Loss()
        # Namespace and rows by request, until the codec is fitted. Rows of evicted requests count, so that the codec of
        # a bank that never holds enough rows at once is fitted too.
        self.waiting: dict[str, tuple[str, Tensor]] = {}
        self._n_packed = 0
        self._has_failed = False

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Encode named tensors, `hidden` (R, D) among them; unpack one in `_MEASURED_EVERY` to measure the loss."""
        packed = self.encode(tensors)
        hidden = tensors["hidden"]
        if self.codec.n_fit == 0 and not self.codec.is_lossless(hidden.dtype):
            self._n_packed += 1
            if self._n_packed % _MEASURED_EVERY == 1:
                try:
                    self.loss.add(hidden, self.codec.decode("hidden", packed, hidden.dtype))
                except Exception:  # only the measurement is lost, not the entry
                    if not self._has_failed:
                        logger.warning("llmcache failed to measure compression's loss; storing anyway", exc_info=True)
                    self._has_failed = True
        return packed

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in tensors.items():
                packed |= self.codec.encode(name, tensor)
        return packed

    def round_trip(self, hidden: Tensor) -> Tensor:
        """Return rows (R, D) packed and unpacked; unchanged if a value is not finite, which codecs do not support."""
        if not hidden.isfinite().all():
            return hidden
        return self.codec.decode("hidden", self.encode({"hidden": hidden}), hidden.dtype)

    def learn(self, key: str, namespace: str, hidden: Tensor) -> bool:
        """Collect rows (R, D), once per key, and fit the codec when there are enough; return whether it was fitted."""
        needed = self.codec.n_fit
        if not needed or key in self.waiting or not hidden.isfinite().all():
            return False
        self.waiting[key] = namespace, hidden
        if sum(len(rows) for _, rows in self.waiting.values()) < needed:
            return False
        waiting, self.waiting = self.waiting, {}  # if the fit fails, later rows are collected anew
        # The model may have moved to another device meanwhile.
        self.codec.fit(torch.cat([rows.to(hidden.device) for _, rows in waiting.values()])[:needed])
        return True


class Loss:
    """Running sums of the difference between rows and their unpacked copies, in float64 on the host.

    On the host because a model may move between devices and some have no float64.
    """

    def __init__(self) -> None:
        self._n_rows = 0
        self._first: Tensor | None = None
        self._total = torch.zeros((), device="cpu")  # sum of rows minus the first row, to reduce cancellation
        self._squares = self._errors = self._distances = 0.0

    def add(self, x: Tensor, unpacked: Tensor) -> None:
        """Add rows (R, D) and their unpacked copies. Rows with a value that is not finite are skipped."""
        keep = x.isfinite().all(dim=-1)
        x, unpacked = x[keep].cpu().double(), unpacked[keep].cpu().double()
        if len(x) == 0:
            return
        if self._first is None:
            self._first = x[0].clone()
        shifted = x - self._first
        self._n_rows += len(x)
        self._total = self._total + shifted.sum(dim=0)
        self._squares += float(shifted.square().sum())
        self._errors += float((x - unpacked).square().sum())
        self._distances += cosine_distance(x, unpacked) * len(x)

    @property
    def relative_error(self) -> float | None:
        """Sum of |x - x'|^2 over sum of |x - mean|^2: 0 is lossless, 1 is no better than the mean.

        None until two different rows were measured.
        """
        if self._n_rows == 0:
            return None
        spread = self._squares - float(self._total.square().sum()) / self._n_rows
        return self._errors / spread if spread > 0 else None

    @property
    def cosine_distance(self) -> float | None:
        """Mean of 1 - cosine(x, x') over rows; None before the first."""
        return self._distances / self._n_rows if self._n_rows else None
