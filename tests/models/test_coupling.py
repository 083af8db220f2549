"""The difference below which rows do not count as affecting each other; larger where TF32 may round."""

import pytest
import torch
from torch import Tensor, nn

from llmcache.models.coupling import _rounding


@pytest.mark.parametrize(
    ("module", "precision", "expected"),
    [
        (nn.Linear(2, 2), "highest", 1e-5),
        (nn.Linear(2, 2), "high", 2e-3),
        (nn.Conv1d(2, 2, 1), "highest", 2e-3),
    ],
)
def test_float32_of_an_accelerator_is_trusted_unless_it_may_be_tf32(
    module: nn.Module, precision: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert _rounding(module, torch.zeros(2)) == 1e-5
    monkeypatch.setattr(Tensor, "is_cpu", False)
    assert _rounding(module, torch.zeros(2)) == expected
    assert _rounding(module, torch.zeros(2, dtype=torch.bfloat16)) == 2e-2
