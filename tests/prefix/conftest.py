"""Decoders for the tests of blocks."""

from typing import Any

import pytest

from tests.prefix.prompts import FAMILIES
from tests.tiny_models import build


@pytest.fixture
def gpt2() -> Any:
    return build(FAMILIES["gpt2"])


@pytest.fixture
def llama() -> Any:
    return build(FAMILIES["llama"])
