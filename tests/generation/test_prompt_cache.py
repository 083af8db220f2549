"""The prompt cache: the same tokens as without it, and nothing is formatted or tokenised twice."""

import datetime
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
import transformers as tf

from llmcache.errors import RequestError
from llmcache.generation.prompt_cache import PromptCache, tokenizer_digest

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = "system user assistant hello there how are you w1 w2 w3 w4 w5 w6"
CHAT = [{"role": "system", "content": "hello there"}, {"role": "user", "content": "how are you"}]


def word_tokenizer(words: str, has_specials: bool = True) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of these words, which begins texts with a token of its own if it has one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[UNK]", "[BOS]", *words.split()]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if has_specials:
        backend.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", bos_token="[BOS]")


class Counted:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked["tokens"] += 1
        return self.tokenizer(*args, **kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        self.asked["text"] += 1
        return self.tokenizer.apply_chat_template(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)


@pytest.fixture
def tokenizer() -> Counted:
    made = word_tokenizer(WORDS)
    made.chat_template = TEMPLATE
    return Counted(made)


def plain(tokenizer: Counted, messages: Any = CHAT) -> tuple[int, ...]:
    ids = tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return tuple(ids)


def test_a_chat_comes_to_the_tokens_that_its_template_gives(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer)
    first, again = prompts.encode(CHAT), prompts.encode([dict(message) for message in CHAT])
    assert first.ids == again.ids == plain(tokenizer)
    assert (first.is_hit, again.is_hit) == (False, True)
    assert tokenizer.asked == {"text": 1, "tokens": 1}


def test_a_text_gets_special_tokens_and_a_chat_has_its_own(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer)
    text = tokenizer.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    as_text = prompts.encode(text)
    assert list(as_text.ids) == tokenizer.tokenizer(text)["input_ids"]
    assert not prompts.encode(CHAT).is_hit  # the same text, but not the same tokens
    assert prompts.encode(text).is_hit


def test_other_messages_roles_and_orders_are_other_prompts(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer)
    chats = [CHAT, CHAT[::-1], CHAT[:1], [{**CHAT[0], "role": "user"}, CHAT[1]]]
    assert [prompts.encode(chat).is_hit for chat in chats] == [False] * 4
    assert [prompts.encode(chat).ids for chat in chats] == [plain(tokenizer, chat) for chat in chats]
    assert len(prompts) == 4


def test_another_template_or_more_tokens_make_another_prompt(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer)
    prompts.encode(CHAT)
    tokenizer.tokenizer.chat_template = TEMPLATE.replace("assistant{%", "{%")
    assert prompts.encode(CHAT).ids == plain(tokenizer)
    text = "hello w1 there"
    before = prompts.encode(text)
    tokenizer.tokenizer.add_tokens(["w1 there"])
    after = prompts.encode(text)
    assert not after.is_hit and len(after.ids) < len(before.ids)


def test_a_template_that_tells_the_time_is_asked_each_time(tokenizer: Counted) -> None:
    tokenizer.tokenizer.chat_template = "{{ strftime_now('%Y') and '' }}" + TEMPLATE
    prompts = PromptCache(tokenizer)
    assert [prompts.encode(CHAT).is_hit for _ in range(3)] == [False, True, True]
    assert tokenizer.asked == {"text": 3, "tokens": 1}


def test_a_long_prompt_loses_its_beginning_or_is_refused(tokenizer: Counted) -> None:
    cut = PromptCache(tokenizer, max_length=4, truncate="left").encode(CHAT)
    assert cut.ids == plain(tokenizer)[-4:]
    assert cut.n_dropped == len(plain(tokenizer)) - 4
    with pytest.raises(RequestError, match=r"8 tokens, of which the model can take 4 here.*truncate='left'"):
        PromptCache(tokenizer, max_length=4).encode(CHAT)
    assert PromptCache(tokenizer, max_length=8).encode(CHAT).n_dropped == 0


def test_what_every_text_begins_with_is_not_cut_off(tokenizer: Counted) -> None:
    whole = PromptCache(tokenizer).encode("w1 w2 w3").ids
    cut = PromptCache(tokenizer, max_length=len(whole) - 1, truncate="left").encode("w1 w2 w3")
    assert (cut.ids, cut.n_dropped) == ((whole[0], *whole[2:]), 1)
    least = PromptCache(tokenizer, max_length=1, truncate="left").encode("w1 w2 w3")
    assert least.ids == whole[-1:]


def test_a_token_that_becomes_special_later_counts(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer)
    prompts.encode("w1")
    tokenizer.tokenizer.bos_token = "w2"
    assert not prompts.encode("w1").is_hit


def test_the_prompt_used_longest_ago_leaves(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer, max_entries=2)
    for text in ("w1", "w2", "w1", "w3"):
        prompts.encode(text)
    assert [prompts.encode(text).is_hit for text in ("w1", "w3", "w2")] == [True, True, False]
    assert len(prompts) == 2
    prompts.clear()
    assert len(prompts) == 0


def test_what_cannot_be_a_prompt_is_refused(tokenizer: Counted) -> None:
    tokenizer.tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template: give the prompt as one text"):
        PromptCache(tokenizer).encode(CHAT)
    bare = word_tokenizer(WORDS, has_specials=False)
    with pytest.raises(RequestError, match="empty"):
        PromptCache(bare).encode("")
    with pytest.raises(RequestError, match="no valid text: character 1"):
        PromptCache(bare).encode("a\udcff")


@pytest.mark.parametrize("wrong", [[], 5, ["w1"], None])
def test_what_is_neither_text_nor_messages_is_refused(tokenizer: Counted, wrong: Any) -> None:
    with pytest.raises(RequestError, match="give a text, or messages"):
        PromptCache(tokenizer).encode(wrong)


@pytest.mark.parametrize(
    ("template", "told"), [("{{ raise_exception('no system here') }}", "no system here"), ("{% if %}", "Expected")]
)
def test_a_template_that_refuses_is_told(tokenizer: Counted, template: str, told: str) -> None:
    tokenizer.tokenizer.chat_template = template
    with pytest.raises(RequestError, match=f"chat template does not take these messages: .*{told}"):
        PromptCache(tokenizer).encode(CHAT)


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"max_length": "5"}, {"max_entries": 0}, {"truncate": "right"}])
def test_settings_out_of_range_are_refused(tokenizer: Counted, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        PromptCache(tokenizer, **wrong)


def test_tokenizers_that_differ_have_other_digests() -> None:
    one, other = word_tokenizer(WORDS), word_tokenizer(WORDS + " more")
    assert tokenizer_digest(one) == tokenizer_digest(word_tokenizer(WORDS)) != tokenizer_digest(other)
    one.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer_digest(one) != tokenizer_digest(word_tokenizer(WORDS))


def test_many_threads_get_the_same_tokens(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer, max_entries=3)
    texts = [f"hello w{1 + i % 6}" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: prompts.encode(text).ids, texts))
    assert found == [tuple(tokenizer.tokenizer(text)["input_ids"]) for text in texts]
    assert len(prompts) == 3


@pytest.mark.parametrize("told", [datetime.date(2026, 1, 2), b"x", {1: "a", "b": 2}])
def test_messages_that_have_no_json_are_formatted_each_time(tokenizer: Counted, told: Any) -> None:
    prompts = PromptCache(tokenizer)
    messages = [{"role": "user", "content": "w1", "told": told}]
    assert [prompts.encode(messages).is_hit for _ in range(2)] == [False, True]
    assert tokenizer.asked == {"text": 2, "tokens": 1}


class Masked(str):
    """Text that says of itself whatever it likes."""

    def __repr__(self) -> str:
        return "'w1'"

    __str__ = __repr__

    def encode(self, *_: Any) -> bytes:
        return b"w1"

    def __eq__(self, _: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("w1")


def test_a_text_is_known_by_its_characters_whatever_its_class_says(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer)
    for text in ("w1", Masked("w1"), Masked("w2 w3"), "w2 w3"):
        assert list(prompts.encode(text).ids) == tokenizer.tokenizer(str.__str__(text))["input_ids"]
    assert len(prompts) == 2


@pytest.mark.parametrize(
    "pair", [("w1", Masked("w2")), (["w1"], ("w1",)), ({"1": "w1"}, {1: "w1"}), ("w1", b"w1"), (1, True), (1, 1.0)]
)
@pytest.mark.parametrize("turn", [1, -1])
def test_contents_that_a_template_tells_apart_are_other_prompts(
    tokenizer: Counted, pair: tuple[Any, Any], turn: int
) -> None:
    tokenizer.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] ~ '' }}{% endfor %}"
    prompts = PromptCache(tokenizer)
    for content in pair[::turn]:
        messages = [{"role": "user", "content": content}]
        text = tokenizer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompts._formatted(messages) == text


def test_a_template_that_shows_fields_in_order_is_asked_for_each_order(tokenizer: Counted) -> None:
    tokenizer.tokenizer.chat_template = "{% for m in messages %}{{ m.values() | join(' ') }} {% endfor %}"
    prompts = PromptCache(tokenizer)
    one = {"role": "user", "content": "w1"}
    for message in (one, dict(reversed(one.items()))):
        assert prompts.encode([message]).ids == plain(tokenizer, [message])


def test_messages_that_hold_themselves_are_the_templates_trouble(tokenizer: Counted) -> None:
    endless: list[Any] = []
    endless.append(endless)
    prompts = PromptCache(tokenizer)
    messages = [{"role": "user", "content": "w1", "more": endless}]
    with pytest.raises(RequestError, match="chat template does not take these messages"):  # transformers walks them
        prompts.encode(messages)


def test_messages_of_any_mapping(tokenizer: Counted) -> None:
    prompts = PromptCache(tokenizer)
    assert prompts.encode([MappingProxyType(one) for one in CHAT]).ids == prompts.encode(CHAT).ids
    assert tokenizer.asked == {"text": 1, "tokens": 1}
