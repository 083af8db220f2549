"""DocCache, the paper's document-level baseline: the final state of the nearest stored document.

The paper names it without describing it. Here, a document is the whole request. Its embedding is the mean of the
model's own word embeddings, without special tokens. If the nearest stored document has a cosine of at least
`threshold`, the head reads that document's final hidden states. Documents may differ in length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import nn

from experiments.methods.base import COMPUTED, Method, Served
from experiments.models.loading import Inputs, token_rows
from experiments.support.nearest import Nearest, unit
from experiments.support.section import Section
from experiments.tasks.workload import Answer, Workload
from llmcache import ConfigError
from llmcache.lab import locate, special_ids


@dataclass(frozen=True, slots=True)
class _Document:
    number: int
    inputs: Inputs
    output: Any


class Recall(nn.Module):
    """Replaces the trunk: runs it, or returns an earlier output of it."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.output: Any = None  # output to return instead of running; after a run, its output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.output is None:
            self.output = self.trunk(*args, **kwargs)
        return self.output

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the trunk, such as the config that heads read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("trunk"), name)


class DocCache(Method):
    class Settings(Section):
        threshold: float = Field(default=0.9, ge=-1.0, le=1.0)  # least cosine between document embeddings

    def __init__(self, workload: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(workload, options)
        trunk = locate(self._module)
        self._words = trunk.module.get_input_embeddings()
        self._specials = torch.tensor(special_ids(trunk, workload.tokenizer))
        self._recall = Recall(trunk.module)
        _replace(self._module, trunk.module, self._recall)

    def begin(self) -> None:
        self._documents = Nearest()
        super().begin()

    def ask(self, number: int) -> Answer:
        """Run the head on the nearest document's final states, or compute and store them."""
        inputs = self._workload.requests[number].inputs
        vector = self.embed(inputs)
        found, alike = self._documents.find(vector, self._settings.threshold)
        self._recall.output = None if found is None else found.output
        output = self._module(**(inputs if found is None else found.inputs))
        answer = self._workload.answer(output, number)
        if found is None:
            self._documents.add(vector, _Document(number, inputs, self._recall.output))
        self._last = Served(COMPUTED if found is None else "document", found and found.number, alike)
        return answer

    @property
    def nbytes(self) -> int:
        held = (value for one in self._documents.kept for value in (*one.inputs.values(), *one.output.values()))
        # K/V, which the head does not read, is no tensor.
        return self._documents.nbytes + sum(int(value.nbytes) for value in held if isinstance(value, torch.Tensor))

    @property
    def n_entries(self) -> int:
        return len(self._documents.kept)

    def embed(self, inputs: Inputs) -> Any:
        """Return the mean word embedding of all rows' content, float32 (D,) of L2 norm 1."""
        ids, valid = token_rows(inputs)
        kept = ids[valid & ~torch.isin(ids, self._specials)]
        mean = self._words(kept).mean(dim=0) if len(kept) else torch.zeros(self._words.weight.shape[1])
        return unit(mean.float().numpy())


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if child is old:
                setattr(module, name, new)
                return
    raise ConfigError(f"this method needs a model with a head, got a bare {type(model).__name__}; leave the method out")
