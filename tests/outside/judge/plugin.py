"""The pytest plug-in: `pytest -p judge.plugin`, with tests/outside on PYTHONPATH.

LLMCACHE_OUTSIDE_WAY   off, twice, cold or hit: see `judge.wrapping`
LLMCACHE_OUTSIDE_OUT   file for each test's outcome, the counts and the differences, as JSON
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  before a checkout puts its own on the path

from judge.wrapping import WAYS, Judge, seed

_OUTCOMES: dict[str, str] = {}
_MESSAGES: dict[str, str] = {}
_JUDGE = Judge(os.environ.get("LLMCACHE_OUTSIDE_WAY", "off"))


def pytest_configure(config: pytest.Config) -> None:
    """Patch before any test is imported."""
    if _JUDGE.way not in WAYS:
        raise pytest.UsageError(f"LLMCACHE_OUTSIDE_WAY: give one of {', '.join(WAYS)} (got {_JUDGE.way!r})")
    if importlib.util.find_spec("httpx") is None:  # a checkout's tests import it by its old name
        sys.modules["httpx"] = importlib.import_module("httpx2")
    classes: list[Any] = []
    if os.environ.get("LLMCACHE_OUTSIDE_SENTENCES"):
        from sentence_transformers import CrossEncoder, SentenceTransformer

        classes += [SentenceTransformer, CrossEncoder]
    _JUDGE.start(*classes)
    seed()  # for models of fixtures


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Seed, so that every way sees the same weights and inputs."""
    _JUDGE.test = short_name(item.nodeid)
    seed()
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").endswith("test_modeling_common"):
            module.global_rng.seed(0)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Take the caches off."""
    _JUDGE.finish_test()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep each test's outcome; a failure in any phase counts."""
    name = short_name(report.nodeid)
    if report.failed:
        _OUTCOMES[name] = "failed"
        _MESSAGES[name] = report.longreprtext.strip()[-1500:]
    elif hasattr(report, "context"):  # a part of a test (`subTest`), whose own report follows
        return
    elif report.skipped:
        _OUTCOMES.setdefault(name, "skipped")
    elif report.when == "call":
        _OUTCOMES.setdefault(name, "passed")


def pytest_sessionfinish() -> None:
    """Write outcomes, counts and differences."""
    out = os.environ.get("LLMCACHE_OUTSIDE_OUT")
    if out:
        told = {"way": _JUDGE.way, "outcomes": _OUTCOMES, "messages": _MESSAGES, **_JUDGE.to_dict()}
        Path(out).write_text(json.dumps(told, indent=1, default=str), encoding="utf-8")


def short_name(nodeid: str) -> str:
    """`Class::test` of a node id, without its file."""
    return nodeid.split("::", 1)[-1]
