"""What a codec has to do.

A codec serves one layer and one state of the weights: both decide the distribution, and some codecs are fitted on what
they first see.

Sizes: R rows of a tensor, N rows to fit on, D hidden width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor


class Codec(ABC):
    """Packs floating-point tensors of any shape. Arguments are never modified. Three methods are each codec's own.

    `fit` and `restore` are called once at most, and need the banks' lock; the rest changes nothing and is safe in
    any thread. What was encoded before the fit can be decoded after it.
    """

    @property
    def n_fit(self) -> int:
        """Rows it must see before it packs; 0 when it is ready."""
        return 0

    def fit(self, rows: Tensor) -> None:
        """Learn from the first `n_fit` rows of `hidden`, floating point (N, D). The global RNG is left alone."""

    @abstractmethod
    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """Pack a tensor.

        Args:
            name: Name under which `x` is stored: `hidden`, `keys` or `values`, or these after `padding_`. Every name in
                the result begins with it, and but for `hidden` it is itself one of them. Codecs that are fitted pack
                `hidden` only.
            x: Floating-point tensor, any shape and device. It may require a gradient; the result does not.

        Returns:
            Tensors by name, on the device of `x`. They may share its memory, for who packs to store has
            given it away; other memory is theirs alone, and nobody writes to it again.

        Raises:
            ValueError: `x` is not a floating-point tensor, or has values that the codec cannot hold.
        """

    @abstractmethod
    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Unpack what `encode` returned under `name`.

        Args:
            name: As given to `encode`.
            tensors: What `encode` returned; other names may be among them.
            dtype: Floating-point type of the result, usually that of the encoded tensor.

        Returns:
            Tensor of the encoded shape, on the device of `tensors`. It may share memory with them.

        Raises:
            KeyError: A tensor of that name is missing.
        """

    @abstractmethod
    def is_lossless(self, dtype: torch.dtype) -> bool:
        """Say whether any tensor of this type comes back bit for bit, whenever it is encoded."""

    def state(self) -> dict[str, Tensor]:
        """Tensors that `restore` needs; empty when nothing was learned."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up a saved state.

        Raises:
            KeyError: A part is missing.
            ValueError: The parts do not fit each other, or not this codec's settings.
        """
