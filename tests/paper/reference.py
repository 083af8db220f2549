"""A plain implementation of the paper's Algorithm 1, and helpers for the tests of this folder."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask, plain_answer
from tests.tiny_models import BARE, CLASSIFIERS, build, states

LAYERS = {
    "bert": "encoder.layer",
    "roberta": "encoder.layer",
    "distilbert": "transformer.layer",
    "gpt2": "h",
    "llama": "layers",
    "t5": "encoder.block",
    "bart": "layers",
    "mpnet": "encoder.layer",
}
Make = Callable[[], nn.Module]


class Reference:
    """A model whose layers follow Algorithm 1, for one request at a time; a bank is a list, a search a loop."""

    def __init__(self, family: str, tau: float | dict[int, float], per_layer: bool = False) -> None:
        self.model: Any = build(BARE[family])
        layers: Any = self.model.get_submodule(LAYERS[family])
        self.tau = tau if isinstance(tau, dict) else dict.fromkeys(range(len(layers)), tau)
        self.per_layer = per_layer
        self.banks: list[list[tuple[Tensor, Any]]] = [[] for _ in layers]
        self.hits = [0] * len(layers)
        for number, layer in enumerate(layers):
            layer.forward = self._follow(number, layer.forward)

    def ask(self, ids: Tensor, new: list[tuple[int, Tensor, Any]] | None = None) -> Tensor:
        """Return the last states (T, D) of a request (T,). Computed states are stored at once, or appended to `new`."""
        self._new: list[tuple[int, Tensor, Any]] = []
        with torch.inference_mode():
            output = states(self.model(input_ids=ids[None]))[0]
        if new is None:
            self.store(self._new)
        else:
            new += self._new
        return output

    def store(self, new: list[tuple[int, Tensor, Any]]) -> None:
        for number, fingerprint, output in new:
            self.banks[number].append((fingerprint, output))

    def _follow(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if number == 0 or self.per_layer:
                self._fingerprint = nn.functional.normalize(hidden.mean(dim=1), dim=1)[0]  # line 1
            if number not in self.tau:
                return forward(hidden, *args, **kwargs)
            alike = [(float(f @ self._fingerprint), h) for f, h in self.banks[number] if _length(h) == hidden.shape[1]]
            similarity, stored = max(alike, key=lambda one: one[0], default=(-2.0, None))  # line 3
            if similarity >= self.tau[number] - 1e-6:  # line 4
                self.hits[number] += 1
                return stored  # line 5
            output = forward(hidden, *args, **kwargs)  # line 7
            self._new.append((number, self._fingerprint, output))  # line 8
            return output

        return run


def _length(output: Any) -> int:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden.shape[1]


def wrapped(make: Make | str, **settings: Any) -> LLMCache:
    """Wrap a new model; a name means that family's classifier."""
    return LLMCache.wrap(build(CLASSIFIERS[make] if isinstance(make, str) else make), **settings)


def run(model: nn.Module, **inputs: Any) -> Tensor:
    """Run a model in inference mode; return its logits or last states."""
    return states(ask(model, **inputs))


def plain(cache: LLMCache, **inputs: Any) -> Tensor:
    """Return a wrapped model's answer without its cache."""
    return states(plain_answer(cache, **inputs))


def assert_close(found: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    """Compare logits, or states at valid tokens."""
    where: Any = slice(None) if mask is None or found.ndim < 3 else mask.bool()
    torch.testing.assert_close(found[where], expected[where], atol=2e-5, rtol=1e-4)


def served(cache: LLMCache) -> list[bool]:
    """Whether each row of the last call was served."""
    return [outcome.rung == "paper" for outcome in cache.last]
