"""Streams of prompts, put together from pieces of text; and how much of each prompt was asked before.

| stream | its prompts |
|---|---|
| `mooncake` | whole conversations of Mooncake's trace, small enough for a small model |
| `chat` | conversations of several turns, a few under way at a time: all that was said before, and a new question |
| `chat_window` | likewise, of one length: each keeps the beginning of the one before and ends anew |
| `system_prompt` | a question of each user's own after one system prompt, or one of a few |
| `nothing_shared` | no two begin alike: nothing can be saved |

Of Mooncake's trace a block of 512 tokens becomes one piece of 16, the same wherever the block comes, and prompts keep
their beginning. What the drawn requests share, and in which order they come, is as in the trace; they lie closer
together, so they share more than the same number of requests in a row.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from experiments.data.traces import Chain, read_trace
from experiments.support.files import Folders
from experiments.support.section import Section, choose
from llmcache import ConfigError

#: Tokens of a piece, as many as a block of the cache has by default, so that what is known can be served.
BLOCK = 16

Prompt = list[int]


class StreamSettings(Section):
    name: str  # a key of `STREAMS`
    n: int = Field(default=400, ge=2)  # requests


class Pieces:
    """Pieces of a text in a drawn order, no two alike: prompts share what they were given together, nothing else."""

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        """Cut the tokens of a text; what fills no piece is left out."""
        self._left = list(
            dict.fromkeys(tuple(ids[begin : begin + BLOCK]) for begin in range(0, len(ids) - BLOCK + 1, BLOCK))
        )
        self._n = len(self._left)
        random.Random(seed).shuffle(self._left)

    def take(self, n_tokens: int) -> Prompt:
        """So many tokens that nobody else has; the last piece is cut to fit."""
        n_pieces = -(-n_tokens // BLOCK)
        if n_pieces > len(self._left):
            raise ConfigError(
                f"stream: the text is too short for these prompts, {self._n} pieces of {BLOCK} tokens; "
                "ask fewer requests (stream.n), or shorter ones"
            )
        taken = [token for _ in range(n_pieces) for token in self._left.pop()]
        return taken[:n_tokens]


def known_tokens(prompts: Sequence[Prompt]) -> list[int]:
    """How many of the first tokens of each prompt are those of an earlier one, in whole blocks of `BLOCK`."""
    first: dict[tuple[int, ...], Any] = {}  # a trie of blocks
    counts = []
    for prompt in prompts:
        node, n_known = first, 0
        for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
            block = tuple(prompt[begin : begin + BLOCK])
            n_known += BLOCK * (block in node)  # after one that is new, all are
            node = node.setdefault(block, {})
        counts.append(n_known)
    return counts


class _Turns(StreamSettings):
    """Settings of both streams."""

    turns: int = Field(default=8, ge=1)  # of a conversation
    at_once: int = Field(default=4, ge=1)  # conversations under way; whose turn is next is drawn


class Chat(_Turns):
    name: Literal["chat"]
    question: int = Field(default=32, ge=1)  # tokens of a question
    # Tokens of an answer, text like the questions: prompts do not hang on what a model said.
    answer: int = Field(default=64, ge=1)


class Window(_Turns):
    name: Literal["chat_window"]
    length: int = Field(default=512, ge=2)  # tokens of a prompt
    shared: float = Field(default=0.9, ge=0.0, lt=1.0)  # share of them that the turn before has, too


def draw_chat(settings: Chat, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    def conversation() -> Iterator[Prompt]:
        said: Prompt = []
        for _ in range(settings.turns):
            said = said + pieces.take(settings.question)
            yield said
            said = said + pieces.take(settings.answer)

    return _in_turns(conversation, settings, seed)


def draw_window(settings: Window, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    n_shared = round(settings.shared * settings.length)

    def conversation() -> Iterator[Prompt]:
        head = pieces.take(n_shared)
        for _ in range(settings.turns):
            yield head + pieces.take(settings.length - n_shared)

    return _in_turns(conversation, settings, seed)


def _in_turns(conversation: Callable[[], Iterator[Prompt]], settings: _Turns, seed: int) -> list[Prompt]:
    """Prompts of conversations; one that ends makes room for a new one."""
    rng = random.Random(seed)
    open_ones = [conversation() for _ in range(settings.at_once)]
    prompts: list[Prompt] = []
    while len(prompts) < settings.n:
        place = rng.randrange(settings.at_once)
        prompt = next(open_ones[place], None)
        if prompt is None:
            open_ones[place] = conversation()
        else:
            prompts.append(prompt)
    return prompts


class SystemPrompt(StreamSettings):
    name: Literal["system_prompt"]
    systems: int = Field(default=1, ge=1)  # system prompts; which one a request has is drawn
    system: int = Field(default=256, ge=1)  # tokens of a system prompt
    shortest: int = Field(default=16, ge=1)  # tokens of a question, at least
    longest: int = Field(default=64, ge=1)  # tokens of a question, at most

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest: at most longest, {self.longest} (got {self.shortest})")
        return self


class Unshared(StreamSettings):
    name: Literal["nothing_shared"]
    length: int = Field(default=512, ge=2)  # tokens of a prompt


def draw_system_prompt(settings: SystemPrompt, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    systems = [pieces.take(settings.system) for _ in range(settings.systems)]
    lengths = range(settings.shortest, settings.longest + 1)
    return [rng.choice(systems) + pieces.take(rng.choice(lengths)) for _ in range(settings.n)]


def draw_unshared(settings: Unshared, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    return [pieces.take(settings.length) for _ in range(settings.n)]


class Mooncake(StreamSettings):
    name: Literal["mooncake"]
    # Blocks that are kept of a prompt, the first ones: 60 are 960 tokens, which GPT-2 can read.
    blocks: int = Field(default=60, ge=2)


def draw_mooncake(settings: Mooncake, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    chains = [chain[: settings.blocks] for chain in sample(read_trace(folders.data), settings.n, seed)]
    tokens: defaultdict[int, Prompt] = defaultdict(lambda: pieces.take(BLOCK))
    return [[token for block in chain for token in tokens[block]] for chain in chains]


def sample(trace: Sequence[Chain], n: int, seed: int) -> list[Chain]:
    """So many requests of the trace, as whole conversations but for the last drawn, in the order of arrival."""
    # Drawn from the whole trace: requests that lie far apart come close together, so such a draw shares more than as
    # many requests in a row.
    if n > len(trace):
        raise ConfigError(f"stream.n: the trace has {len(trace)} requests; ask no more (got {n})")
    by_conversation: defaultdict[int | None, list[int]] = defaultdict(list)
    for number, conversation in enumerate(conversations(trace, trace)):
        by_conversation[conversation].append(number)
    drawn = list(by_conversation.values())
    random.Random(seed).shuffle(drawn)
    numbers = [number for conversation in drawn for number in conversation][:n]
    return [trace[number] for number in sorted(numbers)]


def conversations(trace: Sequence[Chain], chains: Iterable[Chain]) -> list[int | None]:
    """The conversation of each request: its first block that not all requests of the trace have; None without one."""
    shared = set(trace[0]).intersection(*trace)
    return [next((block for block in chain if block not in shared), None) for chain in chains]


@dataclass(frozen=True, slots=True)
class Stream:
    settings: type[StreamSettings]
    # `(settings, pieces, folders, seed) -> prompts`, in the order in which they are asked
    draw: Callable[[Any, Pieces, Folders, int], list[Prompt]]


STREAMS: Mapping[str, Stream] = {
    "mooncake": Stream(Mooncake, draw_mooncake),
    "chat": Stream(Chat, draw_chat),
    "chat_window": Stream(Window, draw_window),
    "system_prompt": Stream(SystemPrompt, draw_system_prompt),
    "nothing_shared": Stream(Unshared, draw_unshared),
}


def make_stream(values: Any, name: str) -> StreamSettings:
    """Check the settings of a stream, which names itself under `name`."""
    if isinstance(values, StreamSettings):
        return values
    stream, rest = choose(STREAMS, values, "name", name)
    settings: StreamSettings = stream.settings.make({"name": values["name"], **rest}, name)
    return settings
