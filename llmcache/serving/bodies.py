"""JSON bodies: inflated, parsed without FastAPI's dependency injection, which no route uses; rendered off the loop."""

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import to_json

from llmcache.serving.refusals import Refusal

_JSON: Final = "application/json"
#: The `wbits` of zlib for each encoding of a body.
_WINDOWS: Final = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
_LARGE_NUMBERS: Final = 65_536  # responses with more numbers are rendered in a thread: these take about 5 ms


class BodyRoute(APIRoute):
    """Route whose endpoint takes `request` and, if the route has a body, `body`, a pydantic model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that validates the body once; what is not JSON goes to FastAPI for its error."""
        by_fastapi, endpoint, field = super().get_route_handler(), self.endpoint, self.body_field
        if field is None:
            return by_fastapi
        validate = field.field_info.annotation.model_validate  # type: ignore[union-attr]

        async def handler(request: Request) -> Response:
            if request.headers.get("content-type") != _JSON:
                return await by_fastapi(request)
            try:
                body = validate(await request.json(), from_attributes=True)  # as FastAPI does
            except ValidationError as error:
                raise invalid(error) from None
            except (ValueError, RecursionError):
                return await by_fastapi(request)
            response: Response = await endpoint(body=body, request=request)
            return response

        return handler


def invalid(error: ValidationError) -> RequestValidationError:
    """Return FastAPI's error for a body that its model refuses, without the body."""
    found = error.errors(include_url=False, include_input=False)
    return RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found])


async def rendered(
    rows: Iterable[Any], n_numbers: int, headers: Mapping[str, str] | None = None, **around: Any
) -> Response:
    """Return a JSON response with the list `rows` of about `n_numbers` numbers, or an object of it and fields `around`.

    The rows of a large response are made and rendered in a thread, one by one: `to_json` holds the GIL for each.
    """
    text = await asyncio.to_thread(_to_json, rows) if n_numbers > _LARGE_NUMBERS else _to_json(rows)
    if around:
        text = to_json(around)[:-1] + b',"data":' + text + b"}"
    return Response(text, headers=headers, media_type=_JSON)


def _to_json(rows: Iterable[Any]) -> bytes:
    return b"[" + b",".join(map(to_json, rows)) + b"]"


def decoded(body: bytes, encodings: Sequence[bytes], most: int) -> bytes:
    """Return a body without its encodings; `Refusal` if one is unknown, it is damaged, or has over `most` bytes."""
    name = b", ".join(encodings).strip().lower()
    if not body or name in (b"", b"identity"):
        return body
    if name not in _WINDOWS:
        raise Refusal("encoding", "Content-Encoding: send the body as it is, or as gzip or deflate")
    inflating = zlib.decompressobj(_WINDOWS[name])
    try:
        whole = inflating.decompress(body, most + 1)
    except zlib.error:
        whole = b""
    if len(whole) > most:
        raise Refusal("too_large", f"the body has more than {most:,} bytes once inflated: send less per request")
    if not inflating.eof or inflating.unused_data:
        raise Refusal("invalid", f"the body is not whole or not {name.decode()}")
    return whole


def cache_headers(rungs: Sequence[str | None]) -> dict[str, str]:
    """Return `X-Cache` headers from the rung that served each input; None means the input was computed."""
    found = [rung for rung in rungs if rung is not None]
    return {
        "X-Cache": "HIT" if len(found) == len(rungs) else "PARTIAL" if found else "MISS",
        "X-Cache-Rung": ",".join(dict.fromkeys(found)) or "none",
    }
