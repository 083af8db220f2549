"""Routes that read a JSON body themselves, without FastAPI's dependencies, of which there are none here."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

_JSON: Final = "application/json"


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
