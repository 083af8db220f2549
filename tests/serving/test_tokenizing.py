"""Texts are cut as their tokenizer cuts them, without blocking other threads; stop texts are found across pieces."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.serving.detokenizing import StopTexts, TokenTexts
from llmcache.serving.tokenizing import LONG, Side, Tokenizing, Tokens, is_long
from tests.generation.test_detokenizer import spaced_tokenizer
from tests.serving.served import byte_tokenizer, tokenizer

MOST = 24
TEXT = "where is my card and the cash, please? "
MAKERS = {"words": tokenizer, "bytes": byte_tokenizer, "spaces": spaced_tokenizer}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("n", "other"), [(1, ""), (600, ""), (1, TEXT * 5), (20, "my card"), (600, TEXT * 5)])
@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_cut_is_what_the_tokenizer_keeps(kind: str, n: int, other: str, side: Side) -> None:
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
    places = zip(expected.tokens, expected.special_tokens_mask, expected.offsets, strict=True)
    shown = [(name, True, None, None) if special else (text[i:j], False, i, j) for name, special, (i, j) in places]
    assert [one["id"] for one in got] == expected.ids
    assert [(one["text"], one["special"], one["start"], one["stop"]) for one in got] == shown


def test_requests_are_long_by_all_their_inputs() -> None:
    whole: list[Any] = [["a" * LONG, "b"], [("a" * LONG, "b")], [[1] * LONG, [1]]]
    assert all(map(is_long, whole)) and not is_long(["a" * LONG]) and not is_long([])


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

    def other() -> None:
        begun.wait()
        done.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    begun.set()
    if work == "pieces":
        tokenizing.pieces(TEXT * 4000, True)  # the pieces are not read
    else:
        tokenizing.encode([TEXT * 4000], False)
    done.append("text")
    thread.join()
    assert done == ["other", "text"]


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_text_is_told_beyond_a_stop_and_none_is_held_back_for_nothing(fed: list[str], stops: list[str]) -> None:
    finder, text, whole, is_found = StopTexts(stops), "", "", False
    for piece in fed:
        more, is_found = finder.add(piece)
        text, whole = text + more, whole + piece
        assert whole.startswith(text)
        assert is_found == any(stop in whole for stop in stops)  # found with the piece that completes it
        held = whole[len(text) :]
        if is_found:
            assert any(held.startswith(stop) for stop in stops)
            break
        assert not held or any(stop.startswith(held) for stop in stops)
    assert not any(stop in text for stop in stops)
    assert is_found or text + finder.rest() == whole


class Pieces:
    """A tokenizer in sentencepiece's style with three tokens: a word's beginning, a byte, and neither."""

    names = ("\u2581card", "<0xE2>", "<none>")

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return ("card", "\ufffd", "\ufffd")[ids[0]]

    def convert_ids_to_tokens(self, one: int) -> str:
        return self.names[one]


def test_tokens_of_sentencepiece() -> None:
    texts = TokenTexts(Pieces())
    assert [texts.text(one) for one in range(3)] == [" card", "\ufffd", "\ufffd"]
    assert [texts.utf8(one) for one in range(3)] == [list(b" card"), [0xE2], None]
