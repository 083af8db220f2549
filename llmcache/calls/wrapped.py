"""What belongs to one wrapped model; made once, and given to every part of its cache."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmcache.config import CacheConfig
from llmcache.errors import ConfigError, UnsupportedModelError, WrapError
from llmcache.models.adapters import Trunk, device_of, locate, vocabulary_size
from llmcache.models.causal import UNTRIED, Causal
from llmcache.models.causal_trial import Causality
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head, find_head
from llmcache.models.hooks import ALREADY_WRAPPED, is_wrapped
from llmcache.models.packing import PAYLOADS, Payload
from llmcache.models.weights import Weights
from llmcache.request.counters import Counters
from llmcache.reuse.answers import Reading


@dataclass(frozen=True)
class Wrapped:
    """One wrapped model.

    Attributes:
        payload: The hidden states that entries keep for the head.
        read: Reads the logits from the model's output.
        weights: The trunk's, watched.
        coupling: Whether rows of a call affect each other.
        causality: What a decoder allows, and how padding is treated.
        causal: The same, when it was wrapped.
    """

    model: nn.Module
    trunk: Trunk
    head: Head
    payload: Payload
    config: CacheConfig
    tokenizer: Any
    read: Reading
    weights: Weights
    coupling: Coupling
    causality: Causality
    causal: Causal
    counters: Counters

    @classmethod
    def of(cls, model: nn.Module, config: CacheConfig, tokenizer: Any, read: Reading) -> "Wrapped":
        """Look at a model that is about to be wrapped.

        Raises:
            ConfigError: A setting does not suit the model.
            UnsupportedModelError: The layers were not found, or a decoder runs one of them several times.
            WrapError: The model is already wrapped.
        """
        trunk = locate(model, config.adapter)
        vocabulary_size(trunk)  # raises early if unknown: every call needs it
        head = find_head(model, trunk)
        payload = _choose_payload(trunk, head, config)
        if len(set(trunk.layers)) < trunk.depth and trunk.makes_kv and not payload.fits_any_length:
            raise UnsupportedModelError(
                f"{type(trunk.module).__name__}: one layer is run at several places, so its K/V cannot be told apart; "
                "encoders that share layers, and classifiers, can be wrapped"
            )
        if is_wrapped(trunk):
            raise WrapError(ALREADY_WRAPPED)
        weights, counters = Weights(trunk.module), Counters(model=trunk.module)
        coupling, causality, causal = Coupling(trunk, weights), Causality(trunk, weights), UNTRIED
        with suppress(RuntimeError):  # weights that cannot be read yet are read at a later call
            digest = weights.digest()  # hashed now, not in the first request
            if head.observed is not None:
                head.observed.add_digest(digest)
            if weights.unreadable is None:
                coupling.reason(digest)
                causal = causality.of(digest)
        return cls(model, trunk, head, payload, config, tokenizer, read, weights, coupling, causality, causal, counters)

    @property
    def device(self) -> torch.device:
        """The device that entries are kept on."""
        return device_of(self.trunk.module) if self.config.device == "model" else torch.device("cpu")

    @property
    def keeps_tokens(self) -> bool:
        """Whether entries keep the states of every token; else the one vector that a pooled head reads."""
        return not self.payload.fits_any_length


def _choose_payload(trunk: Trunk, head: Head, config: CacheConfig) -> Payload:
    """Return the payload of the setting; `auto`: the states that the head reads."""
    name: str = config.payload
    if name == "auto":
        name = "sequence" if trunk.adapter.is_guess and head.payload != "row" else head.payload
    if name == "mean" and trunk.adapter.is_guess:
        raise ConfigError(
            f"payload='mean': {type(trunk.module).__name__} is not in the adapter table, so whether a norm follows its "
            "last layer is unknown; register an adapter for it, or use payload='sequence'"
        )
    is_enough = name in ("sequence", head.payload) or head.reads == "states" or config.allow_unsafe
    if not is_enough:
        raise ConfigError(
            f"payload={name!r}: this model's {head.name} reads more; use payload={head.payload!r}, 'sequence' or 'auto'"
        )
    return PAYLOADS[name]()
