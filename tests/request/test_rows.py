"""Exact keys cover all that a row's states depend on, and no more."""

import numpy as np

from llmcache.request.reading import HostInputs, read_rows
from llmcache.request.rows import Row, Scope, id_dtype

SCOPE = Scope("default", "weights", "torch.float32", "sdpa")


def row(ids: list[int], mask: list[int] | None = None, positions: list[int] | None = None) -> Row:
    """Read the only row of a call."""
    valid = None if mask is None else np.array([mask], bool)
    placed = None if positions is None else np.array([positions])
    inputs = HostInputs(np.array([ids]), valid, None, placed, None, None, is_full=mask is not None and all(mask))
    (made,) = read_rows(SCOPE, inputs, np.dtype(np.uint16))
    return made


def test_padding_on_the_right_is_no_part_of_a_key() -> None:
    assert row([5, 6]).key == row([5, 6], [1, 1]).key == row([5, 6, 0], [1, 1, 0]).key == row([5, 6, 9], [1, 1, 0]).key


def test_what_comes_before_is_part_of_a_key_unless_positions_are_given() -> None:
    """A model may count all columns, or valid tokens only."""
    keys = {row([5, 6]).key, row([0, 5, 6], [0, 1, 1]).key, row([0, 0, 5, 6], [0, 0, 1, 1]).key}
    assert len({*keys, row([9, 5, 6], [0, 1, 1]).key}) == 4
    placed = [row([5, 6], positions=[0, 1]).key, row([0, 5, 6], [0, 1, 1], positions=[7, 0, 1]).key]
    assert placed[0] == placed[1] != row([5, 6], positions=[3, 4]).key


def test_gaps_are_part_of_a_key() -> None:
    gap = row([5, 9, 6], [1, 0, 1], positions=[0, 1, 2])
    assert gap.key != row([5, 6], positions=[0, 2]).key and gap.n_valid == 2


def test_ids_are_packed_in_as_few_bytes_as_the_vocabulary_needs() -> None:
    assert id_dtype(2**16) == np.uint16 and id_dtype(2**16 + 1) == np.int32
