"""A pytest plug-in that counts the requests of hostile tests, and fuzzes longer: see `make test-hostile`.

Hostile tests have the mark `hostile`; its argument names their list. The plug-in counts requests that reach a FastAPI
application, not bytes that never become a request.
"""

from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from experiments.runs.runner import write_figures
from experiments.support.environment import describe

_plain = FastAPI.__call__
_asked: dict[str, Counter[str]] = {}  # by list: tests, requests, and these by the class of their status
_now: Counter[str] = Counter()  # of the running test's list


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hostile")
    group.addoption("--count-into", type=Path, required=True, help="Folder that the numbers are written to.")
    group.addoption("--fuzz-requests", type=int, default=200, help="Requests made up of each route and kind.")
    group.addoption("--tei-openapi", type=Path, help="docs/openapi.json of text-embeddings-inference.")


def pytest_sessionstart() -> None:
    FastAPI.__call__ = _call  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count the requests of this test for its list, and the test itself if it passes."""
    global _now
    mark = item.get_closest_marker("hostile")
    _now = Counter() if mark is None else _asked.setdefault(mark.args[0], Counter())
    yield
    _now["tests"] += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the numbers, unless a test failed."""
    FastAPI.__call__ = _plain  # type: ignore[method-assign]
    if exitstatus == 0:
        lists = [{"list": name, **found} for name, found in _asked.items() if found["tests"]]
        options = {"fuzz_requests": str(session.config.getoption("fuzz_requests"))}
        write_figures(session.config.getoption("count_into"), options, describe(0), {"lists": lists})


async def _call(app: FastAPI, scope: Any, receive: Any, send: Any) -> None:
    found, outcome = _now, "unanswered"  # as long as the client may disconnect

    async def noted(message: Any) -> None:
        nonlocal outcome
        if message["type"] == "http.response.start":
            outcome = f"{message['status'] // 100}xx"
        await send(message)

    try:
        await _plain(app, scope, receive, noted)
    finally:
        if scope["type"] == "http":
            found.update(("requests", outcome))
