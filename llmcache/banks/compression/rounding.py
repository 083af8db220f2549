"""Codecs that round each value by itself, and learn nothing."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llmcache.banks.compression.base import Codec


class Plain(Codec):
    """`none`: the tensor as it is. Learns nothing, like all codecs here."""

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        return {name: check_floating(x)}

    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return tensors[name].to(dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return True


class Half(Plain):
    """`fp16`: IEEE half precision, 11 significant bits.

    Values beyond its range (65,504), infinities among them, become the largest finite value of their sign; NaN stays.
    A tensor that is float16 already passes untouched.
    """

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        x = check_floating(x)
        return {name: x if x.dtype == torch.float16 else saturate(x, torch.float16)}

    def is_lossless(self, dtype: torch.dtype) -> bool:
        """For float16 only: bfloat16 has a wider range."""
        return dtype == torch.float16


class Int8(Plain):
    """`int8`: symmetric, one float32 scale a row (the last dimension), stored beside it as `<name>.scale`.

    With m the largest absolute value of a row, each of its values comes back within m / 254 * 1.0001 in float32
    (m / 254 is half a step, the rest is float32 rounding); rounding to a narrower `dtype` comes on top. A row of zeros
    comes back as zeros. Below m = 1.5e-36 the step stays at the smallest normal float32, and the error within 6e-39.
    """

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        values = check_rows(name, x)
        # The least scale is a normal number: it divides rows of zeros safely, and subnormal scales lose precision.
        scale = (values.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        steps = (values / scale).round().clamp(-127, 127).to(torch.int8)
        return {name: steps, f"{name}.scale": scale}

    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Multiply steps by scale. The result is finite, also where it would round over the end of `dtype`."""
        return saturate(tensors[name] * tensors[f"{name}.scale"], dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return False


def check_floating(x: Tensor) -> Tensor:
    """Return `x` detached; raise `ValueError` unless it is floating point."""
    if not x.is_floating_point():
        raise ValueError(f"only floating-point tensors can be compressed, got {x.dtype}")
    return x.detach()


def check_rows(name: str, x: Tensor) -> Tensor:
    """Return `x` detached, as float32; raise `ValueError` unless it holds finite rows of at least one value."""
    values = check_floating(x).float()
    if not values.dim() or not values.shape[-1]:
        raise ValueError(f"this codec needs rows of at least one value, got {name!r} of shape {tuple(x.shape)}")
    if not values.isfinite().all():
        wrong = values[~values.isfinite()][0]
        raise ValueError(f"this codec needs values that are finite in float32, got {wrong} in {name!r}")
    return values


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`; values beyond its range become its largest finite value of their sign, NaN stays NaN."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    # By way of float32, for 65,504 in bfloat16 is 65,536, which float16 does not hold.
    return x.float().clamp(-limit, limit).to(dtype)
