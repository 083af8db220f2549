"""Exact keys cover all that a row's states depend on, and no more; outcomes of rows; values held for a block."""

import logging
from contextvars import ContextVar

import numpy as np
import pytest
import torch

from llmcache import Outcome
from llmcache.request.reading import HostInputs, read_rows
from llmcache.request.rows import Row, Scope, id_dtype
from llmcache.support.context import scoped
from tests.calls.helpers import wrapped
from tests.tiny_models import CLASSIFIERS, tokens

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


def test_last_has_the_outcome_of_each_row() -> None:
    cache, (one, two) = wrapped(CLASSIFIERS["bert"]), (tokens(1, 6, seed=1), tokens(1, 6, seed=2))
    assert cache.last == ()
    cache(input_ids=one)
    (stored,) = cache.last
    assert stored == Outcome(key=stored.key)
    assert len(stored.key) == 43
    cache(input_ids=torch.cat([two, one]))
    miss, hit = cache.last
    assert hit == Outcome(stored.key, "exact", 3, stored.key, 1.0)
    assert miss == Outcome(miss.key)
    assert miss.key != stored.key


def test_it_is_said_once_that_blocks_of_a_context_variable_overlapped(caplog: pytest.LogCaptureFixture) -> None:
    variable: ContextVar[int] = ContextVar("overlapping", default=0)
    with caplog.at_level(logging.WARNING):
        with scoped(variable, 1), scoped(variable, 2):
            assert not caplog.messages
        for _ in range(2):
            first, second = scoped(variable, 1), scoped(variable, 2)
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            second.__exit__(None, None, None)
    assert len(caplog.messages) == 1 and "overlapping" in caplog.text
