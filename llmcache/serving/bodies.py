"""JSON bodies: read without FastAPI's dependencies, of which there are none here, and written off the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import to_json

_JSON: Final = "application/json"
_LARGE: Final = 65_536  # numbers from which on an answer is large: they take some 5 ms


class BodyRoute(APIRoute):
    """A route whose endpoint takes `request` and, where it has a body, `body`: a model of pydantic."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Validate a body once. What is not valid, or not sent as JSON, goes the way of FastAPI, which tells why."""
        usual, endpoint, field = super().get_route_handler(), self.endpoint, self.body_field
        if field is None:
            return usual
        validate = field.field_info.annotation.model_validate  # type: ignore[union-attr]

        async def handler(request: Request) -> Response:
            if request.headers.get("content-type") != _JSON:
                return await usual(request)
            try:
                body = validate(await request.json())
            except (ValueError, RecursionError):
                return await usual(request)
            response: Response = await endpoint(body=body, request=request)
            return response

        return handler


async def rendered(rows: Sequence[Any], n_numbers: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return a list of rows of about `n_numbers` numbers; iterators in it become lists.

    A large one is made in a thread, and in parts, since no other thread runs while a part is made.
    """
    text = await asyncio.to_thread(_render, rows) if n_numbers > _LARGE else _render(rows)
    return Response(text, headers=headers, media_type=_JSON)


def _render(rows: Sequence[Any]) -> bytes:
    return b"[" + b",".join(map(to_json, rows)) + b"]"


def cache_headers(rungs: Sequence[str | None]) -> dict[str, str]:
    """Return headers that tell what served the inputs of a request; None: an input was computed."""
    found = [rung for rung in rungs if rung is not None]
    return {
        "X-Cache": "HIT" if len(found) == len(rungs) else "PARTIAL" if found else "MISS",
        "X-Cache-Rung": ",".join(dict.fromkeys(found)) or "none",
    }
