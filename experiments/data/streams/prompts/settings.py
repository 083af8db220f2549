"""What every stream of prompts is told."""

from pydantic import Field

from experiments.support.section import Section


class StreamSettings(Section):
    """Settings of a stream of prompts.

    Attributes:
        name: A key of `experiments.data.streams.prompts.STREAMS`.
        n: Requests.
    """

    name: str
    n: int = Field(default=400, ge=2)
