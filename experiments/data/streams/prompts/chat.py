"""Streams `chat` and `chat_window`: conversations of several turns, a few under way at a time.

In `chat` a prompt is all that was said before, and a new question. In `chat_window` prompts have one length: each keeps
the beginning of the one before and ends anew, as where an answer is asked for again and again.
"""

import random
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

from experiments.data.streams.prompts.pieces import Pieces, Prompt, StreamSettings
from experiments.support.folders import Folders


class _Turns(StreamSettings):
    """Settings of both streams."""

    turns: int = Field(default=8, ge=1)  # of a conversation
    at_once: int = Field(default=4, ge=1)  # conversations under way; whose turn is next is drawn


class Settings(_Turns):
    """Settings of `chat`."""

    name: Literal["chat"]
    question: int = Field(default=32, ge=1)  # tokens of a question
    # Tokens of an answer, text like the questions: prompts do not hang on what a model said.
    answer: int = Field(default=64, ge=1)


class WindowSettings(_Turns):
    """Settings of `chat_window`."""

    name: Literal["chat_window"]
    length: int = Field(default=512, ge=2)  # tokens of a prompt
    shared: float = Field(default=0.9, ge=0.0, lt=1.0)  # share of them that the turn before has, too


def draw(settings: Settings, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    """The prompts of `chat`."""

    def conversation() -> Iterator[Prompt]:
        said: Prompt = []
        for _ in range(settings.turns):
            said = said + pieces.take(settings.question)
            yield said
            said = said + pieces.take(settings.answer)

    return _in_turns(conversation, settings, seed)


def draw_window(settings: WindowSettings, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    """The prompts of `chat_window`."""
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
