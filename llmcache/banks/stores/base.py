"""What a bank holds under one key, and what a store has to do."""

from abc import ABC, abstractmethod
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


class Store(ABC):
    """Where the entries of one bank lie, by key. Three methods are each store's own. It begins empty.

    The bank knows which keys are held, how large their entries are and who leaves. It puts and deletes under the lock
    of all banks, one call at a time. It reads without, so that a slow read holds nobody up; only when a codec was just
    fitted, what came before is read under the lock, and packed. So `__getitem__` runs in many threads at once, beside
    at most one call that puts or deletes, also of the same key. It returns, whole, what was held under the key at some
    moment of the call, or raises `KeyError` if there was a moment without; never a mixture, and never what was put
    under another key.

    What is put is given away: the store may keep the tensors themselves, so nobody writes to them again. What is got
    must not be written to, and stays as it is when its place is used again. Stored and returned tensors are normal
    ones without gradient, also when the caller is in inference mode. A broken store raises `StoreError`: it is counted
    and logged, and the request is computed.

    One is made for each stored layer, with the same settings. The constructor takes the device on which entries are
    returned, a `torch.device`, as its first argument, and settings as keyword arguments, checked against its
    annotations.
    """

    @abstractmethod
    def __getitem__(self, key: str) -> Entry:
        """Return an entry.

        Raises:
            KeyError: There is none, or no longer: a miss.
            StoreError: It cannot be read.
        """

    @abstractmethod
    def __setitem__(self, key: str, entry: Entry) -> None:
        """Hold an entry, in place of what was held under the key. If that fails, what was held before still is.

        Raises:
            StoreError: It cannot be written.
        """

    @abstractmethod
    def __delitem__(self, key: str) -> None:
        """Forget an entry.

        Raises:
            KeyError: There is none.
            StoreError: It cannot be deleted; it counts as held then.
        """

    def close(self) -> None:
        """Release what is held open. Called once, when the bank is gone; by default nothing."""
