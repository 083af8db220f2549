"""Whole models in ONNX Runtime, head included and without llmcache: what a service on a CPU runs otherwise.

Graphs are made and run as by `llmcache.engines.onnx`: attention as one operator, norms not fused with sums.

Sizes: B rows, T tokens, C outputs.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from experiments.models.loading import Inputs
from llmcache.lab import open_session, untransposed


class OnnxModel(nn.Module):
    """`module(**inputs)` returns the graph's output (B, C). Computes on torch's number of threads when it is made."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._session = open_session(path)
        self._names = [one.name for one in self._session.get_inputs()]

    def forward(self, **inputs: Tensor) -> Tensor:
        (output,) = self._session.run(None, {name: inputs[name].numpy() for name in self._names})
        return torch.from_numpy(output)

    def __deepcopy__(self, known: Any) -> Self:
        """Return the model itself: it has no state of its own."""
        return self


def export(module: nn.Module, inputs: Inputs, path: Path) -> Path:
    """Write a model with one output as a graph with any number of rows and tokens; return its path."""
    two = {name: value.repeat(2, 1) for name, value in inputs.items()}  # 1 row would be taken for a constant
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            _ByPosition(module, list(two)).eval(),
            tuple(two.values()),
            dynamo=True,
            input_names=list(two),
            dynamic_shapes=((sizes,) * len(two),),
            opset_version=23,
            verbose=False,
        )
        assert program is not None
        program.model = untransposed(program.model)
        program.save(path)
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings, and the exporter's remarks on packages that it does not need."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class _ByPosition(nn.Module):
    """A model whose named inputs are given by position, as the exporter wants them."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module, self._names = module, names

    def forward(self, *values: Tensor) -> Any:
        named: Mapping[str, Tensor] = dict(zip(self._names, values, strict=True))
        return self.module(**named)
