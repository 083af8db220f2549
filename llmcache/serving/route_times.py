"""How long requests of each route took lately, and the middleware that sees all requests."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from fastapi.routing import iter_route_contexts
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from llmcache.serving.metrics import Metrics

#: Route of all requests that no route takes.
UNKNOWN: Final = "unknown"
_LATEST = 1024  # requests a route whose times are kept
_CLIENT_GONE = 499  # in place of a status, where none was sent


class RouteTime(NamedTuple):
    """What requests of a route took lately.

    Attributes:
        route: Its template.
        n_requests: Since the start.
        p50_s: Half of the latest took no longer, seconds.
        p99_s: Likewise of all but a hundredth.
    """

    route: str
    n_requests: int
    p50_s: float
    p99_s: float


class RouteTimes:
    """The latest requests of each route. Filled by the event loop, read by any thread."""

    def __init__(self) -> None:
        """None yet."""
        self._latest: dict[str, deque[float]] = {}
        self._counts: dict[str, int] = {}

    def add(self, route: str, seconds: float) -> None:
        """Take in a request by the template of its route."""
        if route not in self._latest:
            self._latest[route] = deque(maxlen=_LATEST)
        self._latest[route].append(seconds)
        self._counts[route] = self._counts.get(route, 0) + 1

    def slowest(self) -> list[RouteTime]:
        """All routes, the largest p99 first."""
        kept = [(route, sorted(times.copy())) for route, times in list(self._latest.items())]
        found = [RouteTime(route, self._counts[route], _nth(s, 0.5), _nth(s, 0.99)) for route, s in kept]
        return sorted(found, key=lambda one: -one.p99_s)


class CountRequests:
    """ASGI middleware: counts and times every request under the template of its route."""

    def __init__(self, app: ASGIApp, metrics: "Metrics", clock: Callable[[], float] = time.perf_counter) -> None:
        """Stand before an application, outside of all that may refuse a request."""
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._templates: _Templates | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._templates is None:
            self._templates = _Templates(route.path for route in iter_route_contexts(scope["app"].routes))
        route = self._templates.find(scope["path"].removeprefix(scope.get("root_path", "")))
        is_inference = scope["method"] == "POST" and route != UNKNOWN and not route.startswith("/admin/")
        status, started = _CLIENT_GONE, self._clock()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.n_under_way += is_inference
        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            self._metrics.n_under_way -= is_inference
            self._metrics.answered(route, status, self._clock() - started, is_inference)


class _Templates:
    """Finds the template of a path; as starlette does, by the first that fits, be it a mount."""

    def __init__(self, templates: Iterable[str | None]) -> None:
        known = dict.fromkeys(template for template in templates if template)
        self._plain = {template for template in known if "{" not in template}
        self._others = {template: compile_path(template)[0] for template in known if template not in self._plain}

    def find(self, path: str) -> str:
        if path in self._plain:
            return path
        return next((template for template, fits in self._others.items() if fits.match(path)), UNKNOWN)


def _nth(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]
