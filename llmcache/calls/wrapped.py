"""What belongs to one wrapped model; made once, and given to every part of its cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmcache.config import CacheConfig
from llmcache.models.adapters import Trunk, device_of
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.packing import Payload
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
    counters: Counters

    @property
    def device(self) -> torch.device:
        """The device that entries are kept on."""
        return device_of(self.trunk.module) if self.config.device == "model" else torch.device("cpu")

    @property
    def keeps_tokens(self) -> bool:
        """Whether entries keep the states of every token; else the one vector that a pooled head reads."""
        return not self.payload.fits_any_length
