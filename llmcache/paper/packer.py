"""A codec at work on the states of one layer: what it is fitted on, and what it loses.

Sizes: R rows of a tensor, D hidden width.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from llmcache.models.packing import cosine_distance
from llmcache.paper.codecs import Codec

logger = logging.getLogger("llmcache")

_MEASURED_EVERY = 16  # entries: unpacking each one only to look at it would double the cost of packing


class Packer:
    """Packs states of one layer and one state of the weights. Not thread-safe: the caller holds a lock.

    Tensors are kept plainly until the codec has seen enough rows; the caller then packs the earlier ones again.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.loss = Loss()
        # Namespace and rows by request, until the codec is fitted. Rows of evicted requests count, so that a bank that
        # never holds enough at once is packed all the same.
        self.waiting: dict[str, tuple[str, Tensor]] = {}
        self._n_packed = 0
        self._has_failed = False

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Encode named tensors, `hidden` (R, D) among them. Now and then they are unpacked to measure the loss."""
        packed = self.encode(tensors)
        hidden = tensors["hidden"]
        if self.codec.n_fit == 0 and not self.codec.is_lossless(hidden.dtype):
            self._n_packed += 1
            if self._n_packed % _MEASURED_EVERY == 1:
                try:
                    self.loss.add(hidden, self.codec.decode("hidden", packed, hidden.dtype))
                except Exception:  # it costs this figure, not the entry
                    if not self._has_failed:
                        logger.warning(
                            "llmcache failed to measure what compression loses; storing anyway", exc_info=True
                        )
                    self._has_failed = True
        return packed

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Encode named tensors."""
        packed: dict[str, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in tensors.items():
                packed |= self.codec.encode(name, tensor)
        return packed

    def there_and_back(self, hidden: Tensor) -> Tensor:
        """What comes back of rows (R, D) once packed. Those with a value that is not finite stay: no codec holds it."""
        if not hidden.isfinite().all():
            return hidden
        return self.codec.decode("hidden", self.encode({"hidden": hidden}), hidden.dtype)

    def learn(self, key: str, namespace: str, hidden: Tensor) -> bool:
        """Show the codec rows (R, D) of a request, once each; whether it is fitted now, and was not before."""
        needed = self.codec.n_fit
        if not needed or key in self.waiting or not hidden.isfinite().all():
            return False
        self.waiting[key] = namespace, hidden
        if sum(len(rows) for _, rows in self.waiting.values()) < needed:
            return False
        waiting, self.waiting = self.waiting, {}  # should the fit fail, later rows get their chance
        # The model may have moved to another device meanwhile.
        self.codec.fit(torch.cat([rows.to(hidden.device) for _, rows in waiting.values()])[:needed])
        return True


class Loss:
    """How far unpacked rows are from the packed ones: running sums over rows, in float64 on the host.

    On the host, since a model may move between devices, and some of them have no float64.
    """

    def __init__(self) -> None:
        self._n_rows = 0
        self._first: Tensor | None = None
        self._total = torch.zeros((), device="cpu")  # sum of rows less the first: nearer to the mean, so less cancels
        self._squares = self._errors = self._distances = 0.0

    def add(self, x: Tensor, unpacked: Tensor) -> None:
        """Count rows (R, D) and what came back of them. Rows with a value that is not finite are left out."""
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
        """Sum of |x - x'|^2 over sum of |x - mean|^2: 0 is lossless, 1 no better than the mean.

        None before two rows that differ were measured.
        """
        if self._n_rows == 0:
            return None
        spread = self._squares - float(self._total.square().sum()) / self._n_rows
        return self._errors / spread if spread > 0 else None

    @property
    def cosine_distance(self) -> float | None:
        """Mean of 1 - cosine(x, x') over rows, or None before the first."""
        return self._distances / self._n_rows if self._n_rows else None
