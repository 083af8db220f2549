"""Array types that several modules share, products of arrays, and how arrays are found that were saved together."""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Ids: TypeAlias = NDArray[np.int64]
#: Places of a row's valid tokens: a slice where these are contiguous.
Positions: TypeAlias = slice | NDArray[np.int64]

_T = TypeVar("_T")


def below(prefix: str, named: Mapping[str, _T]) -> dict[str, _T]:
    """What is named with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def product(a: Floats, b: Floats) -> Floats:
    """`a @ b`, (N, K) by (K, M) or (K,), on the threads of torch.

    NumPy's BLAS has threads of its own, even for one row, and they spin for a while after each product: on two cores
    the layers that run next then take up to three times as long. For what is computed while requests are served.
    """
    made = np.empty((len(a), *b.shape[1:]), np.float32)
    # Autocast leaves operations alone that are told where their result goes.
    torch.matmul(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(made))
    return made


def normalise(x: Floats) -> Floats:
    """Rows scaled to L2 norm 1; a zero row stays zero, so it is similar to nothing."""
    norm = np.sqrt(np.einsum("nd,nd->n", x, x))
    scaled: Floats = x / np.maximum(norm, np.float32(1e-12))[:, None]
    return scaled
