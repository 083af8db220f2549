"""Calls a wrapped model and a plain copy alike, and compares everything that they return."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Tolerance by dtype for rows computed in another batch (docs/reuse.md).
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def ask(model: Any, *args: Any, **inputs: Any) -> Any:
    """Call a model as a service does: without gradients."""
    with torch.inference_mode():
        return model(*args, **inputs)


def check_same(found: Any, expected: Any, *, exact: bool = False, where: str = "output") -> None:
    """Compare two outputs at every position: types, keys, shapes, dtypes, values, K/V.

    Args:
        found: Output of the wrapped model.
        expected: Output of the plain model.
        exact: Whether tensors must be equal bit for bit; else floats may differ by `ROUNDING`.
        where: Path to the value, named in the message of a failure.

    Raises:
        AssertionError: They differ.
    """
    assert type(found) is type(expected), f"{where}: {type(found).__name__}, not {type(expected).__name__}"
    if isinstance(expected, Tensor):
        _check_tensor(found, expected, exact, where)
        return
    ours, theirs = _parts(found), _parts(expected)
    if theirs is None:
        assert found == expected, f"{where}: {found!r}, not {expected!r}"
        return
    assert ours is not None and list(ours) == list(theirs), f"{where}: {list(ours or ())}, not {list(theirs)}"
    for name, value in theirs.items():
        check_same(ours[name], value, exact=exact, where=f"{where}.{name}")


def check_calls(
    wrapped: Any, plain: nn.Module, *calls: Mapping[str, Any], exact: bool = False, repeats: int = 2
) -> None:
    """Make all calls `repeats` times on the wrapped model; compare each output with the plain model's."""
    expected = [ask(plain, **call) for call in calls]
    for turn in range(repeats):
        for number, (call, output) in enumerate(zip(calls, expected, strict=True)):
            check_same(ask(wrapped, **call), output, exact=exact, where=f"call {number}, time {turn + 1}")


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
