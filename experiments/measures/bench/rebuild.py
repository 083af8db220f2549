"""How K/V of a stored prefix come back: laid out as they were kept, or projected anew from the layer's input.

The second is what HCache (arXiv 2410.05004) keeps. Both begin with blocks on the host and end with keys and values of
one layer in one piece; norm, bias and rotation, which the second would need as well, are left out in its favour.

    python -m experiments.measures.bench.rebuild

Sizes: T tokens in blocks of b, D hidden width, H K/V heads, D_h width of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a layer."""

    hidden: int  # D
    heads: int  # H
    width: int  # D_h


SHAPES = {
    "GPT-2 small": Shape(768, 12, 64),
    "stories260K": Shape(64, 4, 8),
    "Llama-3 8B": Shape(4096, 8, 128),
}


def measure(shapes: Mapping[str, Shape], n_tokens: int = 512, size: int = 16, rounds: int = 30) -> list[dict[str, Any]]:
    """A row a shape: bytes a token of K/V and of the layer's input, and medians of both ways, timed in turns."""
    return [{"layer of": name, **_measure(shape, n_tokens // size, size, rounds)} for name, shape in shapes.items()]


def _measure(shape: Shape, n_blocks: int, size: int, rounds: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)

    def blocks(*block: int) -> list[Tensor]:
        return [torch.randn(block, generator=drawn) for _ in range(n_blocks)]

    kept = blocks(shape.heads, size, shape.width), blocks(shape.heads, size, shape.width)
    inputs = blocks(size, shape.hidden)
    weights = torch.randn(2 * shape.heads * shape.width, shape.hidden, generator=drawn)

    def lay() -> list[Tensor]:
        return [torch.cat(parts, dim=-2) for parts in kept]

    def project() -> list[Tensor]:
        both = linear(torch.cat(inputs), weights).view(-1, 2, shape.heads, shape.width)
        return [part.transpose(0, 1).contiguous() for part in both.unbind(dim=1)]

    times: dict[str, list[float]] = {"laid out, ms": [], "projected, ms": []}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for spent, way in zip(times.values(), (lay, project), strict=True):
                started = perf_counter()
                way()
                spent.append((perf_counter() - started) * 1e3)
    itemsize = weights.element_size()
    return {
        "K/V, bytes a token": 2 * shape.heads * shape.width * itemsize,
        "input, bytes a token": shape.hidden * itemsize,
        **{name: float(np.median(spent[1:])) for name, spent in times.items()},
    }


if __name__ == "__main__":
    for row in measure(SHAPES):
        print(row)
