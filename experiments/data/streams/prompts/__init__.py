"""Streams of prompts, put together from pieces of text: one file each, or two that are alike in one.

text -> pieces                              of 16 tokens
     -> chat, system_prompt, mooncake       prompts that share a beginning, or share none
     -> how much of each was asked before   what a prefix cache could serve at most
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.data.streams.prompts import chat, mooncake, system_prompt
from experiments.data.streams.prompts.pieces import BLOCK, Pieces, Prompt, StreamSettings, known_tokens
from experiments.support.folders import Folders
from experiments.support.section import choose


@dataclass(frozen=True, slots=True)
class Stream:
    """One kind of stream."""

    settings: type[StreamSettings]
    # `(settings, pieces, folders, seed) -> prompts`, in the order in which they are asked
    draw: Callable[[Any, Pieces, Folders, int], list[Prompt]]


STREAMS: Mapping[str, Stream] = {
    "mooncake": Stream(mooncake.Settings, mooncake.draw),
    "chat": Stream(chat.Settings, chat.draw),
    "chat_window": Stream(chat.WindowSettings, chat.draw_window),
    "system_prompt": Stream(system_prompt.Settings, system_prompt.draw),
    "nothing_shared": Stream(system_prompt.UnsharedSettings, system_prompt.draw_unshared),
}


def make_stream(values: Any, name: str) -> StreamSettings:
    """Check the settings of a stream, which names itself under `name`."""
    if isinstance(values, StreamSettings):
        return values
    stream, rest = choose(STREAMS, values, "name", name)
    settings: StreamSettings = stream.settings.make({"name": values["name"], **rest}, name)
    return settings


__all__ = ["BLOCK", "STREAMS", "Pieces", "Prompt", "StreamSettings", "known_tokens", "make_stream"]
