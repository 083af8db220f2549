"""Models to measure: real architectures with random weights, or a trained one from a folder."""

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml
from torch import Tensor, nn

from llmcache import ConfigError
from llmcache.lab import asking, cause, locate, quiet

HEADS = {"class": "AutoModelForSequenceClassification", "token": "AutoModelForCausalLM", "states": "AutoModel"}

#: Shapes by name: transformers' model type, and settings that differ from its defaults.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))

#: Dtypes of weights and states.
Dtype = Literal["float32", "bfloat16"]


@dataclass(slots=True)
class Pair:
    """A model, the same model without layers, and the source of its weights."""

    model: nn.Module
    floor: nn.Module
    weights: str


def build(name: str, seed: int, device: str, head: str = "class", dtype: str = "float32") -> Pair:
    """Return a model with a head (`class` or `token`), and a copy with zero layers: embeddings and head only."""
    import transformers

    check_target(device, dtype)
    auto = getattr(transformers, HEADS[head])
    is_random = name in ARCHITECTURES
    torch.manual_seed(seed)  # for a head that is missing from the weights
    with _explained(name):
        model = random_model(name, seed, head) if is_random else auto.from_pretrained(name)
    # One call reads no K/V. Making it would slow the plain model, and layers that pass their input through make none.
    model.config.use_cache = False  # generation turns it on itself
    weights = "random" if is_random else Path(name).name
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 0
    target = {"device": device, "dtype": getattr(torch, dtype)}
    return Pair(model.eval().to(**target), auto.from_config(config).eval().to(**target), weights)


def random_model(name: str, seed: int, head: str) -> nn.Module:
    """Return a randomly initialised model of a known architecture with a head of `HEADS`, in eval mode."""
    import transformers

    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, HEADS[head]).from_config(_configure(name))
    return model.eval()


def check(name: str, seq_len: int, head: str = "class") -> None:
    """Raise `ConfigError`, before loading weights, if a model cannot be measured. Head `token` needs a causal model."""
    import transformers

    config = _configure(name)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and seq_len > most:
        raise ConfigError(f"seq_len: {name} takes at most {most} tokens (got {seq_len})")
    with _explained(name), torch.device("meta"):
        model = getattr(transformers, HEADS[head]).from_config(config)
    # transformers also puts a language-model head on an encoder; its output is no generation.
    if head == "token" and not locate(model).makes_kv:
        raise ConfigError(f"{name} is no causal language model; give one, gpt2 for instance")


def _configure(name: str) -> Any:
    import transformers

    if name in ARCHITECTURES:
        return transformers.AutoConfig.for_model(**ARCHITECTURES[name], num_labels=2, pad_token_id=0)
    with _explained(name):
        return transformers.AutoConfig.from_pretrained(name)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors of transformers while loading a model into `ConfigError`."""
    try:
        with quiet() if Path(name).is_dir() else asking(name):
            yield
    except (OSError, ValueError) as error:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"model: {name} is none of {known}, nor a model that can be loaded ({cause(error)})"
        ) from error


def check_target(device: str, dtype: str) -> None:
    """Raise `ConfigError` unless the dtype is supported and the device exists."""
    if dtype not in get_args(Dtype):
        raise ConfigError(f"dtype: give {' or '.join(get_args(Dtype))} (got {dtype!r})")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device: {reason} (got {device!r}); give one that this machine has, or cpu") from error


@dataclass(slots=True)
class Shortcut:
    """Lets layers pass their input through, so that a cache is filled without computing.

    The stored states are then wrong; this does not affect timing. For measuring only. Install before wrapping: the
    cache keeps the forwards it finds.
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
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


def find_layers(model: nn.Module) -> nn.ModuleList:
    """Return the model's list of layers: its longest `ModuleList`."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers to measure")
    return max(lists, key=len)


class Requests:
    """Draws random requests, all tokens valid, each made of `WORDS` words of its own.

    Means over many random tokens are all alike. Means over `WORDS` different tokens differ about as much as those of
    real requests, so a fresh request misses and one with a single token changed hits.
    """

    WORDS = 8

    def __init__(self, config: Any, batch_size: int, seq_len: int, seed: int, device: str) -> None:
        """Draw requests (batch_size, seq_len) with ids from 1000 up, or lower if the vocabulary is small."""
        self._low = min(1000, config.vocab_size // 4)
        self._high = config.vocab_size
        self._shape = (batch_size, seq_len)
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def fresh(self, n_rows: int | None = None) -> Tensor:
        """Return new random ids (B, T), int64."""
        n_rows = n_rows or self._shape[0]
        words = torch.randint(self._low, self._high, (n_rows, self.WORDS), generator=self._generator)
        order = torch.randint(self.WORDS, (n_rows, self._shape[1]), generator=self._generator)
        return words.gather(1, order)

    def near(self, ids: Tensor) -> Tensor:
        """Return the ids with one token of each row replaced."""
        changed = ids.clone()
        place = torch.randint(1, ids.shape[1] - 1, (ids.shape[0], 1), generator=self._generator)
        return changed.scatter_(1, place, self.fresh(ids.shape[0])[:, :1])

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        ids = ids.to(self._device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
