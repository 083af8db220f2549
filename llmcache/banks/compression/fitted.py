"""What codecs that are fitted have in common: plain until then, float16 codes afterwards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from llmcache.banks.compression.rounding import Plain, check_rows, saturate

PACKED = "hidden"  # K/V have another width, and would need codecs of their own


class FittedCodec(Plain, ABC):
    """Packs rows (R, D) of `hidden` as codes (R, K), K the smaller of `dim` and D; other tensors stay as they are.

    Until it is fitted it keeps the rows as they are. Codes are float16: rounding them adds at most 2**-11 of a code to
    what leaving out dimensions costs anyway. Computes in float32, whatever autocast its caller is in.
    """

    SHAPES: ClassVar[Mapping[str, str]]
    """What is learned: the dimensions (D, K) of each tensor by name."""

    def __init__(self, dim: int = 64, fit_on: int = 512) -> None:
        """Choose the size.

        Args:
            dim: Numbers kept of a row, at least 1; at most the hidden width is used.
            fit_on: Rows to fit on, more than `dim`. Payloads of one vector have one a request, `sequence` one a token.
        """
        if dim < 1:
            raise ValueError(f"dim={dim}: give at least 1")
        if fit_on <= dim:
            raise ValueError(f"fit_on={fit_on}: {dim} dimensions need more rows than that; raise fit_on or lower dim")
        self.dim = dim
        self.fit_on = fit_on
        self._learned: dict[str, Tensor] = {}
        self._copies: dict[torch.device, dict[str, Tensor]] = {}  # made once: every encode and decode needs one

    @property
    def n_fit(self) -> int:
        return 0 if self._learned else self.fit_on

    def fit(self, rows: Tensor) -> None:
        # What is computed in inference mode could not take part in training.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            self._learned = self._learn(rows.detach().float())

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """Replace rows by their codes, stored as `<name>.code`."""
        if name != PACKED:
            return super().encode(name, x)
        rows = check_rows(name, x)
        if not self._learned:
            return {name: x.detach()}
        with torch.autocast(x.device.type, enabled=False):
            return {f"{name}.code": saturate(self._compress(rows, self._on(x.device)), torch.float16)}

    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Rows from their codes; the result is finite, also where it would go over the end of `dtype`."""
        code = tensors.get(f"{name}.code")
        if code is None:
            return super().decode(name, tensors, dtype)
        with torch.autocast(code.device.type, enabled=False):
            return saturate(self._expand(code.float(), self._on(code.device)), dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        """Never: what is plain now may be packed later."""
        return False

    def state(self) -> dict[str, Tensor]:
        return dict(self._learned)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            return
        learned = {name: state[name] for name in self.SHAPES}
        sizes: dict[str, int] = {}
        for name, dims in self.SHAPES.items():
            shape = learned[name].shape
            if len(shape) != len(dims) or any(sizes.setdefault(d, n) != n for d, n in zip(dims, shape, strict=True)):
                raise ValueError(f"compression: saved {name!r} has shape {tuple(shape)}, which does not fit {sizes}")
        if sizes["K"] != min(self.dim, sizes["D"]):
            raise ValueError(f"compression: saved with {sizes['K']} dimensions, the settings say dim={self.dim}")
        self._learned = learned

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """What was learned, on the device where it is needed: a model may run on one and its bank be on another."""
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = {name: x.to(device) for name, x in self._learned.items()}
        return self._copies[device]

    @abstractmethod
    def _learn(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of `SHAPES`, float32, from rows, float32 (N, D), which may be inference tensors."""

    @abstractmethod
    def _compress(self, rows: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """Codes (..., K) of rows (..., D), both float32."""

    @abstractmethod
    def _expand(self, code: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """Rows (..., D) from codes (..., K), both float32."""
