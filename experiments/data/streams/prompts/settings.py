"""What every stream of prompts is told."""

from pydantic import Field

from experiments.support.section import Section


class StreamSettings(Section):
    """Settings of a stream of prompts."""

    name: str  # A key of `experiments.data.streams.prompts.STREAMS`
    n: int = Field(default=400, ge=2)  # requests
