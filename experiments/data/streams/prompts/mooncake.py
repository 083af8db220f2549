"""Stream `mooncake`: whole conversations of Mooncake's trace, small enough for a small model.

A block of 512 tokens becomes one piece of 16, the same wherever the block comes, and prompts keep their beginning. What
the drawn requests share with each other, and in which order they come, is as in the trace; a draw shares more than the
same number of requests in a row.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from experiments.data.mooncake import Chain, read_trace
from experiments.data.streams.prompts.pieces import BLOCK, Pieces, Prompt, StreamSettings
from experiments.support.folders import Folders
from llmcache import ConfigError


class Settings(StreamSettings):
    """Settings of the stream."""

    name: Literal["mooncake"]
    # Blocks that are kept of a prompt, the first ones: 60 are 960 tokens, which GPT-2 can read.
    blocks: int = Field(default=60, ge=2)


def draw(settings: Settings, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    chains = [chain[: settings.blocks] for chain in sample(read_trace(folders.data), settings.n, seed)]
    tokens: defaultdict[int, Prompt] = defaultdict(lambda: pieces.take(BLOCK))
    return [[token for block in chain for token in tokens[block]] for chain in chains]


def sample(trace: Sequence[Chain], n: int, seed: int) -> list[Chain]:
    """So many requests of the trace, as whole conversations but for the last drawn, in the order of arrival."""
    # Drawn from the whole trace: requests that lie far apart come close together, so such a draw shares more than as
    # many requests in a row. The measure `sharing` says how much.
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
