"""A sentence-transformers model whose trunk is served one vector a text, and what is owed to who reads more.

Between trunk and pooling nobody else reads the states (`pooling.Pooled`), so that one vector may stand for all tokens
of a text there. What the model puts out holds the states as well: they are computed when somebody reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from llmcache.models.hooks import Listener, Swap

_TOKENS = "token_embeddings"
Compute = Callable[[], Any]


class Features(dict[str, Any]):
    """What the model puts out: a dict. States of tokens that were left out are computed when they are first read."""

    def __init__(self, features: Mapping[str, Any], compute: Compute) -> None:
        """Hold the same; `compute` makes the states."""
        super().__init__(features)
        self._compute: Compute | None = compute

    def __getitem__(self, key: str) -> Any:
        if key == _TOKENS and self._compute is not None:
            compute, self._compute = self._compute, None
            super().__setitem__(key, compute())
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == _TOKENS:
            self._compute = None
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:  # its own, so that dict() asks for each value
        return super().__iter__()

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self[key]
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        for key in reversed(self):
            return key, self.pop(key)
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> Any:
        return self._read().items()

    def values(self) -> Any:
        return self._read().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    __hash__ = None

    def _read(self) -> dict[str, Any]:
        """The same as a dict of its own, all computed."""
        return {key: self[key] for key in self}


class SentenceSwap(Swap):
    """Stands in for the forward of a sentence-transformers model: tells the trunk that its states will be pooled."""

    def __init__(self, module: torch.nn.Module, listener: Listener, pooled: ContextVar[list[Compute] | None]) -> None:
        """Take the forward's place; within it, the trunk adds to `pooled` what computes states that it left out."""
        super().__init__(module, listener)
        self._pooled = pooled

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the model puts out."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        left_out: list[Compute] = []
        token = self._pooled.set(left_out)
        try:
            output = self.original(*args, **kwargs)
        finally:
            self._pooled.reset(token)
        return Features(output, left_out[-1]) if left_out else output


def later(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Compute:
    """Computes a trunk's states of these arguments, which are copied: without gradients, in the autocast of now."""
    is_on = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_on else None

    args, kwargs = tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}

    def compute() -> Any:
        with torch.no_grad(), torch.autocast(device, dtype, enabled=is_on):
            return run(*args, **kwargs)[0]

    return compute


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
