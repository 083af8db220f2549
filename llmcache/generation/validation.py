"""Checks of models and prompts before anything is computed. All raise `RequestError` unless noted.

Sizes: B rows, T tokens per row (padding included), V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from llmcache.errors import RequestError, UnsupportedModelError
from llmcache.generation.kv_caches import context_length, has_window


def decoder_config(model: Any) -> Any:
    """Return the decoder's config; `UnsupportedModelError` if not a causal language model. Refuses training mode."""
    config: Any = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", None)
    if not isinstance(model, nn.Module) or can_generate is None or not can_generate() or config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot continue a text token by token: give a causal language model of "
            "transformers (for a cache, cache.model)"
        )
    if model.training:
        raise RequestError(f"{type(model).__name__} is in training mode: call model.eval()")
    return config.get_text_config(decoder=True)


def check_prompt(config: Any, ids: Any, attention_mask: Any = None) -> None:
    """Check that the model can take these ids (B, T), and the mask (B, T), 1 for tokens, 0 for padding."""
    check_ids(config, "ids", ids, 2, "(1, T), or (B, T) with an attention mask")
    if ids.numel() == 0:
        raise RequestError(
            f"the prompt is empty (shape {tuple(ids.shape)}): give at least one token, for example the model's "
            f"bos_token_id ({getattr(config, 'bos_token_id', None)})"
        )
    if attention_mask is not None:
        _check_mask(config, ids, attention_mask)
    check_context(config, ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max()), 0)


def check_ids(config: Any, name: str, ids: Any, ndim: int, shape: str) -> None:
    """Check that ids are int64 or int32, have `ndim` dimensions (`shape`, in words), and are in the vocabulary."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise RequestError(f"{name}: token ids are a tensor of int64 (got {kind}); use return_tensors='pt'")
    if ids.ndim != ndim:
        raise RequestError(f"{name}: the shape is {tuple(ids.shape)}; give {shape}")
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.numel():
        raise RequestError(
            f"{name}: {int(wrong[0])} is not in the vocabulary, 0 to {config.vocab_size - 1}: use the model's tokenizer"
        )


def check_context(config: Any, n_tokens: int, n_new: int) -> None:
    """Check that `n_tokens`, and `n_new` more, fit into the model's context."""
    limit = context_length(config)
    if limit is None or n_tokens + n_new <= limit:
        return
    if n_tokens > limit:
        raise RequestError(f"{n_tokens} tokens exceed the model's context of {limit}: keep the prompt's end, say")
    raise RequestError(
        f"{n_tokens} tokens and max_new_tokens={n_new} exceed the model's context of {limit}: "
        f"{limit - n_tokens} new ones fit; lower max_new_tokens, or cut the prompt"
    )


def _check_mask(config: Any, ids: Tensor, mask: Any) -> None:
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise RequestError(f"attention_mask: give one of the shape of ids, {tuple(ids.shape)} (got {kind})")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise RequestError("attention_mask: give 1 for tokens and 0 for padding")
    if not bool(mask.any(1).all()):
        raise RequestError("attention_mask: a row holds nothing but padding, an empty prompt; leave that row out")
    if bool((mask[:, 1:] < mask[:, :-1]).any()) and has_window(config):
        raise RequestError(
            "attention_mask: this model's sliding window counts columns, and padding after a token would fill it; pad "
            "on the left (padding_side='left')"
        )
