"""The difference below which rows do not count as affecting each other; larger where TF32 may round."""

import pytest
import torch
from torch import Tensor, nn

from llmcache.models.coupling import _rounding


def test_float32_of_an_accelerator_is_trusted_unless_it_may_be_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, convolution, x = nn.Linear(2, 2), nn.Conv1d(2, 2, 1), torch.zeros(2)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert _rounding(linear, x) == 1e-5
    monkeypatch.setattr(Tensor, "is_cpu", False)
    assert _rounding(linear, x) == 2e-3
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert (_rounding(linear, x), _rounding(convolution, x)) == (1e-5, 2e-3)
    assert _rounding(linear, x.bfloat16()) == 2e-2
