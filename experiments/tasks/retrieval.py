"""Task `retrieval`: labelled requests; the answer is an embedding, which searches a corpus for requests of its label.

first file  -> a seeded half is the corpus, the other half is streamed
other files -> streamed whole
"""

from typing import Literal

from experiments.models.heads import pooled_states
from experiments.models.loading import check_length, load
from experiments.support.folders import Folders
from experiments.tasks import held_out
from experiments.tasks.embedding import Retrieval


class Settings(held_out.Settings):
    """Settings of the task: those of `held_out`. The part that would fit a head is what is searched."""

    name: Literal["retrieval"]  # type: ignore[assignment]


def build(settings: Settings, folders: Folders, seed: int) -> Retrieval:
    """Load data and model, and embed the corpus."""
    corpus, requests = held_out.divide(settings, folders, seed)
    loaded = load(settings.model, "states", folders.models)
    check_length(loaded, settings.max_length)
    return Retrieval(
        loaded,
        [record.text for record in requests],
        [record.label for record in requests],
        pooled_states(loaded, "mean", [record.text for record in corpus], settings.max_length),
        [record.label for record in corpus],
        settings.max_length,
    )
