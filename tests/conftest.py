"""Setup of all tests: no network, seeded, one thread each in torch and FAISS."""

import gc
import importlib
import os
import sys
import tempfile
import threading
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LLMCACHE_HOME"] = os.path.join(tempfile.gettempdir(), "llmcache-tests")  # exported graphs are kept there
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else an import asks the network; the others report who uses them
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

# Import nothing heavy here: xdist's controller would import it before the workers start.


#: Tracing doubles import time: import these untraced, before llmcache, whose own modules are traced.
_OF_OTHERS = ("faiss", "hypothesis", "peft", "sentence_transformers", "sklearn.linear_model", "tests.tiny_models")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    if not session.config.getoption("numprocesses", None):  # else xdist's workers collect
        with _untraced():
            for name in _OF_OTHERS if session.config.getoption("cov_source", None) else ():
                importlib.import_module(name)
            _set_examples()
    # Freeze imported objects: each garbage collection then skips torch and transformers, and saves a third of a second.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # Models leave little garbage: collecting every 700 objects took a tenth of the test time.
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def _set_examples() -> None:
    """Try 30 examples per property, not Hypothesis's 100: nearly all property tests are traced."""
    from hypothesis import settings

    settings.register_profile("suite", max_examples=30, deadline=None)  # a busy machine is no failure
    settings.load_profile("suite")


@contextmanager
def _untraced() -> Iterator[None]:
    # Not pytest-cov's own pause: in an xdist worker it leaves an earlier tracer on.
    tracers = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, freeze what it imported and made for later ones: measures collect garbage before each pass."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With coverage, quick tests run first: they build, traced, what is made once per process.
    # Without coverage, slow tests run first: many wait for a server while the other process computes.
    items.sort(key=_is_slow, reverse=not config.getoption("cov_source", None))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Hypothesis, if loaded for the summary, asks gc for the referrers of a trio object


def pytest_collection_finish() -> None:
    import faiss
    import torch

    # Tiny models gain nothing from threads; on a busy machine threads wait for each other.
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Trace quick tests only: coverage counts those, and tracing would slow the slow tests further."""
    with nullcontext() if not _is_slow(item) else _untraced():
        return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List skip reasons with counts; each reason says how to enable the test."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped")
    for reason, n in Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped).most_common():
        terminalreporter.write_line(f"{n:5d}  {reason}")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    import torch

    from llmcache.models import loading

    torch.manual_seed(0)
    loading.FAILED.clear()  # ask the hub again


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small data set of each kind that recipes read."""
    from tests.tiny_data import write_data

    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny base model that recipes train."""
    from tests.tiny_data import save_base

    return save_base(tmp_path_factory.mktemp("base") / "tiny")
