"""`check_same` finds every difference."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from tests.contract.judge import check_same

HERE = torch.ones(2, 3)


def kv(value: float) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.full((1, 1, 2, 4), value), torch.ones(1, 1, 2, 4), 0)
    return cache


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (HERE, HERE + 1e-3),
        (HERE, HERE.double()),
        (HERE, HERE[:1]),
        (HERE * float("nan"), HERE),
        ((HERE,), [HERE]),
        ((HERE,), (HERE, HERE)),
        (BaseModelOutput(last_hidden_state=HERE), BaseModelOutput(last_hidden_state=HERE, hidden_states=(HERE,))),
        (BaseModelOutput(last_hidden_state=HERE), {"last_hidden_state": HERE}),
        (kv(1.0), kv(2.0)),
        (None, HERE),
    ],
)
def test_a_difference_is_seen(found: Any, expected: Any) -> None:
    """Outputs are the same only if types, keys, shapes, dtypes and values are."""
    with pytest.raises(AssertionError):
        check_same(found, expected)


def test_what_is_alike_passes() -> None:
    """A difference by rounding passes unless `exact`."""
    check_same(BaseModelOutput(last_hidden_state=HERE + 1e-7), BaseModelOutput(last_hidden_state=HERE))
    check_same(kv(1.0), kv(1.0), exact=True)
    with pytest.raises(AssertionError):
        check_same(HERE + 1e-6, HERE, exact=True)


def test_padding_may_be_left_out_and_nothing_else() -> None:
    """Zeros pass at padding that is not read; other values, and zeros elsewhere, do not."""
    padding, whole = torch.tensor([[True, True, False]]), torch.ones(1, 3, 4)
    for n, n_columns in ((1, 3), (2, 3), (1, 2)):
        found = whole[:, -n_columns:].clone()
        found[:, :n] = 0
        check_same(found, whole[:, -n_columns:], padding=padding)
    for column, value in ((0, 0.5), (2, 0.0)):
        found = whole.clone()
        found[:, column] = value
        with pytest.raises(AssertionError):
            check_same(found, whole, padding=padding)
    with pytest.raises(AssertionError):
        check_same(torch.zeros(1, 3, 4), whole)
