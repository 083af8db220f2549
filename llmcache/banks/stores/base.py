"""What a bank holds under one key, and what a store has to do."""

from abc import abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What is kept under one key. Two entries are equal only if they are the same object.

    Attributes:
        tensors: Tensors by name, any shape, dtype and device.
    """

    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of payload: elements times their size."""
        return sum(x.nbytes for x in self.tensors.values())


class Store(MutableMapping[str, Entry]):
    """Entries by key, in the order in which they were put.

    An absent key is a `KeyError`, a broken store a `StoreError`. What is put is given away: the store may keep the
    tensors themselves, so nobody writes to them again. What is got must not be written to. Stored and returned tensors
    are normal ones, also when the caller is in inference mode. Leaving the context closes.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of payload held, in O(1)."""

    @abstractmethod
    def flush(self) -> None:
        """Return when all that was put is where it will stay."""

    @abstractmethod
    def close(self) -> None:
        """Release what the store holds open. Closing again does nothing."""

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close, whatever happened."""
        self.close()
