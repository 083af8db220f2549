"""The prompt cache: it gives the same tokens as without it, and formats and tokenises nothing twice."""

import datetime
from collections import Counter
from types import MappingProxyType
from typing import Any

import pytest
import transformers as tf

from llmcache.errors import RequestError
from llmcache.generation.prompt_cache import PromptCache

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = "system user assistant hello there how are you w1 w2 w3 w4 w5 w6"
CHAT = [{"role": "system", "content": "hello there"}, {"role": "user", "content": "how are you"}]


class Counted(tf.PreTrainedTokenizerFast):
    """A tokenizer that counts its calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked = Counter[str]()
        super().__init__(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked["tokens"] += 1
        return super().__call__(*args, **kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        self.asked["text"] += 1
        return super().apply_chat_template(*args, **kwargs)


def word_tokenizer(words: str, has_specials: bool = True) -> Counted:
    """Return a tokenizer of these words; `has_specials`: texts begin with `[BOS]`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[UNK]", "[BOS]", *words.split()]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if has_specials:
        backend.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    return Counted(tokenizer_object=backend, unk_token="[UNK]", bos_token="[BOS]")


@pytest.fixture
def tokenizer() -> Counted:
    made = word_tokenizer(WORDS)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def prompts(tokenizer: Counted) -> PromptCache:
    return PromptCache(tokenizer)


def plain(tokenizer: Any, messages: Any = CHAT) -> tuple[int, ...]:
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def test_chats_have_their_templates_tokens_and_texts_special_ones(prompts: PromptCache, tokenizer: Counted) -> None:
    first, again = prompts.encode([MappingProxyType(message) for message in CHAT]), prompts.encode(CHAT)
    assert (first.is_hit, again.is_hit) == (False, True)
    assert tokenizer.asked == {"text": 1, "tokens": 1}
    assert first.ids == again.ids == plain(tokenizer)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    made = prompts.encode(text)
    assert not made.is_hit and list(made.ids) == tokenizer(text)["input_ids"]  # the same text, but not the same tokens
    for chat in (CHAT[::-1], CHAT[:1], [{**CHAT[0], "role": "user"}, CHAT[1]]):  # other roles and orders
        assert prompts.encode(chat).ids == plain(tokenizer, chat)
    assert len(prompts) == 5


def test_another_template_or_more_tokens_make_another_prompt(prompts: PromptCache, tokenizer: Any) -> None:
    prompts.encode(CHAT)
    tokenizer.chat_template = TEMPLATE.replace("assistant{%", "{%")
    assert prompts.encode(CHAT).ids == plain(tokenizer)
    text = "hello w1 there"
    before = prompts.encode(text)
    tokenizer.add_tokens(["w1 there"])
    after = prompts.encode(text)
    assert not after.is_hit and len(after.ids) < len(before.ids)
    tokenizer.bos_token = "w2"  # becomes special
    assert not prompts.encode(text).is_hit
    tokenizer.chat_template = "{{ bos_token }} " + TEMPLATE
    for tokenizer.bos_token in ("w2", "w1"):
        assert prompts.encode(CHAT).ids == plain(tokenizer)


@pytest.mark.parametrize(
    ("template", "messages"),
    [("{{ strftime_now('%Y') and '' }}" + TEMPLATE, CHAT), (TEMPLATE, said("w1", told=datetime.date(2026, 1, 2)))],
    ids=["tells the time", "a date"],
)
def test_what_has_no_json_or_tells_the_time_is_formatted_each_time(
    prompts: PromptCache, tokenizer: Counted, template: str, messages: Any
) -> None:
    tokenizer.chat_template = template
    assert [prompts.encode(messages).is_hit for _ in range(3)] == [False, True, True]
    assert tokenizer.asked == {"text": 3, "tokens": 1}


def test_a_long_prompt_loses_its_beginning_or_is_refused(tokenizer: Any) -> None:
    whole = plain(tokenizer)
    cut = PromptCache(tokenizer, max_length=4, truncate="left").encode(CHAT)
    assert (cut.ids, cut.n_dropped) == (whole[-4:], len(whole) - 4)
    with pytest.raises(RequestError, match=r"8 tokens, of which the model can take 4 here.*truncate='left'"):
        PromptCache(tokenizer, max_length=4).encode(CHAT)
    assert PromptCache(tokenizer, max_length=8).encode(CHAT).n_dropped == 0


@pytest.mark.parametrize(("length", "kept"), [(3, [0, 2, 3]), (1, [3])])
def test_what_every_text_begins_with_is_not_cut_off(tokenizer: Any, length: int, kept: list[int]) -> None:
    whole = PromptCache(tokenizer).encode("w1 w2 w3").ids
    cut = PromptCache(tokenizer, max_length=length, truncate="left").encode("w1 w2 w3")
    assert (cut.ids, cut.n_dropped) == (tuple(whole[place] for place in kept), 4 - length)


def test_the_prompt_used_longest_ago_leaves(tokenizer: Any) -> None:
    prompts = PromptCache(tokenizer, max_entries=2)
    for text in ("w1", "w2", "w1", "w3"):
        prompts.encode(text)
    assert [prompts.encode(text).is_hit for text in ("w1", "w3", "w2")] == [True, True, False]
    assert len(prompts) == 2
    prompts.clear()
    assert len(prompts) == 0


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("template", "prompt", "told"),
    [
        (None, CHAT, "no chat template: give the prompt as one text"),
        (TEMPLATE, "", "empty"),
        (TEMPLATE, "a\udcff", "no valid text: character 1"),
        *((TEMPLATE, wrong, "give a text, or messages") for wrong in ([], 5, ["w1"])),
        ("{{ raise_exception('no system here') }}", CHAT, "template does not take these messages: .*no system here"),
        ("{% if %}", CHAT, "chat template does not take these messages: .*Expected"),
        (TEMPLATE, said("w1", more=ENDLESS), "chat template does not take these messages"),  # transformers walks them
    ],
)
def test_what_cannot_be_a_prompt_is_refused(template: str | None, prompt: Any, told: str) -> None:
    bare = word_tokenizer(WORDS, has_specials=False)
    bare.chat_template = template
    with pytest.raises(RequestError, match=told):
        PromptCache(bare).encode(prompt)


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"max_length": "5"}, {"max_entries": 0}, {"truncate": "right"}])
def test_settings_out_of_range_are_refused(tokenizer: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        PromptCache(tokenizer, **wrong)


class Masked(str):
    """A string that claims to equal any other."""

    def encode(self, *_: Any) -> bytes:
        return b"w1"

    def __eq__(self, _: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("w1")


def test_a_text_is_known_by_its_characters_whatever_its_class_says(prompts: PromptCache, tokenizer: Any) -> None:
    for text in ("w1", Masked("w1"), Masked("w2 w3"), "w2 w3"):
        assert list(prompts.encode(text).ids) == tokenizer(str.__str__(text))["input_ids"]
    assert len(prompts) == 2


@pytest.mark.parametrize("pair", [("w1", Masked("w2")), (["w1"], ("w1",)), ({"1": "w1"}, {1: "w1"}), (1, True)])
def test_contents_that_templates_tell_apart_differ(prompts: PromptCache, tokenizer: Any, pair: tuple[Any, Any]) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] ~ '' }}{% endfor %}"
    for content in (*pair, *pair):
        text = tokenizer.apply_chat_template(said(content), tokenize=False, add_generation_prompt=True)
        assert prompts._formatted(said(content)) == text


def test_a_template_that_shows_fields_in_order_is_asked_for_each_order(prompts: PromptCache, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.values() | join(' ') }} {% endfor %}"
    (one,) = said("w1")
    for message in (one, dict(reversed(one.items()))):
        assert prompts.encode([message]).ids == plain(tokenizer, [message])
