"""JSON bodies: parsed without FastAPI's dependency injection, which no route uses; rendered off the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import to_json

_JSON: Final = "application/json"
_LARGE_NUMBERS: Final = 65_536  # responses with more numbers are rendered in a thread: these take about 5 ms


class BodyRoute(APIRoute):
    """Route whose endpoint takes `request` and, if the route has a body, `body`, a pydantic model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that validates the body once; invalid or non-JSON bodies go to FastAPI for its error."""
        by_fastapi, endpoint, field = super().get_route_handler(), self.endpoint, self.body_field
        if field is None:
            return by_fastapi
        validate = field.field_info.annotation.model_validate  # type: ignore[union-attr]

        async def handler(request: Request) -> Response:
            if request.headers.get("content-type") != _JSON:
                return await by_fastapi(request)
            try:
                body = validate(await request.json())
            except (ValueError, RecursionError):
                return await by_fastapi(request)
            response: Response = await endpoint(body=body, request=request)
            return response

        return handler


async def rendered(rows: Sequence[Any], n_numbers: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response with the list `rows` of about `n_numbers` numbers; iterators in it become lists.

    A large response is rendered in a thread, row by row: `to_json` holds the GIL during each call.
    """
    text = await asyncio.to_thread(_to_json, rows) if n_numbers > _LARGE_NUMBERS else _to_json(rows)
    return Response(text, headers=headers, media_type=_JSON)


def _to_json(rows: Sequence[Any]) -> bytes:
    return b"[" + b",".join(map(to_json, rows)) + b"]"


def cache_headers(rungs: Sequence[str | None]) -> dict[str, str]:
    """Return `X-Cache` headers from the rung that served each input; None means the input was computed."""
    found = [rung for rung in rungs if rung is not None]
    return {
        "X-Cache": "HIT" if len(found) == len(rungs) else "PARTIAL" if found else "MISS",
        "X-Cache-Rung": ",".join(dict.fromkeys(found)) or "none",
    }
