"""Large answers as JSON: in a thread, and in parts, since no other thread runs while a part is made."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi.responses import Response
from pydantic_core import to_json

_LARGE: Final = 65_536  # numbers from which on an answer is large: they take some 5 ms


async def rendered(rows: Sequence[Any], n_numbers: int, headers: Mapping[str, str] | None = None) -> Response:
    """A response that is a list of rows.

    Args:
        rows: Of JSON's types, and iterators, which are lists.
        n_numbers: How many they have together, about.
        headers: Of the response.
    """
    text = await asyncio.to_thread(_render, rows) if n_numbers > _LARGE else _render(rows)
    return Response(text, headers=None if headers is None else dict(headers), media_type="application/json")


def _render(rows: Sequence[Any]) -> bytes:
    return b"[" + b",".join(map(to_json, rows)) + b"]"
