"""What a bank holds under one key."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What is kept under one key. Two entries are equal only if they are the same object.

    Attributes:
        tensors: Tensors by name, any shape, dtype and device. The mapping is not changed afterwards.
        nbytes: Bytes of payload: elements times their size.
    """

    tensors: Mapping[str, Tensor]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Add up the bytes once: they are asked for at every step of a put."""
        object.__setattr__(self, "nbytes", sum(tensor.nbytes for tensor in self.tensors.values()))
