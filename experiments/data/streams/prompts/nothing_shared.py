"""Stream `nothing_shared`: prompts of which no two begin alike, so that nothing can be saved."""

from typing import Literal

from pydantic import Field

from experiments.data.streams.prompts.pieces import Pieces, Prompt
from experiments.data.streams.prompts.settings import StreamSettings
from experiments.support.folders import Folders


class Settings(StreamSettings):
    """Settings of the stream."""

    name: Literal["nothing_shared"]
    length: int = Field(default=512, ge=2)  # tokens of a prompt


def draw(settings: Settings, pieces: Pieces, folders: Folders, seed: int) -> list[Prompt]:
    return [pieces.take(settings.length) for _ in range(settings.n)]
