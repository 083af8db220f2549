"""What every task is told."""

from typing import Literal

from pydantic import Field

from experiments.support.section import Section


class TaskSettings(Section):
    """Settings of a task."""

    name: str  # A key of `experiments.tasks.TASKS`
    # `minilm` (all-MiniLM-L6-v2 from its package), a local folder, the name of a prepared model, a name on the Hugging
    # Face hub, or `untrained` (tiny, with random weights).
    model: str = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)  # ask that many requests only, from the beginning of the data

    @property
    def title(self) -> str:
        """What results call the task."""
        return self.name


class OfficialSettings(TaskSettings):
    """Settings of a task on a published data set."""

    # `official`: the set as published, from the data folder or the hub. `made`: small records that the project makes
    # itself (`experiments.data.made`), to try things out.
    data: Literal["official", "made"] = "official"
