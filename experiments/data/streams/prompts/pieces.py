"""What streams of prompts are made of: text in pieces of 16 tokens; and how much of a prompt was asked before."""

import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from experiments.support.section import Section
from llmcache import ConfigError

#: Tokens of a piece, as many as a block of the cache has by default, so that what is known can be served.
BLOCK = 16

Prompt = list[int]


class StreamSettings(Section):
    """Settings of a stream of prompts."""

    name: str  # a key of `experiments.data.streams.prompts.STREAMS`
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
