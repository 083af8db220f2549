"""Array types that several modules share, and how arrays are found that were saved under a common prefix."""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Ids: TypeAlias = NDArray[np.int64]

_T = TypeVar("_T")


def below(prefix: str, named: Mapping[str, _T]) -> dict[str, _T]:
    """What is named with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
