"""Shared by all tests: no network, one thread each in torch and FAISS, seeded."""

import gc
import importlib
import os
import sys
import threading
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

# Nothing heavy is imported here: the process that hands tests out to others would import it before they begin.


#: What is traced while it is imported takes twice as long: these are imported before llmcache, whose own modules are.
_OF_OTHERS = ("faiss", "hypothesis", "peft", "sentence_transformers", "sklearn.linear_model", "tests.tiny_models")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    if not session.config.getoption("numprocesses", None):  # else other processes collect
        with _untraced():
            for name in _OF_OTHERS if session.config.getoption("cov_source", None) else ():
                importlib.import_module(name)
            _set_examples()
    # Collecting garbage then looks at what tests made, not at all of torch and transformers, for a third of a second.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # Little of what models are made of is garbage: looking for some each 700 objects took a tenth of all tests.
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def _set_examples() -> None:
    """Properties are tried on 30 examples, not on hypothesis' 100: nearly all of them are traced."""
    from hypothesis import settings

    settings.register_profile("suite", max_examples=30)
    settings.load_profile("suite")


@contextmanager
def _untraced() -> Iterator[None]:
    # Not by pytest-cov's own pause: in a process of xdist's that leaves another tracer, begun before its own, at work.
    tracers = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Quick tests come first, so that what is made once a process is made, and traced, by those whose coverage counts.
    # Where nothing is traced they come last: many slow ones wait for a server, while the other process computes.
    items.sort(key=_is_slow, reverse=not config.getoption("cov_source", None))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # hypothesis, which may be loaded for the summary, asks who holds an object of trio's


def pytest_collection_finish() -> None:
    import faiss
    import torch

    # Tiny models gain nothing from threads, and on a busy machine they wait for each other.
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Coverage is what quick tests cover: those marked slow are not traced, which would make them slower still."""
    with nullcontext() if not _is_slow(item) else _untraced():
        return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List what was skipped, a line for each reason; a reason says what would enable the test."""
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
    loading.FAILED.clear()  # the hub is asked anew


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small data sets of every kind that recipes read."""
    from tests.tiny_data import write_data

    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that recipes begin from."""
    from tests.tiny_data import save_base

    return save_base(tmp_path_factory.mktemp("base") / "tiny")
