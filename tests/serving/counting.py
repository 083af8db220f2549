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

from experiments.runs.folder import write_figures
from experiments.support.environment import describe

UNANSWERED = "unanswered"  # the client had disconnected


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hostile")
    group.addoption("--count-into", type=Path, required=True, help="Folder that the numbers are written to.")
    group.addoption("--fuzz-requests", type=int, default=200, help="Requests made up of each route and kind.")
    group.addoption("--tei-openapi", type=Path, help="docs/openapi.json of text-embeddings-inference.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Counting(config))


class Counting:
    """Counts tests, and requests by status class, per list."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._asked: dict[str, Counter[str]] = {}
        self._now: Counter[str] = Counter()
        self._plain = FastAPI.__call__
        FastAPI.__call__ = self._counted()  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Count the requests of this test for its list."""
        mark = item.get_closest_marker("hostile")
        self._now = Counter() if mark is None else self._asked.setdefault(mark.args[0], Counter())
        yield
        self._now["tests"] += 1  # passed tests only

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the numbers, unless a test failed."""
        FastAPI.__call__ = self._plain  # type: ignore[method-assign]
        if exitstatus == 0:
            lists = [{"list": name, **found} for name, found in self._asked.items() if found["tests"]]
            options = {name: str(self._config.getoption(name)) for name in ("fuzz_requests",)}
            write_figures(self._config.getoption("count_into"), options, describe(0), {"lists": lists})

    def _counted(self) -> Any:
        async def call(app: FastAPI, scope: Any, receive: Any, send: Any) -> None:
            found, outcome = self._now, UNANSWERED

            async def noted(message: Any) -> None:
                nonlocal outcome
                if message["type"] == "http.response.start":
                    outcome = f"{message['status'] // 100}xx"
                await send(message)

            try:
                await self._plain(app, scope, receive, noted)
            finally:
                if scope["type"] == "http":
                    found.update(("requests", outcome))

        return call
