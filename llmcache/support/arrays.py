"""Array types and array functions that several modules share."""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Ids: TypeAlias = NDArray[np.int64]
#: Columns of a row's valid tokens: a slice if contiguous.
Positions: TypeAlias = slice | NDArray[np.int64]

_T = TypeVar("_T")


def below(prefix: str, named: Mapping[str, _T]) -> dict[str, _T]:
    """Return the values whose name has a prefix, by name without the prefix."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def product(a: Floats, b: Floats) -> Floats:
    """Return `a @ b`, (N, K) by (K, M) or (K,), computed on torch's threads.

    NumPy's BLAS uses its own threads, even for one row, and they spin for a while after each product: on two cores the
    layers that run next then take up to three times as long. Use this for all products in service.
    """
    made = np.empty((len(a), *b.shape[1:]), np.float32)
    # Autocast ignores operations with `out`.
    torch.matmul(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(made))
    return made


def normalise(x: Floats) -> Floats:
    """Return rows scaled to L2 norm 1; a zero row stays zero, so its similarity to any row is 0."""
    norm = np.sqrt(np.einsum("nd,nd->n", x, x))
    scaled: Floats = x / np.maximum(norm, np.float32(1e-12))[:, None]
    return scaled
