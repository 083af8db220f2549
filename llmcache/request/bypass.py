"""Reasons why a call bypasses the cache and is computed as without one, each with its cure."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import Parameter

from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import DECIDING
from llmcache.models.model_config import setting

CURES: dict[str, str] = {
    "disabled": "the call was made inside cache.disabled(), or LLMCACHE_DISABLE is set",
    "compiled": "a compiled or traced model runs a graph of its own: leave the model uncompiled, and have the cache "
    "compile what it computes by cache.compile()",
    "traced": "the call is traced, transformed or watched (make_fx, torch.func, forward-mode AD, FlopCounterMode or "
    "another mode of torch, a CUDA graph, a tensor subclass), which must see it computed: call the model outside it",
    "training": "the model is in training mode: call model.eval()",
    "gradients": "gradients are on: call cache(**inputs), or the model under torch.inference_mode() or torch.no_grad()",
    "other_depth": "config.num_hidden_layers is not what it was when the model was wrapped, so other layers run: wrap "
    "it again (drafts of assistant_early_exit set it back by themselves)",
    "other_layers": "the layers that run are not those that were wrapped, each once and in order (one was replaced, "
    "added, deleted, compiled with what is around it, lost its forward, or is run by a hook): call cache.unwrap() and "
    "wrap the model again",
    "compiled_layers": "a layer was compiled by layer.compile(), whose graph leaves the cache out: put "
    "torch.compile(layer) in the layer's place before the model is wrapped",
    "unwrapped": "the cache was unwrapped during the call, which was then recomputed",
    "decode": "a decode step extends K/V that the caller already holds; only prefill is cached",
    "inputs_embeds": "the input is inputs_embeds, which has no tokens to look up: pass input_ids",
    "output_attentions": "attentions were requested, which skipped layers do not compute: turn output_attentions off",
    "output_hidden_states": "all hidden states were requested: turn output_hidden_states off (argument and config)",
    "more_output": "outputs besides the last hidden states were requested (router logits, say), which skipped layers "
    "do not compute: turn that output_... off (argument and config). Otherwise the output is not made of tensors (of a "
    "callable: or arrays) with one row per row of the input, so it cannot be stored by request",
    "cross_attention": "the model attends to an encoder's states, which are not part of the key",
    "input_shape": "input_ids, token_type_ids and position_ids are not all integers (batch, tokens), or (1, tokens)",
    "unknown_layout": "the first layer's input is not (batch, tokens, width): register an adapter for this model",
    "unknown_output": "its layers return more than states: register an adapter that says what a skipped layer returns",
    "hooked": "modules in the trunk have hooks, which must see all tokens: remove them to have requests served",
    "token_types": "K/V was requested together with token types, which prefix blocks do not distinguish: leave "
    "token_type_ids out, or pass use_cache=False",
    "prefix_off": "K/V was requested, and prefix=False: set prefix, or pass use_cache=False",
    "inference_weights": "the weights were made under torch.inference_mode(), where edits to them cannot be seen: "
    "load the model outside of it",
    "unseen_weights": "weights are kept where they cannot be read (scripted modules, sparse or packed tensors), so "
    "edits would go unseen: wrap the model before it is scripted or converted",
    "meta_weights": "weights are on the meta device between calls, as accelerate's cpu_offload() and disk_offload() "
    "leave them: load the model to one device",
    "weights_changed": "weights or settings of the model were edited just before or while the call ran, so nothing "
    "of it was stored: if each call says so, keep what a forward counts or logs outside of the trunk's modules",
    "gradients_held": "the weights hold gradients, so an optimizer may write them unseen in each call: call "
    "optimizer.zero_grad() before the model is evaluated",
    "other_attention": "is_causal of an attention layer or of the config is not what this family has, or not what it "
    "was when the model was wrapped, so a row's states depend on the padding of the rows beside it: set it back",
    "coupled_rows": "rows of a call affect each other since the model was edited (quantised, say), so no other request "
    "can stand for a row: wrap it without tau",
    "adapter_names": "PEFT computes each row with adapters of its own (adapter_names, X-LoRA): use one adapter a batch",
    "mask_4d": "the attention mask is neither (batch, tokens) nor the causal one that generate() makes for a static "
    "cache: pass the tokenizer's 2-D mask",
    "mask_values": "the attention mask holds other values than 0 and 1, by which some models multiply: pass 0 and 1",
    "packed": "position_ids restart within a row that has no attention mask: depending on other arguments, models take "
    "that for several texts in one row (for a classifier on a causal model, positions without a mask are reason "
    "enough); pass one text a row, or an attention mask",
    "unknown_argument": "an argument besides tokens, mask, types and positions may change the hidden states: leave out "
    "arguments that have their default values",
    "kv_cache_kind": "this kind of K/V cache (quantised, offloaded, of fixed length with a sliding window) cannot be "
    "filled from stored states: pass a DynamicCache()",
    "kv_layout": "this model does not keep K/V as one column per token in each layer (it adds tokens of its own, "
    "shares K/V between layers, or keeps states of linear attention, convolutions or an encoder), so no prompt can be "
    "cut off or restored: pass use_cache=False where no K/V is needed",
    "kv_states": "this model's K/V cache is copied as a whole (it keeps states of linear attention or convolutions, or "
    "shares K/V between layers), for one prompt a call, without padding: pass prompts one by one, and positions that "
    "count from 0 and a DynamicCache(config=model.config), or neither",
    "kv_cache_with_pooled_payload": "K/V was requested, but a classifier's entries keep one vector: pass "
    "use_cache=False, or wrap with payload='sequence'",
    "no_content": "the input is empty or holds special tokens only",
    "not_finite": "the states that the fingerprint is made of are not finite: run the model in a wider dtype",
    "rope_by_length": "this model's RoPE (dynamic, longrope) encodes positions differently in long calls, like this "
    "one: only calls below its original training length are cached",
    "other_pooling": "the modules after the trunk are not what they were when the model was wrapped (one was added or "
    "replaced, or pools in another way), and may read more than entries keep: call unwrap(), and wrap the model again",
    "token_states": "the states of all tokens were requested, of which entries keep one vector: call the model of "
    "sentence-transformers that was wrapped, not a module in it, or wrap with payload='sequence'",
    "head_reads_padding": "the head would read a token that entries do not keep: pad on the other side",
    "other_encoder": "the model has several encoders, of which only the first is cached: wrap the part of each by "
    "itself, such as LLMCache.wrap(model[0].sub_modules['document']) for a Router",
    "error": "the cache failed and the model computed instead; see the log",
}

#: Why a row, or what follows its prefix, is computed, each with its cure, if there is one.
MISSES: dict[str, str] = {
    "new": "nothing that is stored begins like it",
    "differs": "what follows is not stored: put what changes from prompt to prompt (a date, a name, the question) last",
    "last_token": "only its last token is computed, since longer prompts that begin like it are stored, but not itself",
    "padding": "the states of its padding may be read, so all of it is computed: call a language-model head without "
    "labels and without a hook on its trunk, or pass it without padding",
    "too_short": "that is so small a part of the call that one batch is faster",
    "whole_prompts": "only whole prompts are served with prefix=False, with padding that the model was not seen to "
    "ignore, and if a trial of the model shows that nothing can be cut off: set prefix, or leave out the padding",
    "no_kv": "this call keeps no K/V and cannot use it (prefix=False, a graph, a 4-D mask): leave out use_cache=False",
    "snapshots": "this model's K/V caches are kept as they are at the ends of prompts and answers, and none that is "
    "stored ends within it: pass the beginning that prompts share to cache.prefill",
    "coupled": "rows of a call affect each other in this model, so only a repeat of the whole call is served",
}

#: Class names of layers that keep the K/V of all tokens as they are, and their endings if K/V is all that they keep.
_OF_PLAIN_KV = ("DynamicLayer", "StaticLayer")
_OF_WINDOW = "DynamicSlidingWindowLayer"
_OF_KV = (*_OF_PLAIN_KV, _OF_WINDOW, "StaticSlidingWindowLayer", "QuantizedLayer")
_BY_TOKEN = ("input_ids", "token_type_ids", "position_ids")
_PLAIN = (bool, int, float, str)

# Arguments of a trunk that are part of the key, or that do not affect its hidden states.
_KNOWN = frozenset(
    (
        *(*DECIDING, CACHE, "cache_position", "use_cache", "return_dict", "num_items_in_batch", "logits_to_keep"),
        *("inputs_embeds", "encoder_hidden_states", "encoder_attention_mask"),
    )
)


def find_reason_of(arguments: Mapping[str, Any], trunk: Trunk, defaults: Mapping[str, Any]) -> str | None:
    """Return the bypass reason for these arguments and the trunk's present config, or None."""
    ids = arguments.get("input_ids")
    if ids is None or arguments.get("inputs_embeds") is not None:
        return "inputs_embeds"
    for what in trunk.more_outputs:
        asked = arguments.get(what)
        if asked if asked is not None else setting(trunk.config, what):
            return what if what in CURES else "more_output"
    if arguments.get("encoder_hidden_states") is not None:
        return "cross_attention"
    try:
        if (kv_cache := arguments.get(CACHE)) is not None and int(kv_cache.get_seq_length()) > 0:
            return "decode"
    except ValueError:  # a cache of recurrent states only has no length
        return "kv_layout"
    shape = ids.shape if isinstance(ids, Tensor) else ()
    for name in _BY_TOKEN:
        if (values := arguments.get(name)) is not None and not _are_by_token(values, shape):
            return "input_shape"
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != shape):
        return "mask_4d"
    for name, value in arguments.items():
        if name in _KNOWN or name in trunk.more_outputs:
            continue
        # An argument passed through **kwargs reaches the layers with any value, including False and None.
        if name not in defaults or not _is_same(value, defaults[name]):
            return "unknown_argument"
    return None


def find_reason_of_kv(arguments: Mapping[str, Any], trunk: Trunk) -> str | None:
    """Return the bypass reason of a call that must make K/V, which pooled entries do not hold; or None."""
    asked = arguments.get("use_cache")
    if asked or arguments.get(CACHE) is not None:
        return "kv_cache_with_pooled_payload"
    makes_kv = setting(trunk.config, "use_cache") if asked is None else asked
    # Without K/V, models split a row into texts where positions restart, and mask earlier texts.
    is_unmasked = arguments.get("attention_mask") is None and arguments.get("position_ids") is not None
    return "packed" if makes_kv and is_unmasked else None


def is_plain_cache(cache: Any) -> bool:
    """Whether K/V of skipped layers can be written to this cache: full attention, no quantising, no offloading."""
    layers = getattr(cache, "layers", None)
    is_known = type(cache).__name__ in ("DynamicCache", "StaticCache") and not getattr(cache, "offloading", False)
    return is_known and layers is not None and all(type(one).__name__ in _OF_PLAIN_KV for one in layers)


def keeps_windows(cache: Any) -> bool:
    """Whether some layers of a growing K/V cache keep the last tokens alone, and the others all, as they are."""
    kinds = {type(one).__name__ for one in getattr(cache, "layers", None) or ()}
    is_known = type(cache).__name__ == "DynamicCache" and not getattr(cache, "offloading", False)
    return is_known and _OF_WINDOW in kinds and kinds <= {_OF_WINDOW, "DynamicLayer"}


def find_reason_of_cache(cache: Any) -> str:
    """Return the bypass reason of a call with this K/V cache; "" if K/V of skipped layers can be written to it."""
    if is_plain_cache(cache):
        return ""
    layers = {type(layer).__name__ for layer in getattr(cache, "layers", None) or ()}
    is_known = type(cache).__name__ in ("DynamicCache", "StaticCache", "QuantizedCache")
    # A model that keeps nothing but K/V accepts a `DynamicCache()`; recurrent states have no place in it.
    return "kv_cache_kind" if is_known and all(name.endswith(_OF_KV) for name in layers) else "kv_layout"


def _are_by_token(values: Any, shape: Sequence[int]) -> bool:
    """Whether an argument holds one integer per token of ids (B, T). (RoPE also takes fractions and several axes.)"""
    if not isinstance(values, Tensor) or len(shape) != 2 or values.dtype.is_floating_point:
        return False
    return values.shape in (shape, (1, shape[1]))


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and isinstance(value, _PLAIN) and value == default)


def is_strange(value: Any) -> bool:
    """Whether an argument is a tensor subclass or proxy, which may override operations, or a CUDA graph captures it."""
    if type(value) in (Tensor, Parameter):
        return bool(value.is_cuda) and torch.cuda.is_current_stream_capturing()
    return isinstance(value, (Tensor, Proxy))
