"""The structure of a callable's output: which tensors are in it, and how to build it again from rows of them.

Sizes: B rows of a call, T tokens of a row, D width of a state, C logits.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.models.packing import parts_of


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a callable's output: (B, *shape), or (B, T, *shape) if it is `by_token`."""

    name: Any  # as of `fields_of`
    is_array: bool  # of NumPy
    by_token: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, value: Any, n_rows: int, n_tokens: int) -> Tensor | None:
        """Return a value as a tensor; None if it is not this part in a call of (B, T) tokens."""
        tensor = tensor_of(value)
        shape = (n_rows, n_tokens, *self.shape) if self.by_token else (n_rows, *self.shape)
        is_alike = isinstance(tensor, Tensor) and (tensor is not value) == self.is_array and tensor.shape == shape
        return tensor if is_alike and tensor.dtype == self.dtype else None


@dataclass(frozen=True, slots=True)
class Structure:
    """How a callable's output is taken apart into tensors for the cache, and built again."""

    kind: type  # its class
    names: tuple[Any, ...]  # of all its fields, in order; those without a part are None
    parts: tuple[Part, ...]  # its tensors, logits or states first
    #: Name of the logits: the field `logits`, else the first float tensor (B, C). None: none, or a part is by token.
    answer: Any

    @classmethod
    def learn(cls, output: Any, ids: Tensor, other: Any, other_ids: Tensor) -> "Structure | None":
        """Return the structure of an output for ids (B, T), compared with that for shorter ones (None: unknown)."""
        fields = {name: tensor_of(value) for name, value in fields_of(output).items()}
        others = fields if other is None else {name: tensor_of(value) for name, value in fields_of(other).items()}
        parts = []
        for name, value in fields.items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or not value.ndim or len(value) != len(ids):
                return None
            shape, other_shape = tuple(value.shape), tuple(getattr(others.get(name), "shape", ()))
            by_token = value.ndim > 1 and shape[1] == ids.shape[1] and (other is None or other_shape != shape)
            if by_token and value.ndim > 3:
                return None
            wanted = (len(other_ids), other_ids.shape[1], *shape[2:]) if by_token else shape
            if other is not None and other_shape != wanted:
                return None
            is_array = isinstance(fields_of(output)[name], np.ndarray)
            parts.append(Part(name, is_array, by_token, shape[1 + by_token :], value.dtype))
        if not parts:
            return None
        is_pooled = not any(part.by_token for part in parts)
        logits = [one.name for one in parts if len(one.shape) == 1 and one.dtype.is_floating_point and is_pooled]
        answer = "logits" if "logits" in logits else next(iter(logits), None)
        # The cache takes states from the first part: logits, else one by token.
        parts.sort(key=lambda part: (part.name != answer, not part.by_token, not part.shape))
        return cls(type(output), tuple(fields), tuple(parts), answer)

    @property
    def is_by_token(self) -> bool:
        """Whether a part has one row per token: it fits only requests of as many tokens."""
        return any(part.by_token for part in self.parts)

    def take_apart(self, output: Any, n_rows: int, n_tokens: int) -> tuple[Tensor, ...] | None:
        """Return the parts of an output as tensors of two dimensions or more; None if it has another structure."""
        fields = fields_of(output)
        if type(output) is not self.kind or tuple(fields) != self.names:
            return None
        tensors: list[Tensor] = []
        for part in self.parts:
            if (tensor := part.read(fields.pop(part.name), n_rows, n_tokens)) is None:
                return None
            tensors.append(self._widened(tensor, part))
        return None if any(value is not None for value in fields.values()) else tuple(tensors)

    def _widened(self, value: Tensor, part: Part) -> Tensor:
        """Return a part as states (B, T, D), or as rows: (B, 1, ...) if no part is by token."""
        if part.by_token:
            return value if part.shape else value[..., None]
        return value if part.shape and self.is_by_token else value[:, None]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        fields: dict[Any, Any] = dict.fromkeys(self.names)
        for part, tensor in zip(self.parts, tensors, strict=True):
            if tensor.ndim > 1 + part.by_token + len(part.shape):
                tensor = tensor[..., 0] if part.by_token else tensor[:, 0]
            fields[part.name] = tensor.numpy() if part.is_array else tensor
        if self.kind in (Tensor, np.ndarray):
            return fields[0]
        if issubclass(self.kind, tuple | list):
            return self.kind(*fields.values()) if hasattr(self.kind, "_fields") else self.kind(fields.values())
        return self.kind(fields) if self.kind is dict else self.kind(**fields)

    def can_build(self, whole: Sequence[Tensor]) -> bool:
        """Whether an output can be built: its class may take other arguments than its fields."""
        try:
            return type(self.build(whole)) is self.kind
        except Exception:  # whatever the class raises
            return False


def fields_of(output: Any) -> dict[Any, Any]:
    """Return the fields of an output by name or index; of a dataclass that is no mapping, by name."""
    if is_dataclass(output) and not isinstance(output, Mapping):
        return {one.name: getattr(output, one.name) for one in dataclass_fields(output)}
    return parts_of(output)


def tensor_of(value: Any) -> Any:
    """Return an array as a tensor, which shares its memory if it may be written; other values as they are."""
    if not isinstance(value, np.ndarray):
        return value
    with suppress(TypeError):  # torch has no such dtype
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return value
