"""Large answers: the same bytes as `JSONResponse` writes, made in pieces, in a thread."""

import asyncio
import threading
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from llmcache.serving import rendering
from llmcache.serving.rendering import render, rendered

ANSWERS = (
    [],
    {},
    [[]],
    [1.5, "é\n", None, True],
    [[[0.1, 2], []], [[3]]],
    {"object": "list", "data": [{"index": 0, "embedding": [0.1, -2e-9]}], "usage": {"n": 3}, "none": None},
    [[{"id": 1, "text": 'a "b"', "start": None}], []],
)


@pytest.mark.parametrize("answer", ANSWERS)
def test_it_is_what_a_response_writes(answer: Any) -> None:
    assert render(answer) == JSONResponse(answer).body


def test_iterators_are_lists() -> None:
    assert render([iter([{"id": 1}, {"id": 2}]), iter([])]) == b'[[{"id":1},{"id":2}],[]]'


def test_no_piece_is_large() -> None:
    assert max(map(len, rendering._parts([[[0.123456789] * 9] * 99] * 9))) < 200


@pytest.mark.parametrize("n", [3, 99_999])
def test_a_large_answer_is_made_in_another_thread(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(rendering, "render", lambda answer: threads.append(threading.get_ident()) or render(answer))
    response = asyncio.run(rendered([[1.0] * 3], n, {"X-Cache": "HIT"}))
    assert (threads[0] == threading.get_ident()) == (n == 3)
    assert (response.body, response.headers["x-cache"]) == (b"[[1.0,1.0,1.0]]", "HIT")
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("answer", [[[float("nan")]], {"a": [float("inf")]}])
def test_what_is_no_number_is_no_json(answer: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render(answer)
