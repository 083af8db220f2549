"""The K/V caches that a generation may use, all of them transformers' own, and their sizes in bytes.

| kind | class | holds |
|---|---|---|
| `dynamic` | `DynamicCache` | K/V of all tokens, grown at each step |
| `static` | `StaticCache` | room for `max_length` tokens, allocated once; in a layer with a window, for the window |
| `sliding` | `DynamicCache` made from the config | in a layer with a window, K/V that the next token attends to |

Stored prefixes are served only if the cache holds all K/V, so not in a layer that holds only a window.

Sizes: B rows, L layers, H_kv K/V heads, D_h width of a head, T tokens.
"""

from typing import Any, Literal, get_args

from torch import Tensor

from llmcache.errors import ConfigError, RequestError

Kind = Literal["dynamic", "static", "sliding"]

_PLAIN = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # attention layers; without a window, both hold all K/V


def make_cache(kind: str, config: Any, max_length: int | None = None) -> Any:
    """Return an empty K/V cache of a kind; `max_length` (tokens, `static` only) defaults to the model's context."""
    from transformers import DynamicCache, StaticCache

    if kind not in get_args(Kind):
        raise ConfigError(f"cache: unknown kind {kind!r}; known: {', '.join(get_args(Kind))}")
    if max_length is not None and kind != "static":
        raise ConfigError(f"max_length={max_length} is for cache='static': a {kind} cache allocates nothing ahead")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ConfigError(f"max_length={max_length!r}: give the tokens that the cache must hold, 1 or more")
    if kind == "static":
        length = context_length(config) if max_length is None else max_length
        if length is None:
            raise ConfigError("cache='static': this model's config names no context length; give max_length")
        return StaticCache(config=config, max_cache_len=length)
    if kind == "sliding" and not has_window(config):
        raise ConfigError(
            f"cache='sliding': no layer of this {config.model_type} model has a sliding window "
            f"(sliding_window={getattr(config, 'sliding_window', None)}); take cache='dynamic' or 'static'"
        )
    shaped = DynamicCache(config=config)
    # `dynamic` keeps all K/V, also of layers with a window, so that stored prefixes can be filled in.
    is_plain = {type(layer).__name__ for layer in shaped.layers} <= _PLAIN
    return DynamicCache() if kind == "dynamic" and is_plain else shaped


def has_window(config: Any) -> bool:
    """Whether a layer of the decoder attends only to a window of the newest tokens."""
    from transformers import DynamicCache

    return any(DynamicCache(config=config).is_sliding)


def context_length(config: Any) -> int | None:
    """Return the decoder's context in tokens; None if its config has none. GPT-2's `n_positions` is an alias."""
    length: int | None = getattr(config, "max_position_embeddings", None)
    return length


def check_room(kv_cache: Any, config: Any, n_new: int) -> None:
    """Raise `RequestError` unless `n_new` more tokens fit into the K/V cache."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    limits = []
    for layer in kv_cache.layers:
        limit = layer.get_max_length()
        rolls = getattr(layer, "is_sliding", False) and limit == window  # if shorter than its window, it loses tokens
        if limit >= 0 and not rolls:
            limits.append(limit)
    n_held = int(kv_cache.get_seq_length()) if limits else 0
    if limits and n_held + n_new > min(limits):
        raise RequestError(
            f"this static cache has room for {min(limits)} tokens and holds {n_held}, so {n_new} more do not fit: make "
            f"it with max_length={n_held + n_new} or more"
        )


def kv_nbytes(config: Any, n_tokens: int, itemsize: int) -> int:
    """Return the bytes of keys and values of one row: 2 L H_kv D_h T itemsize.

    Args:
        config: The model's config. Each K/V head counts once, however many query heads share it.
        n_tokens: T, 0 or more.
        itemsize: Bytes per element: 4 for float32, 2 for bfloat16.
    """
    config = config.get_text_config(decoder=True)
    n_heads = config.num_attention_heads
    n_kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or n_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    return 2 * int(config.num_hidden_layers * n_kv_heads * head_dim) * n_tokens * itemsize


def held_nbytes(kv_cache: Any) -> int:
    """Return the bytes of keys and values that a K/V cache holds; for a static one, the bytes allocated."""
    held = (getattr(layer, name, None) for layer in kv_cache.layers for name in ("keys", "values"))
    return sum(x.nbytes for x in held if isinstance(x, Tensor))
