"""Texts of any length: cut as the tokenizer itself would cut them, without blocking other threads."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from llmcache.serving.tokenizing import LONG, Side, Tokenizing, Tokens, is_long
from tests.generation.test_detokenizer import spaced_tokenizer
from tests.serving.served import byte_tokenizer, tokenizer

MOST = 24
TEXT = "where is my card and the cash, please? "
MAKERS = {"words": tokenizer, "bytes": byte_tokenizer, "spaces": spaced_tokenizer}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n", [1, 20, 600])
@pytest.mark.parametrize("other", ["", "my card", TEXT * 5])
@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_cut_is_what_the_tokenizer_keeps(kind: str, other: str, n: int, side: Side) -> None:
    made = MAKERS[kind]()
    item: Any = (TEXT * n, other) if other else TEXT * n
    (got,) = Tokenizing(made, MOST, len(made)).encode([item], True, side)
    before, made.truncation_side = made.truncation_side, side
    expected = made(*(item if other else (item,)), truncation=True, max_length=MOST)
    made.truncation_side = before
    made.backend_tokenizer.no_truncation()
    assert isinstance(got, Tokens)
    assert list(got.ids) == expected["input_ids"]
    assert not got.types or list(got.types) == expected["token_type_ids"]


@pytest.mark.parametrize("kind", MAKERS)
def test_pieces_are_the_tokenizers_tokens_in_their_places(kind: str) -> None:
    made, text = MAKERS[kind](), "time, my card € naïve  a"
    got = list(Tokenizing(made, MOST, len(made)).pieces(text, True))
    expected = made.backend_tokenizer.encode(text)
    assert [one["id"] for one in got] == expected.ids
    for one, name, special, (start, stop) in zip(
        got, expected.tokens, expected.special_tokens_mask, expected.offsets, strict=True
    ):
        if special:
            assert one == {"id": one["id"], "text": name, "special": True, "start": None, "stop": None}
        else:
            assert (one["text"], one["special"], one["start"], one["stop"]) == (text[start:stop], False, start, stop)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["a" * LONG], False),
        (["a" * LONG, "b"], True),
        ([("a" * LONG, "b")], True),
        ([[1] * LONG, [1]], True),
        ([], False),
    ],
)
def test_requests_are_long_by_all_their_inputs(items: Any, expected: bool) -> None:
    assert is_long(items) == expected


@pytest.fixture
def unswitched() -> Iterator[None]:
    """Threads switch only when the running one releases the GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e3)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("work", ["encode", "pieces"])
def test_others_run_while_a_text_is_tokenised(work: str, unswitched: None) -> None:
    tokenizing, done, begun = Tokenizing(tokenizer(), 10**6, 100), [], threading.Event()
    text = TEXT * 4000

    def other() -> None:
        begun.wait()
        done.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    begun.set()
    if work == "pieces":
        tokenizing.pieces(text, True)  # the pieces are not read
    else:
        tokenizing.encode([text], False)
    done.append("text")
    thread.join()
    assert done == ["other", "text"]
