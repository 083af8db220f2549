"""What holds of every route of an application: it needs a key, and a body cannot make it collect a million errors."""

import re
from collections.abc import Iterator
from typing import Any

import httpx2
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.routing import Mount

from llmcache.serving.authentication import OPEN

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
#: No routes, and spellings of open ones that are not theirs.
UNKNOWN = ("/nothing", "/v1/nothing", "/health/", "//health", "/health/../info", "/%68ealth/x", "/HEALTH", "/admin/x")


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of each route, those of routers that were included too."""
    found = []
    for route in iter_route_contexts(app.routes):
        assert route.path is not None and not isinstance(route.route, Mount), f"walk this too: {route}"
        path = re.sub(r"{[^}]*}", "x", route.path)
        found += [(method, path) for method in sorted(route.methods or METHODS)]
    return found


async def walk_routes(app: FastAPI) -> int:
    """Assert 401 on every route without a key, and on unknown ones, but not on liveness; return how many were asked."""
    asked = {*routes_of(app), *((method, path) for method in METHODS for path in UNKNOWN)}
    asked |= {(method, path) for method in METHODS for _, path in OPEN}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as client:
        for method, path in sorted(asked):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = await client.request(method, f"http://server{path}", headers=headers)
                is_open = (method, path) in OPEN
                assert (answer.status_code == 401) != is_open, f"{method} {path}: {answer.status_code}"
                assert is_open or "Bearer" in answer.headers["www-authenticate"]
    return len(asked)


def unbounded_fields(app: FastAPI) -> list[str]:
    """Lists and mappings of request bodies in which each wrong item would be one more error.

    A body of two megabytes holds a million of them: 7 s of the event loop and more than a gigabyte. `fail_fast` or
    `max_length` bounds a list: `str | Annotated[list[str], Field(fail_fast=True)]`. Nothing bounds a mapping: take
    `dict[str, Any]`, and check its values afterwards.
    """
    found = []
    for route in iter_route_contexts(app.routes):
        body = getattr(route, "body_field", None)
        if body is not None:
            found += [f"{route.path}: {kind}" for kind in _unbounded(body._type_adapter.core_schema)]
    return found


def _unbounded(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        kind = schema.get("type")
        item = (schema.get("items_schema") or schema.get("values_schema") or {}).get("type", "any")
        is_bounded = kind != "dict" and ("max_length" in schema or bool(schema.get("fail_fast")))
        if kind in ("list", "set", "frozenset", "dict", "generator") and item != "any" and not is_bounded:
            yield f"{kind} of {item}"
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ():
        yield from _unbounded(inner)
