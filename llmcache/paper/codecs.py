"""Codecs: pack stored states. A codec turns one named tensor into named tensors, and back.

A codec serves one layer and one state of the weights, since both determine the distribution and some codecs are fitted
on the first rows.

Sizes: R rows of a tensor, N rows to fit on, D hidden width, K numbers per code.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from llmcache.support.registry import Registry


class Codec(ABC):
    """Packs floating-point tensors of any shape. Arguments are never modified.

    A codec implements three methods. `fit` and `restore` are called at most once, under the banks' lock; the others
    change nothing and are safe in any thread. Tensors encoded before the fit can be decoded after it. Settings become
    keyword arguments of the constructor, checked against its annotations.
    """

    @property
    def n_fit(self) -> int:
        """Rows needed to fit; 0 once the codec is ready."""
        return 0

    def fit(self, rows: Tensor) -> None:
        """Fit on the first `n_fit` rows of `hidden`, floating point (N, D), without using the global RNG."""

    @abstractmethod
    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """Pack a tensor.

        Args:
            name: Name under which `x` is stored: `hidden`, `keys` or `values`, or these after `padding_`. Every name in
                the result begins with it. Except for `hidden`, the name itself is in the result. Fitted codecs pack
                `hidden` only.
            x: Floating-point tensor, any shape and device. It may require a gradient; the result does not.

        Returns:
            Tensors by name, on the device of `x`. They may share memory with `x`, which the caller no longer uses, but
            with no other tensor; the memory is not modified again.

        Raises:
            ValueError: `x` is not a floating-point tensor, or has values that the codec cannot hold.
        """

    @abstractmethod
    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Unpack what `encode` returned under `name`.

        Args:
            name: As given to `encode`.
            tensors: The result of `encode`; it may contain other names.
            dtype: Floating-point dtype of the result, usually that of the encoded tensor.

        Returns:
            Tensor of the encoded shape, on the device of `tensors`. It may share memory with them.

        Raises:
            KeyError: A tensor of that name is missing.
        """

    @abstractmethod
    def is_lossless(self, dtype: torch.dtype) -> bool:
        """Whether every tensor of this dtype is restored bit for bit, encoded before or after the fit."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that `restore` needs; empty if nothing was learned."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state.

        Raises:
            KeyError: A part is missing.
            ValueError: The parts do not fit each other or this codec's settings.
        """


class Plain(Codec):
    """`none`: the tensor unchanged."""

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        return {name: check_floating(x)}

    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return tensors[name].to(dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return True


class Half(Plain):
    """`fp16`: IEEE half precision, 11 significant bits.

    Values beyond its range (65,504) and infinities become the largest finite value of the same sign; NaN stays NaN.
    A float16 tensor is not changed.
    """

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        x = check_floating(x)
        return {name: x if x.dtype == torch.float16 else saturate(x, torch.float16)}

    def is_lossless(self, dtype: torch.dtype) -> bool:
        """For float16 only: bfloat16 has a wider range."""
        return dtype == torch.float16


class Int8(Plain):
    """`int8`: symmetric, one float32 scale per row (the last dimension), stored as `<name>.scale`.

    With m the largest absolute value of a row, the error of each value is at most m / 254 * 1.0001 in float32 (m / 254
    is half a step, the rest is float32 rounding), plus rounding to a narrower `dtype`. A row of zeros is exact. Below
    m = 1.5e-36 the step is the smallest normal float32, and the error is within 6e-39.
    """

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        values = check_rows(name, x)
        # The least scale is a normal number: it avoids division by zero, and subnormal scales lose precision.
        scale = (values.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        steps = (values / scale).round().clamp(-127, 127).to(torch.int8)
        return {name: steps, f"{name}.scale": scale}

    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Multiply steps by scale. The result is finite: it is clamped to the range of `dtype`."""
        return saturate(tensors[name] * tensors[f"{name}.scale"], dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return False


def check_floating(x: Tensor) -> Tensor:
    """Return `x` detached; raise `ValueError` if it is not floating point."""
    if not x.is_floating_point():
        raise ValueError(f"only floating-point tensors can be compressed, got {x.dtype}")
    return x.detach()


def check_rows(name: str, x: Tensor) -> Tensor:
    """Return `x` detached as float32; raise `ValueError` unless its rows are finite and not empty."""
    values = check_floating(x).float()
    if not values.dim() or not values.shape[-1]:
        raise ValueError(f"this codec needs rows of at least one value, got {name!r} of shape {tuple(x.shape)}")
    if not values.isfinite().all():
        wrong = values[~values.isfinite()][0]
        raise ValueError(f"this codec needs values that are finite in float32, got {wrong} in {name!r}")
    return values


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`; values beyond its range become the largest finite value of the same sign, NaN stays NaN."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    # Via float32: in bfloat16, 65,504 rounds to 65,536, which float16 cannot represent.
    return x.float().clamp(-limit, limit).to(dtype)


PACKED = "hidden"  # K/V have another width and would need codecs of their own


class FittedCodec(Plain, ABC):
    """Packs rows (R, D) of `hidden` as codes (R, K), K the smaller of `dim` and D; other tensors stay unchanged.

    Rows stay unchanged until it is fitted. Codes are float16: rounding adds at most 2**-11 of a code to the loss from
    dropped dimensions. Computes in float32 whatever the caller's autocast.
    """

    SHAPES: ClassVar[Mapping[str, str]]
    """Dimensions (D, K) of each learned tensor by name."""

    def __init__(self, dim: int = 64, fit_on: int = 512) -> None:
        """Choose the size.

        Args:
            dim: Numbers kept per row, at least 1; at most the hidden width is used.
            fit_on: Rows to fit on, more than `dim`. A request has one row, with payload `sequence` one per token.
        """
        if dim < 1:
            raise ValueError(f"dim={dim}: give at least 1")
        if fit_on <= dim:
            raise ValueError(f"fit_on={fit_on}: {dim} dimensions need more rows than that; raise fit_on or lower dim")
        self.dim = dim
        self.fit_on = fit_on
        self._learned: dict[str, Tensor] = {}
        self._copies: dict[torch.device, dict[str, Tensor]] = {}  # learned tensors by device, copied once

    @property
    def n_fit(self) -> int:
        return 0 if self._learned else self.fit_on

    def fit(self, rows: Tensor) -> None:
        # Inference tensors could not be used in training.
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
        """Restore rows from codes. The result is finite: it is clamped to the range of `dtype`."""
        code = tensors.get(f"{name}.code")
        if code is None:
            return super().decode(name, tensors, dtype)
        with torch.autocast(code.device.type, enabled=False):
            return saturate(self._expand(code.float(), self._on(code.device)), dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        """Always False: rows stored plainly now may be packed later."""
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
        """Return the learned tensors on a device: the model's and the bank's may differ."""
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = {name: x.to(device) for name, x in self._learned.items()}
        return self._copies[device]

    @abstractmethod
    def _learn(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of `SHAPES`, float32, from float32 rows (N, D), which may be inference tensors."""

    @abstractmethod
    def _compress(self, rows: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """Return codes (..., K) of rows (..., D), both float32."""

    @abstractmethod
    def _expand(self, code: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """Return rows (..., D) from codes (..., K), both float32."""


class PCA(FittedCodec):
    """`pca`: float16 coefficients on the first `dim` principal axes of centred rows.

    No linear map to as many numbers has a smaller squared error on the rows it was fitted on.
    """

    SHAPES: ClassVar[Mapping[str, str]] = {"centre": "D", "axes": "DK"}

    def _learn(self, rows: Tensor) -> dict[str, Tensor]:
        centre = rows.mean(dim=0)
        axes = torch.linalg.svd(rows - centre, full_matrices=False).Vh[: self.dim].T
        return {"centre": centre, "axes": axes.contiguous()}

    def _compress(self, rows: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return (rows - learned["centre"]) @ learned["axes"]

    def _expand(self, code: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return learned["centre"] + code @ learned["axes"].T


LEARNING_RATE = 1e-2  # at Adam's usual 1e-3, 200 steps end long before the loss converges
LEAST_SCALE = 0.01  # times the mean deviation: a dimension with little variance in the sample must not dominate later


class Autoencoder(FittedCodec):
    """`autoencoder`: one hidden layer of `dim` tanh units, trained to reconstruct standardised rows.

    Adam on all rows at once, `epochs` steps: about 2 s for 512 rows of 768 on one core. Seeded: the same rows give the
    same codec. PCA of the same `dim` may lose less: compare `Stats.reconstruction_error` before choosing.
    """

    SHAPES: ClassVar[Mapping[str, str]] = {
        "mean": "D",
        "scale": "D",
        "into": "DK",
        "into_bias": "K",
        "out": "KD",
        "out_bias": "D",
    }

    def __init__(self, dim: int = 64, fit_on: int = 512, epochs: int = 200, seed: int = 0) -> None:
        super().__init__(dim, fit_on)
        if epochs < 1:
            raise ValueError(f"epochs={epochs}: give at least 1")
        self._epochs = epochs
        self._seed = seed

    def _learn(self, rows: Tensor) -> dict[str, Tensor]:
        mean, deviation = rows.mean(dim=0), rows.std(dim=0)
        scale = deviation.clamp(min=LEAST_SCALE * float(deviation.mean()))
        scale = torch.where(scale > 0, scale, 1.0)  # if all rows are equal
        weights = self._first_weights(rows.shape[1], rows.device)
        standard = (rows - mean) / scale
        with torch.enable_grad():
            optimizer = torch.optim.Adam(weights.values(), lr=LEARNING_RATE)
            for _ in range(self._epochs):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(_decoded(_encoded(standard, weights), weights), standard)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return {"mean": mean, "scale": scale, **{name: x.detach() for name, x in weights.items()}}

    def _first_weights(self, width: int, device: torch.device) -> dict[str, Tensor]:
        """Return random weights, scaled so that initial codes and outputs have a variance of about 1."""
        generator = torch.Generator().manual_seed(self._seed)
        dim = min(self.dim, width)
        weights = {
            "into": torch.randn(width, dim, generator=generator, dtype=torch.float32, device="cpu") / width**0.5,
            "into_bias": torch.zeros(dim, dtype=torch.float32, device="cpu"),
            "out": torch.randn(dim, width, generator=generator, dtype=torch.float32, device="cpu") / dim**0.5,
            "out_bias": torch.zeros(width, dtype=torch.float32, device="cpu"),
        }
        return {name: x.to(device).requires_grad_() for name, x in weights.items()}

    def _compress(self, rows: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return _encoded((rows - learned["mean"]) / learned["scale"], learned)

    def _expand(self, code: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        return _decoded(code, learned) * learned["scale"] + learned["mean"]


def _encoded(standard: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return torch.tanh(standard @ weights["into"] + weights["into_bias"])


def _decoded(code: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return code @ weights["out"] + weights["out_bias"]


CODECS: Registry[Codec] = Registry(
    "compression", Codec, {"none": Plain, "fp16": Half, "int8": Int8, "pca": PCA, "autoencoder": Autoencoder}
)
