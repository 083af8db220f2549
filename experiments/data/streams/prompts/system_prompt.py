"""Streams `system_prompt` and `nothing_shared`: prompts that begin alike, and prompts of which no two do.

In `system_prompt` many users have a question of their own after one system prompt, or one of a few; in `nothing_shared`
nothing can be saved.
"""

import random
from typing import Literal, Self

from pydantic import Field, model_validator

from experiments.data.streams.prompts.pieces import Pieces, Prompt, StreamSettings
from experiments.support.folders import Folders


class Settings(StreamSettings):
    """Settings of `system_prompt`."""

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


class UnsharedSettings(StreamSettings):
    """Settings of `nothing_shared`."""

    name: Literal["nothing_shared"]
    length: int = Field(default=512, ge=2)  # tokens of a prompt


def draw(settings: Settings, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    systems = [pieces.take(settings.system) for _ in range(settings.systems)]
    lengths = range(settings.shortest, settings.longest + 1)
    return [rng.choice(systems) + pieces.take(rng.choice(lengths)) for _ in range(settings.n)]


def draw_unshared(settings: UnsharedSettings, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    return [pieces.take(settings.length) for _ in range(settings.n)]
