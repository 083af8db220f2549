"""Stop texts are found across pieces; each token has its own text and bytes."""

from hypothesis import given
from hypothesis import strategies as st

from llmcache.serving.detokenizing import StopTexts, TokenTexts
from tests.serving.served import END
from tests.serving.served import byte_tokenizer as tokenizer


def test_what_might_become_a_stop_text_is_held_back_no_longer_than_that() -> None:
    finder = StopTexts(("stop", "\n\n"))
    assert finder.add("a st") == ("a ", False)
    assert finder.add("ar\n") == ("star", False)
    assert finder.add("b s") == ("\nb ", False)
    assert finder.rest() == "s"
    assert StopTexts(()).add("as it is") == ("as it is", False)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_whatever_the_pieces_nothing_is_told_beyond_a_stop(fed: list[str], stops: list[str]) -> None:
    finder, text, whole, is_found = StopTexts(stops), "", "", False
    for piece in fed:
        more, is_found = finder.add(piece)
        text += more
        whole += piece
        assert is_found == any(stop in whole for stop in stops)  # found with the piece that completes it
        if is_found:
            break
    assert not any(stop in text for stop in stops)
    assert whole.startswith(text)
    if is_found:
        assert any(whole.startswith(stop, len(text)) for stop in stops)
    else:
        assert text + finder.rest() == whole and not any(stop in whole for stop in stops)


def test_tokens_by_themselves() -> None:
    texts, made = TokenTexts(tokenizer()), tokenizer()
    ids = made("é🙂\x00\x7f\xad card")["input_ids"]
    assert bytes(byte for one in ids for byte in texts.utf8(one) or ()) == "é🙂\x00\x7f\xad card".encode()
    assert "\ufffd" in "".join(texts.text(one) for one in ids)
    assert texts.text(made.eos_token_id) == END


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
