"""Streams of prompts assembled from pieces of text, and how much of each prompt is known from earlier ones.

| stream | its prompts |
|---|---|
| `mooncake` | whole conversations of Mooncake's trace, scaled down for a small model |
| `chat` | conversations of several turns, a few interleaved: the whole history and a new question |
| `chat_window` | the same with fixed length: each prompt keeps the beginning of the previous one and ends anew |
| `system_prompt` | each user's own question after one system prompt, or after one of a few |
| `mixed` | as `system_prompt`, but some prompts are a question alone, and some repeat the one before |
| `nothing_shared` | no two prompts share a prefix: nothing can be saved |

A block of 512 tokens in Mooncake's trace becomes a piece of 16 tokens, the same for each occurrence of the block;
prompts keep their first blocks. What the sampled requests share, and their order, is as in the trace. They are closer
together than in the trace, so they share more than as many consecutive requests.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from experiments.data.traces import Chain, read_trace
from experiments.support.files import Folders
from experiments.support.section import Section, choose
from llmcache import ConfigError

#: Tokens per piece: the cache's default block size, so that known pieces can be served.
BLOCK = 16

Prompt = list[int]


class StreamSettings(Section):
    name: str  # a key of `STREAMS`
    n: int = Field(default=400, ge=2)  # requests

    def draw(self, pieces: "Pieces", folders: Folders, seed: int) -> list[Prompt]:
        """Return prompts in order of arrival."""
        raise NotImplementedError


class Pieces:
    """Pieces of a text in random order, all different: prompts share only pieces that they are given together."""

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        """Cut a text's tokens into pieces; an incomplete last piece is dropped."""
        self._left = list(
            dict.fromkeys(tuple(ids[begin : begin + BLOCK]) for begin in range(0, len(ids) - BLOCK + 1, BLOCK))
        )
        self._n = len(self._left)
        random.Random(seed).shuffle(self._left)

    def take(self, n_tokens: int) -> Prompt:
        """Return `n_tokens` tokens that were not taken before; the last piece is cut to fit."""
        n_pieces = -(-n_tokens // BLOCK)
        if n_pieces > len(self._left):
            raise ConfigError(
                f"stream: the text is too short for these prompts, {self._n} pieces of {BLOCK} tokens; "
                "ask fewer requests (stream.n), or shorter ones"
            )
        taken = [token for _ in range(n_pieces) for token in self._left.pop()]
        return taken[:n_tokens]


def known_tokens(prompts: Sequence[Prompt]) -> list[int]:
    """Return for each prompt the length of the prefix it shares with an earlier one, in tokens of whole blocks."""
    first: dict[tuple[int, ...], Any] = {}  # a trie of blocks
    counts = []
    for prompt in prompts:
        node, n_known = first, 0
        for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
            block = tuple(prompt[begin : begin + BLOCK])
            n_known += BLOCK * (block in node)  # after the first new block, all blocks are new
            node = node.setdefault(block, {})
        counts.append(n_known)
    return counts


class _Turns(StreamSettings):
    turns: int = Field(default=8, ge=1)  # per conversation
    at_once: int = Field(default=4, ge=1)  # interleaved conversations; the next turn's conversation is drawn at random


class Chat(_Turns):
    name: Literal["chat"]
    question: int = Field(default=32, ge=1)  # tokens of a question
    # Tokens of an answer: text like the questions, so prompts do not depend on a model's output.
    answer: int = Field(default=64, ge=1)

    def draw(self, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
        def conversation() -> Iterator[Prompt]:
            said: Prompt = []
            for _ in range(self.turns):
                said = said + pieces.take(self.question)
                yield said
                said = said + pieces.take(self.answer)

        return _in_turns(conversation, self, seed)


class Window(_Turns):
    name: Literal["chat_window"]
    length: int = Field(default=512, ge=2)  # tokens of a prompt
    shared: float = Field(default=0.9, ge=0.0, lt=1.0)  # share of them in common with the previous turn

    def draw(self, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
        n_shared = round(self.shared * self.length)

        def conversation() -> Iterator[Prompt]:
            head = pieces.take(n_shared)
            for _ in range(self.turns):
                yield head + pieces.take(self.length - n_shared)

        return _in_turns(conversation, self, seed)


def _in_turns(conversation: Callable[[], Iterator[Prompt]], settings: _Turns, seed: int) -> list[Prompt]:
    """Interleave prompts of several conversations; a new one replaces each that ends."""
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
    systems: int = Field(default=1, ge=1)  # number of system prompts; each request draws one
    system: int = Field(default=256, ge=1)  # tokens of a system prompt
    shortest: int = Field(default=16, ge=1)  # fewest tokens of a question
    longest: int = Field(default=64, ge=1)  # most tokens of a question

    def check(self) -> None:
        if self.shortest > self.longest:
            raise ValueError(f"shortest: at most longest, {self.longest} (got {self.shortest})")

    def draw(self, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
        rng = random.Random(seed)
        systems = [pieces.take(self.system) for _ in range(self.systems)]
        lengths = range(self.shortest, self.longest + 1)
        return [rng.choice(systems) + pieces.take(rng.choice(lengths)) for _ in range(self.n)]


class Mixed(SystemPrompt):
    name: Literal["mixed"]
    new: float = Field(default=0.25, ge=0.0, le=1.0)  # share of prompts that are a question alone
    repeated: float = Field(default=0.1, ge=0.0, le=1.0)  # share of prompts that are equal to the one before

    def draw(self, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
        rng, prompts = random.Random(seed + 1), super().draw(pieces, folders, seed)
        for number in range(1, self.n):
            chosen = rng.random()
            if chosen < self.repeated:
                prompts[number] = prompts[number - 1]
            elif chosen < self.repeated + self.new:
                prompts[number] = prompts[number][self.system :]
        return prompts


class Unshared(StreamSettings):
    name: Literal["nothing_shared"]
    length: int = Field(default=512, ge=2)  # tokens of a prompt

    def draw(self, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
        return [pieces.take(self.length) for _ in range(self.n)]


class Mooncake(StreamSettings):
    name: Literal["mooncake"]
    # First blocks of a prompt to keep: 60 make 960 tokens, which fits GPT-2.
    blocks: int = Field(default=60, ge=2)

    def draw(self, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
        chains = [chain[: self.blocks] for chain in sample(read_trace(folders.data), self.n, seed)]
        tokens: defaultdict[int, Prompt] = defaultdict(lambda: pieces.take(BLOCK))
        return [[token for block in chain for token in tokens[block]] for chain in chains]


def sample(trace: Sequence[Chain], n: int, seed: int) -> list[Chain]:
    """Return `n` requests of the trace in order of arrival: whole conversations, except the last one drawn."""
    # Conversations are drawn from the whole trace. Distant requests become close, so the sample shares more than as
    # many consecutive requests.
    if n > len(trace):
        raise ConfigError(f"stream.n: the trace has {len(trace)} requests; ask no more (got {n})")
    by_conversation: defaultdict[int | None, list[int]] = defaultdict(list)
    shared = set(trace[0]).intersection(*trace)  # a conversation begins with its first block that not all have
    for number, chain in enumerate(trace):
        by_conversation[next((block for block in chain if block not in shared), None)].append(number)
    drawn = list(by_conversation.values())
    random.Random(seed).shuffle(drawn)
    numbers = [number for conversation in drawn for number in conversation][:n]
    return [trace[number] for number in sorted(numbers)]


STREAMS: Mapping[str, type[StreamSettings]] = {
    "mooncake": Mooncake,
    "chat": Chat,
    "chat_window": Window,
    "system_prompt": SystemPrompt,
    "mixed": Mixed,
    "nothing_shared": Unshared,
}


def make_stream(values: Any, name: str) -> StreamSettings:
    """Check the settings of a stream; `name` is the key that errors name."""
    if isinstance(values, StreamSettings):
        return values
    stream, rest = choose(STREAMS, values, "name", name)
    settings: StreamSettings = stream.make({"name": values["name"], **rest}, name)
    return settings
