"""The two steps of a generation: prefill of the prompt, then decode of one token at a time.

Both call the model without gradients. On a wrapped model the prefill goes through the cache.

Sizes: B rows, T tokens per row (padding included), S tokens per row in a K/V cache, V vocabulary.
"""

from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from llmcache.errors import RequestError, UnsupportedModelError
from llmcache.generation.kv_caches import Kind, check_room, make_cache
from llmcache.generation.validation import check_context, check_ids, check_prompt, decoder_config
from llmcache.models.adapters import CACHE

#: K/V caches of padded prompts: a cache itself does not record which of its columns are padding.
_PADDED: WeakSet[Any] = WeakSet()


def prefill(
    model: Any,
    ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cache: Kind = "dynamic",
    max_length: int | None = None,
) -> tuple[Tensor, Any]:
    """Run prompts, and store their K/V in a new cache.

    Args:
        model: A causal language model of transformers in eval mode, wrapped or not.
        ids: int64 or int32 (B, T), on the model's device.
        attention_mask: (B, T), 1 for tokens, 0 for padding on either side; None: no padding.
        cache: Kind of K/V cache; see `llmcache.generation.kv_caches`.
        max_length: Tokens that a `static` K/V cache has room for; None: the model's context.

    Returns:
        Logits (B, V) of the token after each row's last, in the model's dtype; and the K/V cache.

    Raises:
        RequestError: The prompts are empty, exceed the context or the K/V cache, or have ids out of the vocabulary.
        ConfigError: The kind of K/V cache does not suit the model.
        UnsupportedModelError: Not a causal language model, or it does not put its K/V into the cache passed to it.
    """
    config = decoder_config(model)
    check_prompt(config, ids, attention_mask)
    kv_cache = make_cache(cache, config, max_length)
    return run_prompt(model, config, ids, attention_mask, kv_cache), kv_cache


def run_prompt(
    model: Any, config: Any, ids: Tensor, mask: Tensor | None, kv_cache: Any, n_keep: int | None = None
) -> Tensor:
    """Run checked prompts into an empty K/V cache; return logits (B, V) and raise errors as `prefill` does.

    With `n_keep`, and without a mask, return the logits (B, n_keep, V) of the last columns.
    """
    check_room(kv_cache, config, ids.shape[1])
    n_columns = ids.shape[1]
    _PADDED.discard(kv_cache)
    if mask is None:
        logits = run_columns(model, ids, None, kv_cache, n_keep or 1)
        logits = logits if n_keep else logits[:, 0]
    else:
        if not bool(mask.all()):
            _PADDED.add(kv_cache)
        last = n_columns - 1 - mask.long().flip(1).argmax(1)
        n_keep = n_columns - int(last.min())
        kept = run_columns(model, ids, mask, kv_cache, n_keep)
        logits = kept[torch.arange(len(ids), device=ids.device), last - (n_columns - n_keep)]
    n_held = int(kv_cache.get_seq_length())
    if n_held != n_columns:
        raise UnsupportedModelError(
            f"{type(model).__name__} put K/V of {n_held} tokens into its cache, for a prompt of {n_columns}: it cannot "
            "be continued from there; use its own generate()"
        )
    return logits


def decode_step(model: Any, last: Tensor, kv_cache: Any, attention_mask: Tensor | None = None) -> Tensor:
    """Run one more token of each row.

    Args:
        model: As in `prefill`.
        last: The newest token of each row, int64 or int32 (B,).
        kv_cache: The K/V cache from `prefill`, or any of transformers that holds all earlier tokens; grows by a token.
        attention_mask: (B, S + 1): the mask of the prefill, with a column of ones for each token since, including this
            one. Required if the prompts had padding.

    Returns:
        Logits (B, V) of the next token, in the model's dtype.

    Raises:
        RequestError: A token is not in the vocabulary, or does not fit into K/V cache or context; or shapes do not
            match; or the mask is missing.
        UnsupportedModelError: Not a causal language model.
    """
    config = decoder_config(model)
    check_ids(config, "last", last, 1, "(B,), the newest token of each row")
    if not hasattr(kv_cache, "get_seq_length"):
        raise RequestError(f"kv_cache: give the one that prefill() returned (got {type(kv_cache).__name__})")
    n_held = int(kv_cache.get_seq_length())
    _check_step(last, kv_cache, n_held, attention_mask)
    check_context(config, n_held + 1 if attention_mask is None else int(attention_mask.sum(1).max()), 0)
    check_room(kv_cache, config, 1)
    return run_columns(model, last[:, None], attention_mask, kv_cache, 1)[:, 0]


def _check_step(last: Tensor, kv_cache: Any, n_held: int, mask: Tensor | None) -> None:
    if n_held == 0:
        raise RequestError("the K/V cache is empty: run the prompt with prefill() first")
    n_rows = kv_cache.layers[0].keys.shape[0]
    if len(last) != n_rows:
        raise RequestError(f"last: {len(last)} tokens for a K/V cache of {n_rows} rows; give one a row")
    if mask is None and kv_cache in _PADDED:
        raise RequestError(
            "attention_mask: the prompts had padding, which would count as tokens without a mask: give "
            f"{(n_rows, n_held + 1)}, the mask of the prompts and a column of ones for each token since"
        )
    if mask is not None and mask.shape != (n_rows, n_held + 1):
        raise RequestError(
            f"attention_mask: the shape is {tuple(mask.shape)}; give {(n_rows, n_held + 1)}, a column for each token "
            "in the K/V cache and one for `last`"
        )
    if mask is not None and not bool(mask[:, -1].all()):
        raise RequestError("attention_mask: its last column stands for `last`, which is not padding; give 1 there")


def run_columns(model: Any, ids: Tensor, mask: Tensor | None, kv_cache: Any, n_keep: int) -> Tensor:
    """Run columns that extend a K/V cache; return the logits (B, n_keep, V) of the last ones."""
    padding: dict[str, Tensor] = {}
    if mask is not None and not bool(mask.all()):
        if "position_ids" not in signature(type(model).forward).parameters:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes no position_ids, so padding would move its tokens: give one row a call"
            )
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        padding = {"attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}
    kept = {CACHE: kv_cache, "use_cache": True, "return_dict": True, "logits_to_keep": n_keep}
    with torch.no_grad():
        output = model(input_ids=ids, **kept, **padding)
    logits: Tensor = output.logits[:, -n_keep:]  # a model without `logits_to_keep` returns all
    return logits
