"""A conversation: answers equal plain generation; only complete turns are remembered."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import transformers as tf

from llmcache import LLMCache
from llmcache.errors import RequestError
from llmcache.generation import Sampling, generate
from llmcache.generation.chat import Chat
from tests.generation.test_prompt_cache import TEMPLATE, WORDS, word_tokenizer
from tests.tiny_models import build

GREEDY = Sampling(max_new_tokens=6, stop_ids=())
LONG = " ".join(f"w{i % 6 + 1}" for i in range(40))
SYSTEM = {"role": "system", "content": "hello there"}

Begin = Callable[..., Chat]


@pytest.fixture(scope="module")
def tokenizer() -> tf.PreTrainedTokenizerFast:
    made = word_tokenizer(WORDS)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def model(tokenizer: tf.PreTrainedTokenizerFast) -> Any:
    shape = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 160}
    return build(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**shape)))


@pytest.fixture
def begin(model: Any, tokenizer: tf.PreTrainedTokenizerFast) -> Begin:
    """Begins conversations with greedy answers."""
    return partial(Chat, model, tokenizer, GREEDY)


def read(chat: Chat, text: str) -> str:
    """Ask, and read the answer to its end."""
    answer = "".join(chat.ask(text))
    assert chat.turn().text == answer
    return answer


def said(model: Any, tokenizer: Any, ids: Any) -> str:
    """Return the text that the model generates after the prompt (1, T)."""
    prompt, answer = ids[0].tolist(), generate(model, ids, GREEDY).tokens
    whole, asked = (str(tokenizer.decode(one, skip_special_tokens=True)) for one in ([*prompt, *answer], prompt))
    return whole.removeprefix(asked)


def test_an_answer_is_what_the_model_generates_from_the_whole_conversation(
    begin: Begin, model: Any, tokenizer: tf.PreTrainedTokenizerFast
) -> None:
    chat = begin(system=SYSTEM["content"])
    for text in ("how are you", "w1 w2"):
        asked = [*chat.history, {"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False, return_tensors="pt")
        expected = said(model, tokenizer, ids)
        assert read(chat, text) == expected
        assert chat.history == (*asked, {"role": "assistant", "content": expected})
    assert chat.history[0] == SYSTEM and len(chat.history) == 5
    plain = word_tokenizer(WORDS)  # without a template the conversation is one text
    ids = plain("hello\nhow are", return_tensors="pt")["input_ids"]
    assert read(Chat(model, plain, GREEDY, system="hello"), "how are") == said(model, plain, ids)


def test_a_question_that_is_asked_again_is_known_and_a_history_is_only_read(begin: Begin) -> None:
    chat = begin(system=SYSTEM["content"])
    chat.history[0]["content"] = "w1"  # type: ignore[index]
    assert chat.history[0] == SYSTEM
    for is_known in (False, True):
        chat.clear()
        with pytest.raises(RequestError, match="nothing was asked"):
            chat.turn()
        list(chat.ask("how are you"))
        assert chat.turn().prompt.is_hit == is_known
    assert len(chat.prompts) == 1
    with pytest.raises(RequestError, match=r"ask with a text \(got int\)"):
        chat.ask(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("why", ["left", "closed", "interrupted"])
def test_an_answer_that_has_no_end_is_forgotten(begin: Begin, model: Any, why: str) -> None:
    chat = begin()
    whole = read(chat, "how are you")
    chat.clear()
    answer = chat.ask("how are you")
    begun = next(answer)
    if why == "closed":
        answer.close()
    if why == "interrupted":
        hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(answer)
        hook.remove()
    assert why == "left" or not list(answer)
    turn = chat.turn()
    assert (turn.text, turn.generation.stopped_by, chat.history) == (begun, None, ())
    assert whole.startswith(begun) and read(chat, "how are you") == whole


def test_a_history_without_room_is_refused_or_cut(begin: Begin, model: Any) -> None:
    too_long = " ".join([LONG] * 4)
    with pytest.raises(RequestError, match="of which the model can take 154 here"):
        begin().ask(too_long)
    chat = begin(truncate="left")
    assert read(chat, too_long)
    assert chat.history[0]["content"] == too_long
    with pytest.raises(RequestError, match="max_new_tokens=160: the model's context has 160 tokens"):
        Chat(model, word_tokenizer(WORDS), Sampling(max_new_tokens=160))


def test_the_oldest_turns_are_forgotten_and_the_system_is_not(begin: Begin, model: Any) -> None:
    with LLMCache.wrap(model, auto_bypass=False):
        chat, turns = begin(system=SYSTEM["content"], truncate="left"), []
        for number in range(12):
            "".join(chat.ask(f"w{number % 6 + 1} " * 20))
            turns.append(chat.turn())
            assert chat.history[0] == SYSTEM
            assert [message["role"] for message in chat.history[1:]] == ["user", "assistant"] * (len(chat.history) // 2)
    forgotten = [turn.n_forgotten for turn in turns]
    assert sum(forgotten) > 0 and not any(turn.prompt.n_dropped for turn in turns)
    later = [turn for turn in turns[6:] if not turn.n_forgotten]
    assert later and all(turn.generation.rung == "prefix" for turn in later)  # they begin like the turn before


def test_what_is_not_answered_makes_nothing_forgotten(begin: Begin) -> None:
    chat = begin(system=SYSTEM["content"], truncate="left")
    for number in range(4):
        read(chat, f"w{number + 1} " * 20)
    before = chat.history
    next(chat.ask("w1 " * 60))
    assert chat.turn().n_forgotten > 0 and chat.history == before
    next(chat.ask("w1 " * 200))
    turn = chat.turn()
    assert (turn.n_forgotten, chat.history) == (0, before) and turn.prompt.n_dropped > 0
    read(chat, "w1 " * 60)
    assert len(chat.history) < len(before) + 2
