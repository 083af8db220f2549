"""Short names for the types of fixtures."""

from concurrent.futures import ThreadPoolExecutor

import pytest

Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
Pool = ThreadPoolExecutor
Shown = pytest.CaptureFixture[str]
