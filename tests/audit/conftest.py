"""Fixtures: a calibrated cache whose approximate hits are all audited, its model and its reading."""

from collections.abc import Iterator

import pytest
from torch import nn

from llmcache import LLMCache
from tests import inside
from tests.contract.streams import calibrated, classifier
from tests.topics import Reading


@pytest.fixture
def model() -> nn.Module:
    return classifier()


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
def cache(model: nn.Module, reading: Reading) -> Iterator[LLMCache]:
    """A calibrated cache of the model, with the reading; nothing is audited before `drain`."""
    with calibrated(model, reading, audit=1.0) as cache:
        yield inside.keep_quiet(cache)
