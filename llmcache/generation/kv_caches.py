"""The K/V caches that a generation may use, all of them transformers' own, and the bytes that they take.

| kind | what it is | what it holds |
|---|---|---|
| `dynamic` | `DynamicCache` | K/V of all tokens, grown at each step |
| `static` | `StaticCache` | room for `max_length` tokens, allocated once; of a layer with a window, for that |
| `sliding` | `DynamicCache` as the config makes it | of a layer with a window, what the next token can see |

Stored prefixes are served where all K/V is held: never in a layer that holds a window.

Sizes: B rows, L layers, H_kv K/V heads, D_h width of a head, T tokens.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from llmcache.errors import ConfigError, RequestError

Kind = Literal["dynamic", "static", "sliding"]

_PLAIN = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # layers that attend, and would hold all K/V without a window


def make_cache(kind: str, config: Any, max_length: int | None = None) -> Any:
    """Make an empty K/V cache of a kind; `max_length`, for `static` alone, is the model's context unless given."""
    if kind not in KINDS:
        raise ConfigError(f"cache: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    if max_length is not None and kind != "static":
        raise ConfigError(f"max_length={max_length} is for cache='static': a {kind} cache allocates nothing ahead")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ConfigError(f"max_length={max_length!r}: give the tokens that the cache shall hold, 1 or more")
    return KINDS[kind](config, max_length)


def _dynamic(config: Any, max_length: int | None) -> Any:
    """All K/V, also where a window would do: stored prefixes can then be filled in."""
    from transformers import DynamicCache

    shaped = DynamicCache(config=config)
    return DynamicCache() if {type(layer).__name__ for layer in shaped.layers} <= _PLAIN else shaped


def _static(config: Any, max_length: int | None) -> Any:
    from transformers import StaticCache

    length = context_length(config) if max_length is None else max_length
    if length is None:
        raise ConfigError("cache='static': this model's config names no context length; say max_length")
    return StaticCache(config=config, max_cache_len=length)


def _sliding(config: Any, max_length: int | None) -> Any:
    from transformers import DynamicCache

    if not has_window(config):
        raise ConfigError(
            f"cache='sliding': no layer of this {config.model_type} model has a sliding window "
            f"(sliding_window={getattr(config, 'sliding_window', None)}); take cache='dynamic' or 'static'"
        )
    return DynamicCache(config=config)


KINDS: dict[str, Callable[[Any, int | None], Any]] = {"dynamic": _dynamic, "static": _static, "sliding": _sliding}


def has_window(config: Any) -> bool:
    """Whether a layer of the decoder sees the newest tokens only."""
    from transformers import DynamicCache

    return any(DynamicCache(config=config).is_sliding)


def context_length(config: Any) -> int | None:
    """Tokens that the decoder was made for; None where its config does not say. GPT-2's `n_positions` is one."""
    length: int | None = getattr(config, "max_position_embeddings", None)
    return length


def check_room(kv_cache: Any, config: Any, n_new: int) -> None:
    """See to it that tokens more fit, before anything is computed."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    limits = []
    for layer in kv_cache.layers:
        limit = layer.get_max_length()
        rolls = getattr(layer, "is_sliding", False) and limit == window  # one shorter than its window would forget
        if limit >= 0 and not rolls:
            limits.append(limit)
    n_held = int(kv_cache.get_seq_length()) if limits else 0
    if limits and n_held + n_new > min(limits):
        raise RequestError(
            f"this static cache has room for {min(limits)} tokens and holds {n_held}, so {n_new} more do not fit: make "
            f"it with max_length={n_held + n_new} or more"
        )


def kv_nbytes(config: Any, n_tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of one row: 2 L H_kv D_h T itemsize.

    Args:
        config: Of the model; each K/V head counts once, however many query heads share it.
        n_tokens: T, 0 or more.
        itemsize: Bytes of one number: 4 for float32, 2 for bfloat16.
    """
    config = config.get_text_config(decoder=True)
    n_heads = config.num_attention_heads
    n_kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or n_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    return 2 * int(config.num_hidden_layers * n_kv_heads * head_dim) * n_tokens * itemsize


def held_nbytes(kv_cache: Any) -> int:
    """Bytes of keys and values that a cache holds: what is allocated, of a static one."""
    held = (getattr(layer, name, None) for layer in kv_cache.layers for name in ("keys", "values"))
    return sum(x.nbytes for x in held if isinstance(x, Tensor))
