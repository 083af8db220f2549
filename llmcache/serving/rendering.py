"""Large answers as JSON: made in a thread, and in parts, as `json` lets no other thread run while it makes one."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fastapi.responses import Response

_LARGE: Final = 16_384  # numbers from which on an answer is large: they take some 5 ms
_NESTED: Final = (dict, list, Iterator)
_ENCODE: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def rendered(answer: Any, n_numbers: int, headers: Mapping[str, str] | None = None) -> Response:
    """A response of an answer.

    Args:
        answer: Of JSON's types, and iterators, which are lists.
        n_numbers: How many it has, about.
        headers: Of the response.
    """
    text = await asyncio.to_thread(render, answer) if n_numbers > _LARGE else render(answer)
    return Response(text, headers=None if headers is None else dict(headers), media_type="application/json")


def render(answer: Any) -> bytes:
    """JSON as `JSONResponse` writes it, made of one list or object of plain values after another."""
    return "".join(_parts(answer)).encode()


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and any(isinstance(one, dict | list) for one in value.values()):
        for i, (name, one) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_ENCODE(name)}:"
            yield from _parts(one)
        yield "}"
    elif isinstance(value, Iterator) or (isinstance(value, list) and value and isinstance(value[0], _NESTED)):
        yield "["
        for i, one in enumerate(value):
            if i:
                yield ","
            yield from _parts(one)
        yield "]"
    else:
        yield _ENCODE(value)
