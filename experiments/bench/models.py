"""Models to measure: real architectures with random weights, or a trained one from a folder."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmcache import ConfigError

HEADS = {"class": "AutoModelForSequenceClassification", "token": "AutoModelForCausalLM"}
ARCHITECTURES = {"bert-base": "bert", "distilbert": "distilbert", "gpt2": "gpt2"}


@dataclass(slots=True)
class Pair:
    """A model, its twin without layers, and where the weights came from."""

    model: nn.Module
    floor: nn.Module
    weights: str


def build(name: str, seed: int, device: str, head: str = "class", dtype: str = "float32") -> Pair:
    """A model with a head and the same one with zero layers (embeddings and head only).

    Args:
        name: A key of `ARCHITECTURES`, or a folder or hub name for `from_pretrained`.
        seed: Of random weights.
        device: Torch device.
        head: `class`, a sequence classifier, or `token`, a causal language model.
        dtype: Of the weights.

    Raises:
        ConfigError: Neither a known name nor a model.
    """
    import transformers

    torch.manual_seed(seed)
    auto = getattr(transformers, HEADS[head])
    if name in ARCHITECTURES:
        config = transformers.AutoConfig.for_model(ARCHITECTURES[name], num_labels=2, pad_token_id=0)
        model, weights = auto.from_config(config), "random"
    else:
        try:
            model, weights = auto.from_pretrained(name), str(Path(name).name)
        except (OSError, ValueError) as error:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"--model {name}: not one of {known}, nor a model folder: {error}") from error
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 0
    target = {"device": device, "dtype": getattr(torch, dtype)}
    return Pair(model.eval().to(**target), auto.from_config(config).eval().to(**target), weights)


def synchronise(device: Any) -> None:
    """Wait until an accelerator has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Shortcut:
    """Layers that can be told to pass their input through, so that a cache is filled without computing.

    The stored states are then wrong, which costs the clock nothing: this is for measuring only. Install before
    wrapping; the cache keeps what it finds.
    """

    is_open: bool = field(default=False)

    def install(self, layers: nn.ModuleList) -> None:
        """Put a switch before each layer's forward."""
        for layer in layers:
            layer.forward = self._switch(layer.forward)

    def _switch(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden_states if self.is_open else forward(hidden_states, *args, **kwargs)

        return run

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within: layers compute nothing."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The model's list of layers: the longest list of modules in it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers to measure")
    return max(lists, key=len)


def check_device(device: str) -> None:
    """Raise `ConfigError` unless a tensor can be made there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {device}: {str(error).splitlines()[0]}") from error


def check_length(config: Any, seq_len: int) -> None:
    """Raise `ConfigError` unless the model has a position for every token."""
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and seq_len > most:
        raise ConfigError(f"--seq-len {seq_len}: this model takes at most {most} tokens")


class Requests:
    """Random requests, all tokens valid, each of its own few words.

    Means over many random tokens are all alike; means over `WORDS` different ones are about as unlike as those of real
    requests, so that a fresh request misses and one with a single token changed hits.
    """

    WORDS = 8

    def __init__(self, config: Any, batch_size: int, seq_len: int, seed: int, device: str) -> None:
        """Requests (batch_size, seq_len) of ids from 1000 up, where the vocabulary has room."""
        self._low = min(1000, config.vocab_size // 4)
        self._high = config.vocab_size
        self._shape = (batch_size, seq_len)
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def fresh(self, n_rows: int | None = None) -> Tensor:
        """Ids (B, T) never asked before, int64."""
        n_rows = n_rows or self._shape[0]
        words = torch.randint(self._low, self._high, (n_rows, self.WORDS), generator=self._generator)
        order = torch.randint(self.WORDS, (n_rows, self._shape[1]), generator=self._generator)
        return words.gather(1, order)

    def near(self, ids: Tensor) -> Tensor:
        """The same ids with one token of each row replaced."""
        changed = ids.clone()
        place = torch.randint(1, ids.shape[1] - 1, (ids.shape[0], 1), generator=self._generator)
        return changed.scatter_(1, place, self.fresh(ids.shape[0])[:, :1])

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """What the model is called with."""
        ids = ids.to(self._device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
