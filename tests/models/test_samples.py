"""Samples of tensors' bytes show edits that leave no other trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmcache.models.samples import N_PLACES, Samples

TENSORS: dict[str, Callable[[], Tensor]] = {
    "one number": lambda: torch.tensor(3.0),
    "flags": lambda: torch.ones(700, dtype=torch.bool),
    "bfloat16": lambda: torch.randn(64, 64, dtype=torch.bfloat16),
    "transposed": lambda: torch.randn(64, 32).T,
    "part of another": lambda: torch.randn(64, 64)[3:9, 10:50],
    "expanded": lambda: torch.randn(64, 1).expand(64, 5),
    "parameter": lambda: torch.nn.Parameter(torch.randn(64, 64)),
    "inference": torch.inference_mode()(lambda: torch.randn(64, 64)),
}


def negate(tensor: Tensor) -> None:
    """Flip bits as another process would; no version counter shows it."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory.bitwise_xor_(1)


@pytest.mark.parametrize("kind", TENSORS)
def test_an_edit_shows_at_every_place_and_stays_seen(kind: str) -> None:
    edited, other = TENSORS[kind](), torch.randn(50)
    taken = Samples([other, edited])
    taken.take()
    assert not any(taken.differ() for _ in range(N_PLACES)) and not taken.edited()
    negate(edited)
    assert all(taken.differ() for _ in range(N_PLACES))
    assert [id(one) for one in taken.edited()] == [id(edited)]
    negate(edited)
    assert taken.differ() and not taken.edited()
    taken.take()
    assert not taken.differ()


def test_memory_of_other_devices_is_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(64, 64), torch.zeros(3)]
    monkeypatch.setattr(Tensor, "is_cpu", False)
    taken = Samples(tensors)
    monkeypatch.undo()
    taken.take()
    negate(tensors[1])
    assert [taken.differ() for _ in range(64)] == [False] * 63 + [True]
    assert [id(one) for one in taken.edited()] == [id(tensors[1])]


def test_what_has_no_memory_is_left_out_and_what_was_found_at_one_place_is_seen_at_all() -> None:
    taken = Samples([torch.empty(4, device="meta"), torch.empty(0), torch.eye(3).to_sparse()])
    taken.take()
    assert not taken.differ() and not taken.edited()
    taken = Samples([tensor := torch.zeros(64, 64)])
    taken.take()
    tensor.data[-16:] = 1
    assert taken.edited() and all(taken.differ() for _ in range(N_PLACES))
