"""Decoders for the tests of blocks."""

from typing import Any

import pytest
from torch import nn

from tests.prefix.prompts import FAMILIES
from tests.tiny_models import build


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return build(FAMILIES[request.param])


@pytest.fixture
def llama() -> Any:
    return build(FAMILIES["llama"])
