"""Text from a stream of tokens: pieces join to the text after the prompt's, and split no character."""

from functools import cache as once
from typing import Any

import pytest
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from llmcache.generation.detokenizer import Detokenizer
from tests.generation.test_prompt_cache import WORDS, word_tokenizer
from tests.serving.served import byte_tokenizer as tokenizer

PIECES = "\u2581 \u2581\u2581 \u2581time \u2581a \u2581card time a card s , ."
SPECIAL = ("<unk>", "<s>", "</s>", "<turn>")


@once
def spaced_tokenizer() -> tf.PreTrainedTokenizerFast:
    """Return a tokenizer in sentencepiece's style: pieces hold the space before a word; a text's first is dropped."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES.split()]
    made = Tokenizer(models.Unigram([(name, -len(name) / 9) for name in names], unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaces = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    more = {"additional_special_tokens": ["<turn>"]}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **more
    )


def after(made_by: Any, prompt: list[int], answer: list[int]) -> str:
    """Return the decoded text after the prompt's."""
    whole, asked = (made_by.decode(ids, skip_special_tokens=True) for ids in ([*prompt, *answer], prompt))
    assert whole.startswith(asked)
    return str(whole[len(asked) :])


def pieces(made_by: Any, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    text = Detokenizer(made_by, prompt or [])
    return [*(text.add(one) for one in ids), text.rest()]


@pytest.mark.parametrize("n_special", [0, 1, 9])  # as templates end a turn
def test_a_space_after_the_prompt_is_told(n_special: int) -> None:
    made = spaced_tokenizer()
    prompt = made("5 €")["input_ids"] + [SPECIAL.index("<turn>")] * n_special
    answer = made("time, a card", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(made, answer, prompt)) == " time, a card"
    assert "".join(pieces(made, answer, [1])) == "time, a card"  # the text begins with the answer


_IDS = st.lists(st.sampled_from([*range(1, 4), *range(260, len(spaced_tokenizer()))]), max_size=24)
_SAID = st.text("a€ 🙂s", max_size=12).map(lambda said: spaced_tokenizer()(said, add_special_tokens=False)["input_ids"])


@given(_IDS, _IDS | _SAID)
def test_with_tokens_of_no_text_and_characters_of_several_tokens(prompt: list[int], answer: list[int]) -> None:
    assert "".join(pieces(spaced_tokenizer(), answer, prompt)) == after(spaced_tokenizer(), prompt, answer)


def test_a_character_that_the_prompt_has_begun_is_told_whole() -> None:
    made = tokenizer()
    ids = made("a 🙂!")["input_ids"]
    n = next(n for n in range(len(ids)) if made.decode(ids[:n]).endswith("\ufffd"))
    assert "".join(pieces(made, ids[n:], ids[:n])) == "🙂!"


def test_characters_are_told_whole_or_at_the_end() -> None:
    text = "5 € a naïve 🙂!"
    ids = tokenizer()(text)["input_ids"]
    found = pieces(tokenizer(), ids)
    assert "".join(found) == text
    assert "" in found and not any("\ufffd" in piece for piece in found)
    *before, rest = pieces(tokenizer(), tokenizer()("a🙂")["input_ids"][:-1])
    assert "".join(before) == "a" and set(rest) == {"\ufffd"}


@given(st.lists(st.integers(0, len(tokenizer()) - 1), max_size=40))
def test_pieces_are_the_whole_text(ids: list[int]) -> None:
    assert "".join(pieces(tokenizer(), ids)) == tokenizer().decode(ids, skip_special_tokens=True)


def test_words_that_a_space_joins() -> None:
    made = word_tokenizer(WORDS)
    ids = made("hello there how are you", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(made, ids)) == made.decode(ids)
