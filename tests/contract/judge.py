"""Calls a wrapped model and a plain copy alike, and compares everything that they return."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from llmcache import LLMCache, UnfitBankError
from tests.tiny_models import build, tokens

#: Tolerance by dtype for rows computed in another batch (docs/reuse.md).
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def ask(model: Any, *args: Any, **inputs: Any) -> Any:
    """Call a model as a service does: without gradients."""
    with torch.inference_mode():
        return model(*args, **inputs)


def plain_answer(cache: LLMCache, **inputs: Any) -> Any:
    """Call a wrapped model without its cache."""
    with cache.disabled():
        return ask(cache.model, **inputs)


def check_same(
    found: Any, expected: Any, *, exact: bool = False, where: str = "output", padding: Tensor | None = None
) -> None:
    """Compare two outputs at every position: types, keys, shapes, dtypes, values, K/V.

    Args:
        found: Output of the wrapped model.
        expected: Output of the plain model.
        exact: Whether tensors must be equal bit for bit; else floats may differ by `ROUNDING`.
        where: Path to the value, named in the message of a failure.
        padding: Columns (B, T) where zeros pass as well, bool; see `uncomputed`.

    Raises:
        AssertionError: They differ.
    """
    assert type(found) is type(expected), f"{where}: {type(found).__name__}, not {type(expected).__name__}"
    if isinstance(expected, Tensor):
        _check_tensor(found, _with_zeros(expected, found, padding), exact, where)
        return
    ours, theirs = _parts(found), _parts(expected)
    if theirs is None:
        assert found == expected, f"{where}: {found!r}, not {expected!r}"
        return
    assert ours is not None and list(ours) == list(theirs), f"{where}: {list(ours or ())}, not {list(theirs)}"
    for name, value in theirs.items():
        check_same(ours[name], value, exact=exact, where=f"{where}.{name}", padding=padding)


def uncomputed(model: Any, call: Mapping[str, Any]) -> Tensor | None:
    """Return the columns (B, T) that a call need not compute, bool: padding that a language-model head reads."""
    mask = call.get("attention_mask")
    is_decoder = isinstance(model, GenerationMixin) and not model.config.is_encoder_decoder
    return mask == 0 if is_decoder and mask is not None and mask.ndim == 2 and call.get("labels") is None else None


def check_calls(cache: LLMCache, plain: Any, *calls: Mapping[str, Any], exact: bool = False, repeats: int = 2) -> int:
    """Make all calls `repeats` times on the wrapped model; compare with the plain model, and return the hits."""
    expected, before = [ask(plain, **call) for call in calls], cache.stats().n_hits
    for turn in range(repeats):
        for number, (call, output) in enumerate(zip(calls, expected, strict=True)):
            where, padding = f"call {number}, time {turn + 1}", uncomputed(plain, call)
            check_same(ask(cache.model, **call), output, exact=exact, where=where, padding=padding)
    return cache.stats().n_hits - before


@contextmanager
def wrapped(make: Callable[[], nn.Module], **settings: Any) -> Iterator[tuple[LLMCache, Any]]:
    """Within: the cache of a new model, and its plain copy. Nothing in the cache may fail."""
    with LLMCache.wrap(build(make), **{"auto_bypass": False, **settings}) as cache:
        yield cache, build(make)
        assert cache.stats().errors == 0


def check_edits(
    make: Callable[[], nn.Module],
    edits: Sequence[Callable[[Any], object]],
    *calls: Mapping[str, Any],
    exact: bool = False,
    **settings: Any,
) -> list[int]:
    """Check calls made twice, before and after each edit of the wrapped and the plain model; return the hits."""
    with wrapped(make, **settings) as (cache, plain):
        hits = [check_calls(cache, plain, *calls, exact=exact)]
        for edit in edits:
            for model in (cache.model, plain):
                torch.manual_seed(1)
                with torch.no_grad():
                    edit(model)
            hits.append(check_calls(cache, plain, *calls, exact=exact))
    return hits


def carries(cache: LLMCache, model: nn.Module, folder: Path, **inputs: Any) -> bool:
    """Save a cache; return whether the save serves a model. Its answer must be right then, and nothing else saved."""
    cache.save(folder)
    expected = ask(model, **inputs)
    try:
        with LLMCache.load(model, folder) as loaded:
            assert loaded.stats().n_stored == len(inputs["input_ids"])
            check_same(ask(model, **inputs), expected)
            assert loaded.stats().n_hits == len(inputs["input_ids"])
    except UnfitBankError:
        return False
    return True


def check_moment(cache: LLMCache, edited: Callable[..., Any]) -> None:
    """Check that what a model computes during an edit that is undone serves only its like, after calls without one.

    Args:
        cache: The cache.
        edited: Calls the model that it is given with an edit that ends with the call.
    """
    call = partial(edited, cache.model)
    for turn in range(80):
        ask(cache.model, input_ids=tokens(1, 5, turn % 4))
    for seed in (80, 81, 3):
        inputs, before = {"input_ids": tokens(1, 5, seed)}, cache.stats().n_hits
        expected, found = plain_answer(cache, **inputs), ask(call, **inputs)
        with cache.disabled():
            check_same(found, ask(call, **inputs))
        for _ in range(2):
            check_same(ask(cache.model, **inputs), expected)
        assert cache.stats().n_hits - before == (1 if seed >= 80 else 2)


def _with_zeros(expected: Tensor, found: Tensor, padding: Tensor | None) -> Tensor:
    """Return logits (B, n, V) or K/V (B, H, n, D_h) with zeros at the columns of `padding` where `found` has zeros."""
    if padding is None or found.shape != expected.shape or expected.ndim not in (3, 4):
        return expected
    padding = padding.repeat_interleave(len(found) // len(padding), dim=0)  # of each beam
    n_columns = expected.shape[-2]  # of all, or of the last ones, or with room for more
    own = padding[:, -n_columns:] if n_columns <= padding.shape[1] else padding
    own = nn.functional.pad(own, (0, n_columns - own.shape[1]))
    is_left_out = (found == 0).all(-1) & (own if expected.ndim == 3 else own[:, None])
    return expected.masked_fill(is_left_out[..., None], 0)


def _check_tensor(found: Tensor, expected: Tensor, exact: bool, where: str) -> None:
    kind, wanted = (found.shape, found.dtype, found.device), (expected.shape, expected.dtype, expected.device)
    assert kind == wanted, f"{where}: {kind}, not {wanted}"
    if exact or not expected.is_floating_point():
        equal = torch.equal(found.nan_to_num(), expected.nan_to_num()) and torch.equal(found.isnan(), expected.isnan())
        assert equal, f"{where}: not equal, by up to {(found.double() - expected.double()).abs().max():.3g}"
        return
    limit = ROUNDING[expected.dtype]
    torch.testing.assert_close(
        found, expected, atol=limit, rtol=limit, equal_nan=True, msg=lambda told: f"{where}: {told}"
    )


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return a container's parts by name or position; None for a single value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return dict(enumerate(value))
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "cross_attention_cache"):  # K/V caches of transformers
        return {"own": value.self_attention_cache, "cross": value.cross_attention_cache}
    if hasattr(value, "layers"):
        kv = ((layer.keys, layer.values) for layer in value.layers)
        return {"length": value.get_seq_length(), **dict(enumerate(kv))}
    return None
