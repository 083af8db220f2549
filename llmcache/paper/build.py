"""Builds a layer-wise cache from settings and a model, and refuses settings that do not suit the model."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from llmcache.calls.core import pass_others
from llmcache.calls.wrapped import Wrapped
from llmcache.config import CacheConfig
from llmcache.errors import ConfigError
from llmcache.memory.index import INDEXES
from llmcache.memory.policies import POLICIES
from llmcache.models.adapters import Trunk, locate
from llmcache.models.heads import refuse_unsafe
from llmcache.models.packing import Payload
from llmcache.paper.bank import LayerBank
from llmcache.paper.banks import Banks
from llmcache.paper.codecs import CODECS
from llmcache.paper.fingerprints import FINGERPRINTS
from llmcache.paper.layerwise import Layerwise
from llmcache.reuse.answers import read_logits


def build(model: nn.Module, config: CacheConfig, tokenizer: Any = None) -> Layerwise:
    """Wrap a model with a layer-wise cache.

    Args:
        model: Model with or without a head.
        config: Settings; `tau` is set.
        tokenizer: Its special tokens are excluded from fingerprints; None: those of the model's config and family.

    Raises:
        ConfigError: A setting does not suit the model.
        UnsafeReuseError: The head answers token by token.
        UnsupportedModelError: The layers were not found, or a decoder runs one of them several times.
        WrapError: The model is already wrapped.
    """
    last = locate(model, config.adapter).depth - 1
    if config.payload == "auto" and config.layers not in ("last", [-1], [last]):
        config = config.model_copy(update={"payload": "sequence"})  # later layers are computed from it
    wrapped = Wrapped.of(model, config, tokenizer, read_logits)
    trunk, payload = wrapped.trunk, wrapped.payload
    refuse_unsafe(wrapped.head, config)
    tau = _choose_layers(trunk, payload, config)
    is_ahead = config.layers not in ("auto", "all")
    fingerprint = config.fingerprint_component.build(FINGERPRINTS)
    if fingerprint.per_layer and is_ahead:
        raise ConfigError(
            f"layers={config.layers} with a fingerprint per layer: these banks are searched before layer 0; leave "
            "layers out, or per_layer"
        )
    with suppress(RuntimeError):  # weights that cannot be read yet are read at a later call
        digest = wrapped.weights.digest()
        if wrapped.weights.unreadable is None and (reason := wrapped.coupling.reason(digest)):
            raise ConfigError(
                f"tau={config.tau} with a model in which requests of a batch affect each other: {reason}. A stored "
                "answer depends on the rest of its batch: leave tau out (repeats of whole calls are still served)"
            )
    config.index_component.build(INDEXES, 8)  # reports a wrong option now
    max_bytes = max(1, config.max_bytes // len(tau))

    def make_bank() -> LayerBank:
        return LayerBank(
            config.policy.build(POLICIES),
            lambda: config.compression.build(CODECS),
            lambda dim: config.index_component.build(INDEXES, dim),
            max_bytes,
            config.max_entries,
        )

    banks = Banks({layer: make_bank() for layer in tau}, tau, fingerprint, wrapped.device)
    made = Layerwise(wrapped, fingerprint, banks, is_ahead)
    pass_others(model, trunk, made, made.installed)
    return made


def _choose_layers(trunk: Trunk, payload: Payload, config: CacheConfig) -> dict[int, float]:
    """Return the least similarity of a hit for each layer that has a bank."""
    last, named = trunk.depth - 1, config.layers
    if isinstance(named, list):
        layers = {layer + trunk.depth * (layer < 0) for layer in named}
    else:
        layers = {last} if named == "last" else set(range(trunk.depth))
    if not layers or min(layers) < 0 or max(layers) > last:
        raise ConfigError(f"layers={named}: this model has layers 0 to {last}; name at least one of them")
    if payload.fits_any_length and layers != {last}:
        raise ConfigError(
            f"payload={payload.name!r} keeps one vector, from which no further layer can be computed: set "
            "layers='last', or payload='sequence'"
        )
    if not isinstance(config.tau, Mapping):
        assert config.tau is not None
        return dict.fromkeys(sorted(layers), config.tau)
    tau = {layer + trunk.depth * (layer < 0): value for layer, value in sorted(config.tau.items())}
    if stray := sorted(tau.keys() - layers):
        raise ConfigError(f"tau: names layers {stray} that are not stored; stored: {sorted(layers)}")
    return tau
