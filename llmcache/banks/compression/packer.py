"""A codec at work on one layer: what it is fitted on, and what it loses."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from llmcache.paper.codecs import Codec
from llmcache.banks.entry import Entry
from llmcache.models.payloads import cosine_distance

logger = logging.getLogger("llmcache")

MEASURED_EVERY = 16  # entries: unpacking each one only to look at it would double the cost of packing


class Packer:
    """Packs the states of one layer and one state of the weights. Not thread-safe: the caller holds a lock.

    Entries are packed plainly until the codec has seen enough rows; the caller then packs the earlier ones again.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.loss = Loss()
        # Namespace and rows by request, until the codec is fitted. Rows of evicted requests count, so that a bank that
        # never holds enough at once is packed all the same; whose they are must then be known without the bank.
        self._waiting: dict[str, tuple[str, Tensor]] = {}
        self._n_packed = 0
        self._is_measured = True

    def pack(self, tensors: Mapping[str, Tensor]) -> Entry:
        """An entry of named tensors, `hidden` (R, D) among them. Now and then it is unpacked to measure the loss."""
        with torch.inference_mode(False), torch.no_grad():
            entry = self._encode(tensors)
            if self.codec.n_fit == 0 and not self.codec.is_lossless(tensors["hidden"].dtype):
                self._n_packed += 1
                if self._n_packed % MEASURED_EVERY == 1:
                    self._measure(tensors["hidden"], entry)
            return entry

    def unpack(self, name: str, entry: Entry, dtype: torch.dtype) -> Tensor:
        return self.codec.decode(name, entry.tensors, dtype)

    def unpack_kv(self, name: str, entry: Entry, dtype: torch.dtype) -> Tensor:
        """Likewise of keys or values, which under autocast are of another dtype than the states, `dtype`."""
        stored = entry.tensors[name].dtype
        is_own = self.codec.is_lossless(dtype) and stored.is_floating_point
        return self.unpack(name, entry, stored if is_own else dtype)

    def there_and_back(self, hidden: Tensor) -> Tensor:
        """What comes back of rows (R, D) once packed. Those with a value that is not finite stay: no codec holds it."""
        if not hidden.isfinite().all():
            return hidden
        with torch.inference_mode(False), torch.no_grad():
            return self.unpack("hidden", self._encode({"hidden": hidden}), hidden.dtype)

    def learn(self, key: str, namespace: str, entry: Entry) -> bool:
        """Show the codec an entry that is to be stored, as long as it has not seen enough; a key's rows count once.

        True if the codec was fitted just now: this entry and those before, plain ones, may be packed with `repack`.
        """
        needed = self.codec.n_fit
        if not needed:
            return False
        shown = entry.tensors["hidden"].to(torch.float32, copy=True)
        self._waiting[key] = (namespace, shown)
        if sum(len(rows) for _, rows in self._waiting.values()) < needed:
            return False
        waiting, self._waiting = self._waiting, {}  # should the fit fail, later rows get their chance
        # The model may have moved to another device meanwhile.
        self.codec.fit(torch.cat([rows.to(shown.device) for _, rows in waiting.values()])[:needed])
        return True

    def forget(self, namespace: str | None = None) -> None:
        """Do not fit the codec on what it was shown of a namespace, or on anything that it was shown."""
        self._waiting = {
            key: shown for key, shown in self._waiting.items() if namespace is not None and shown[0] != namespace
        }

    def repack(self, entry: Entry) -> Entry:
        """What a plain entry is now that the codec is fitted. Not measured: the codec may have been fitted on it."""
        with torch.inference_mode(False), torch.no_grad():
            return self._encode(entry.tensors)

    def _measure(self, hidden: Tensor, entry: Entry) -> None:
        """Count what packing lost. A failure costs this figure, not the entry; the first is logged."""
        try:
            self.loss.add(hidden, self.unpack("hidden", entry, hidden.dtype))
        except Exception:
            if self._is_measured:
                logger.warning("llmcache failed to measure what compression loses; storing anyway", exc_info=True)
            self._is_measured = False

    def _encode(self, tensors: Mapping[str, Tensor]) -> Entry:
        encoded: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            encoded |= self.codec.encode(name, tensor)
        return Entry(encoded)


class Loss:
    """How far unpacked rows are from the packed ones: running sums over rows, in float64 on the host.

    On the host, since a model may move between devices, and some of them have no float64.
    """

    def __init__(self) -> None:
        self._n_rows = 0
        self._first: Tensor | None = None
        self._total = torch.zeros((), device="cpu")  # sum of rows less the first: nearer to the mean, so less cancels
        self._squares = 0.0
        self._errors = 0.0
        self._distances = 0.0

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
