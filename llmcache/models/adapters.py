"""Where a model keeps its layers, and how their outputs are packed.

The *trunk* is the module that embeds tokens and runs the layers one after another (`BertModel`, `GPT2Model`, an encoder
`T5Stack`). The table `ADAPTERS` gives the path to the layers for each trunk class. Other trunks are recognised by their
structure: the forward takes `input_ids`, and there is a list of layers that take `hidden_states`. The layers are of one
class, or all keep K/V.

Sizes: B rows, T tokens, D hidden width.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from llmcache.errors import ConfigError, UnsupportedModelError
from llmcache.models.arguments import Arguments
from llmcache.models.callables import CallableTrunk
from llmcache.models.hashing import describe
from llmcache.models.model_config import setting

HIDDEN = "hidden_states"
_OLD_CACHE = "past_key_values"
#: What trunks call the K/V cache, as an argument and in an output: `cache` since transformers 5.24.
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else _OLD_CACHE
_HIDDEN_NAMES = (HIDDEN, "hidden_state", "x")
#: What a layer calls the K/V cache.
_CACHES = (CACHE, _OLD_CACHE, "layer_past")
# Other state that a layer keeps between calls; it would be lost if the layer were skipped.
_STATES = frozenset({"past_key_value", "cache_params", "cache", "state", "states", "mems"}) - {CACHE}
_MORE_OUTPUTS = ("output_attentions", "output_hidden_states")
_UNNAMED = object()
_describe = lru_cache(16)(describe)
_LIST_NAMES = ("layer", "layers", "h", "block", "blocks")


def _tensor(hidden: Tensor, layer: nn.Module, passed: Mapping[str, Any]) -> Tensor:
    """Return the output of a skipped layer that returns a plain tensor."""
    return hidden


def _before_attentions(hidden: Tensor, layer: nn.Module, passed: Mapping[str, Any]) -> tuple[Tensor, None]:
    """Return the output of a skipped layer that always returns attentions; unless requested, they are not read."""
    return hidden, None


def _t5_block(hidden: Tensor, block: Any, passed: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, None]:
    """Return the output of a skipped T5 encoder block.

    Block 0 computes the relative position bias and each block passes it on; a block without one silently uses zeros.
    """
    bias = passed.get("position_bias")
    attention = block.layer[0].SelfAttention
    if bias is None and attention.has_relative_attention_bias:
        bias = attention.compute_bias(hidden.shape[1], hidden.shape[1], device=hidden.device)
    return hidden, bias, None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One model family.

    Attributes:
        family: Name of the row.
        trunks: Class names of the module that embeds tokens and runs the layers.
        layers: Dotted path from the trunk to its list of layers.
        norm: Dotted path to the norm after the last layer, or None.
        is_causal: Whether a token attends to earlier tokens only.
        special_ids: Conventional ids of special tokens, used if neither tokenizer nor config names them.
        is_guess: Whether the row was guessed from the structure of an unknown trunk. Then nothing is assumed about
            padding, unless a trial shows that it is heeded, or about modules after the last layer.
        skipped: `(hidden (B, T, D), layer, arguments) -> output` of a layer that is not run, packed like the layer's
            own. None: unknown; layers are skipped only after one has returned nothing but hidden states.
        attention: Dotted path from a layer to its self-attention, which outputs a tensor (B, T, D) or a tuple that
            begins with one; None: unknown, so no fingerprint may read it.
    """

    family: str
    trunks: tuple[str, ...]
    layers: str
    norm: str | None = None
    is_causal: bool = False
    special_ids: tuple[int, ...] = ()
    is_guess: bool = False
    skipped: Callable[[Tensor, Any, Mapping[str, Any]], Any] | None = _tensor
    attention: str | None = None


_BERT_SPECIALS = (100, 101, 102, 103)  # [UNK] [CLS] [SEP] [MASK] of every published BERT vocabulary


def _like_bert(family: str, *trunks: str, **more: Any) -> Adapter:
    return Adapter(family, trunks, "encoder.layer", attention="attention.self", **more)


#: These rows describe transformers' own classes only, not other classes with the same names.
_ROWS = (
    _like_bert("bert", "BertModel", special_ids=_BERT_SPECIALS),
    _like_bert("roberta", "RobertaModel", "XLMRobertaModel", "CamembertModel"),
    _like_bert("electra", "ElectraModel", special_ids=_BERT_SPECIALS),
    _like_bert("deberta", "DebertaModel", "DebertaV2Model", skipped=None),
    _like_bert("rembert", "RemBertModel", skipped=_before_attentions),
    Adapter("distilbert", ("DistilBertModel",), "transformer.layer", attention="attention", special_ids=_BERT_SPECIALS),
    Adapter("mpnet", ("MPNetModel",), "encoder.layer", attention="attention.attn", skipped=None),
    Adapter("modernbert", ("ModernBertModel",), "layers", norm="final_norm", attention="attn", skipped=None),
    Adapter("bart", ("BartEncoder",), "layers", attention="self_attn"),
    Adapter("t5", ("T5Stack",), "block", norm="final_layer_norm", attention="layer.0.SelfAttention", skipped=_t5_block),
    Adapter("gpt2", ("GPT2Model",), "h", norm="ln_f", attention="attn", is_causal=True),
    Adapter(
        "llama",
        ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"),
        "layers",
        norm="norm",
        attention="self_attn",
        is_causal=True,
    ),
)
#: By family.
ADAPTERS: dict[str, Adapter] = {adapter.family: adapter for adapter in _ROWS}


def register_adapter(adapter: Adapter) -> None:
    """Add a family to the table, or replace the family of the same name.

    Args:
        adapter: The row. It is chosen by the class of a model's trunk, or if the setting `adapter` names its family.

    Raises:
        ConfigError: Not an `Adapter`; no trunk classes or no path of the layers; `skipped` does not take three
            arguments; or another family already has one of its classes.
    """
    if not isinstance(adapter, Adapter):
        raise ConfigError(f"adapter: register an Adapter(...), not {adapter!r}")
    if isinstance(adapter.trunks, str) or not adapter.trunks:
        raise ConfigError(f"adapter {adapter.family!r}: name at least one trunk class, as ('MyModel',)")
    if not adapter.layers:
        raise ConfigError(f"adapter {adapter.family!r}: name the path from the trunk to its layers")
    if adapter.skipped is not None:
        try:
            inspect.signature(adapter.skipped).bind(None, None, None)
        except TypeError as error:
            raise ConfigError(f"adapter {adapter.family!r}: skipped takes hidden, layer, passed: {error}") from error
    for other in ADAPTERS.values():
        shared = set(other.trunks) & set(adapter.trunks)
        if shared and other.family != adapter.family:
            raise ConfigError(f"adapter {adapter.family!r}: {sorted(shared)} already belongs to {other.family!r}")
    ADAPTERS[adapter.family] = adapter


@dataclass(frozen=True, slots=True)
class Trunk:
    """The hooked part of a model."""

    module: nn.Module
    layers: tuple[nn.Module, ...]  # first to last
    norm: nn.Module | None  # after the last layer
    adapter: Adapter
    n_configured: int | None  # its config's `num_hidden_layers` when located; None if unset
    directions: tuple[bool, ...] = ()  # result of `_directions` when located
    more_outputs: tuple[str, ...] = _MORE_OUTPUTS  # arguments and config flags that request additional outputs

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def has_same_depth(self) -> bool:
        """Whether its config's `num_hidden_layers` is as when it was located: some trunks run only that many."""
        return bool(self.n_configured == setting(self.config, "num_hidden_layers"))

    @property
    def has_changed_direction(self) -> bool:
        """Whether its attention is causal where its family's is not, or the reverse, or has changed since `locate`.

        transformers drops a mask that a flag makes redundant. If mask and flag disagree, some calls follow the mask and
        others the flag, so a row's states depend on the rows beside it.
        """
        flags = _directions(self.module)
        if self.adapter not in _ROWS:
            return flags != self.directions
        if len(flags) < len(self.directions):  # attention without the flag acts as if it were set
            return True
        named = setting(self.config, "is_causal", _UNNAMED)
        if self.adapter.is_causal:  # the config's flag, if present, overrides the modules' flags
            return False in flags if named is _UNNAMED else not isinstance(named, bool)
        return (not setting(self.config, "is_decoder")) in flags

    @property
    def makes_kv(self) -> bool:
        """Whether its layers produce keys and values for later tokens."""
        return self.adapter.is_causal or bool(setting(self.config, "is_decoder"))

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def attention(self) -> str:
        """Name of the attention implementation, with the code of functions that users registered; "" if unnamed."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = str(setting(self.module.config, "_attn_implementation", ""))
        functions = (table.get(name) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS))
        own = (one for one in functions if one is not None and not str(one.__module__).startswith("transformers."))
        return " ".join((name, *map(_describe, own)))


def locate(model: nn.Module, family: str = "auto") -> Trunk:
    """Return the outermost trunk of a model; for an encoder-decoder, the encoder.

    `family` names its row in the table; `auto`: the row that lists its class, else one guessed from its structure.
    """
    # Both halves of T5 have one class; the decoder half sets `is_decoder`.
    candidates = [module for module in model.modules() if not getattr(module, "is_decoder", False)]
    if family != "auto":
        return _of_family(model, candidates, family)
    by_class = {trunk: adapter for adapter in ADAPTERS.values() for trunk in adapter.trunks}
    for module in candidates:
        if isinstance(module, CallableTrunk):
            is_guess = not module.function.heeds_mask
            return _dissect(module, Adapter("callable", ("CallableTrunk",), "layers", is_guess=is_guess))
        adapter = by_class.get(type(module).__name__)
        if adapter is not None and (adapter not in _ROWS or is_from(module, "transformers")):
            return _dissect(module, adapter)
    guesses = [(module, adapter) for module in candidates if (adapter := _recognise(module))]
    for module, adapter in guesses:
        # A head model or an encoder-decoder looks like the trunk inside it: take the innermost, the encoder first.
        if not any(inner is not module and inner in set(module.modules()) for inner, _ in guesses):
            return _dissect(module, adapter)
    raise UnsupportedModelError(
        f"{type(model).__name__}: no trunk found. Looked for the classes {', '.join(sorted(by_class))}, then for a "
        f"module whose forward takes input_ids and which holds a list ({', '.join(_LIST_NAMES)}) of layers whose "
        f"forward begins with one of {', '.join(_HIDDEN_NAMES)} and keeps no other state than K/V. Describe the "
        "model with llmcache.register_adapter(Adapter(...)), or give wrap() a digest, and it is called as a whole."
    )


def find_others(model: nn.Module, trunk: Trunk) -> dict[str, nn.Module]:
    """Return a model's further encoders, by name: trunks of known classes, or of the located one's, outside of it."""
    kinds = {type(trunk.module).__name__, *(name for one in ADAPTERS.values() for name in one.trunks)}
    within = set(trunk.module.modules())
    parts = ((name, part) for name, part in model.named_modules() if type(part).__name__ in kinds)
    return {name: part for name, part in parts if part not in within and not _is_decoder(part)}


def _is_decoder(module: Any) -> bool:
    return bool(getattr(module, "is_decoder", False) or setting(getattr(module, "config", None), "is_decoder"))


def is_from(module: nn.Module, package: str) -> bool:
    """Whether a package defines the module's class; False for code that came with a checkpoint."""
    return type(module).__module__.split(".")[0] == package


def _of_family(model: nn.Module, candidates: Sequence[nn.Module], family: str) -> Trunk:
    """Return the trunk of the family that the user named, whichever package defines its class."""
    if family not in ADAPTERS:
        raise ConfigError(f"adapter: unknown name {family!r}; known: auto, {', '.join(sorted(ADAPTERS))}")
    adapter = ADAPTERS[family]
    for module in candidates:
        if type(module).__name__ in adapter.trunks:
            return _dissect(module, adapter)
    raise ConfigError(f"adapter={family!r}: {type(model).__name__} holds no {' or '.join(adapter.trunks)}")


def _dissect(module: nn.Module, adapter: Adapter) -> Trunk:
    name = type(module).__name__
    try:
        layers: nn.ModuleList = _follow(module, adapter.layers)
        norm = _follow(module, adapter.norm) if adapter.norm else None
    except AttributeError as error:
        raise UnsupportedModelError(f"{name}: does not match its adapter {adapter.family!r}: {error}") from error
    if len(layers) == 0:
        raise UnsupportedModelError(f"{name}: {adapter.layers} holds no layers, nothing to reuse")
    names = Arguments(module.forward).names
    if adapter.is_causal and _OLD_CACHE in names and CACHE not in names:
        raise UnsupportedModelError(
            f"{name}: its forward takes the K/V cache as {_OLD_CACHE!r}: rename the argument to {CACHE!r}, its name in "
            "transformers since 5.24"
        )
    if not hasattr(module, "config"):
        raise UnsupportedModelError(f"{name}: no config; give it one with vocab_size, as transformers models have")
    n_configured = setting(module.config, "num_hidden_layers")
    return Trunk(module, tuple(layers), norm, adapter, n_configured, _directions(module), _more_outputs(module))


def _directions(module: nn.Module) -> tuple[bool, ...]:
    """Return the `is_causal` flags of the config and of each module, cross-attention excluded."""
    parts = (part for path, part in module.named_modules() if "cross" not in path)
    flags = (getattr(one, "is_causal", None) for one in (module.config, *parts))
    return tuple(one for one in flags if isinstance(one, bool))


def _more_outputs(module: nn.Module) -> tuple[str, ...]:
    """Return names of `output_...` arguments: outputs that the class records, and boolean flags of its config."""
    recorded = getattr(module, "_can_record_outputs", None) or {}
    settings = getattr(getattr(module, "config", None), "__dict__", {})
    flags = (name for name, value in settings.items() if name.startswith("output_") and isinstance(value, bool))
    return tuple(dict.fromkeys((*_MORE_OUTPUTS, *(f"output_{what}" for what in recorded), *flags)))


def first_attention(trunk: Trunk) -> nn.Module:
    path, trunk_name = trunk.adapter.attention, type(trunk.module).__name__
    fix = f"register an adapter with its path: Adapter({trunk.adapter.family!r}, ..., attention='attention.self')"
    if path is None:
        raise ConfigError(f"{trunk_name}: the path to the self-attention of its layers is not known; {fix}")
    try:
        attention: nn.Module = _follow(trunk.layers[0], path)
    except AttributeError as error:
        raise ConfigError(f"{trunk_name}: its layers have no self-attention at {path!r} ({error}); {fix}") from error
    return attention


def _follow(module: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), module)


def _recognise(module: nn.Module) -> Adapter | None:
    """Return a guessed adapter for a trunk that is not in the table; None if the module is no trunk."""
    taken = Arguments(module.forward).names if hasattr(module, "config") else ()
    if "input_ids" not in taken:
        return None
    for path, layers in module.named_modules():
        parts = path.split(".")
        is_list = isinstance(layers, nn.ModuleList) and len(layers) > 0
        if not is_list or len(parts) > 2 or parts[-1] not in _LIST_NAMES:  # in the module or in a child of it
            continue
        forwards = [Arguments(layer.forward).names for layer in layers]
        are_like_layers = all(
            names[:1] and names[0] in _HIDDEN_NAMES and not _STATES & set(names) for names in forwards
        )
        keeps_kv = all(cache_name(names) in names for names in forwards)
        is_of_one_class = len({type(layer) for layer in layers}) == 1
        if are_like_layers and (keeps_kv or (is_of_one_class and not {CACHE, _OLD_CACHE} & set(taken))):
            name = type(module).__name__
            return Adapter(name, (name,), path, is_causal=keeps_kv, is_guess=True, skipped=None)
    return None


def cache_name(names: Sequence[str]) -> str:
    """Return what a layer with arguments of these names calls the K/V cache."""
    return next((name for name in _CACHES if name in names), CACHE)


def find_reason_of_layers(trunk: Trunk) -> str | None:
    """Return why a call bypasses the wrapped layers, a key of `bypass.CURES`; None if the trunk runs them in order."""
    if any(layer._compiled_call_impl for layer in trunk.layers):
        return "compiled_layers"
    try:
        held = _follow(trunk.module, trunk.adapter.layers)
        is_intact = tuple(held) == trunk.layers and all("forward" in vars(layer) for layer in trunk.layers)
    except (AttributeError, TypeError):
        is_intact = False
    return None if is_intact else "other_layers"


def unpack(output: Any) -> Tensor:
    """Return the hidden states (B, T, D) of a layer's output: a tensor, or a tuple or list that begins with it."""
    hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def repack(output: Any, hidden: Tensor) -> Any:
    if isinstance(output, list):
        return [hidden, *output[1:]]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def special_ids(trunk: Trunk, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the sorted ids of the tokenizer's special tokens; without a tokenizer, of the config's and family's."""
    named: Sequence[int]
    if tokenizer is not None:
        named = tokenizer.all_special_ids
    else:
        names = ("pad", "bos", "eos", "cls", "sep", "unk", "mask", "decoder_start")
        values = (getattr(trunk.config, f"{name}_token_id", None) for name in names)
        listed = (value if isinstance(value, list) else [value] for value in values if value is not None)
        named = (*(token for value in listed for token in value), *trunk.adapter.special_ids)
    return tuple(sorted({int(token) for token in named if 0 <= token < vocabulary_size(trunk)}))


def vocabulary_size(trunk: Trunk) -> int:
    module: Any = trunk.module
    embedding = None
    with suppress(AttributeError, NotImplementedError):  # not a transformers model, or one with several embeddings
        embedding = module.get_input_embeddings()
    size = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else setting(trunk.config, "vocab_size")
    if size is None:
        raise UnsupportedModelError(f"{type(module).__name__}: it has no token embedding, its config no vocab_size")
    return int(size)


def first_position(trunk: nn.Module) -> int:
    """Return the position of the first token in a call without positions: RoBERTa counts from the padding id plus 1."""
    tables = (part for name, part in trunk.named_modules() if name.endswith("position_embeddings"))
    padding = [getattr(table, "padding_idx", None) for table in tables]
    return max((one + 1 for one in padding if one is not None), default=0)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters; the CPU if it has none."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device
