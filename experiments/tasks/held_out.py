"""Task `held_out`: labelled requests, part of them published for training; the answer is a label.

    first file  -> a seeded half fits the head, the other half is streamed
    other files -> streamed whole

With a single file, the stream is its other half.
"""

from dataclasses import replace
from typing import Literal

from experiments.data.labelled import Labelled, read_requests, split
from experiments.data.streams.traffic import Arrival, arrange
from experiments.models.heads import fit_logistic
from experiments.models.loading import check_length, load
from experiments.support.files import Folders
from experiments.tasks import stream
from llmcache import ConfigError


class Settings(stream.Settings):
    """Settings of the task: those of `stream`, with a head that is fitted here.

    `head.fit_share` is a share of the first file. `data.order` sets the order within the first file and the others.
    """

    name: Literal["held_out"]  # type: ignore[assignment]
    # Order and repeats of requests; None: the order of `data.order`.
    arrival: Arrival | None = None
    # Repeat each text until it has `max_length` tokens: rows as long as documents, on data of short requests.
    is_filled: bool = False

    @property
    def title(self) -> str:
        """Name of the data, and of the arrival of requests."""
        return super().title if self.arrival is None else f"{super().title}-{self.arrival.name}"

    def check(self) -> None:
        super().check()
        if self.head.kind != "logistic" or self.traffic is not None:
            raise ConfigError(
                "name: held_out fits its own head, and asks each request once: leave out head.kind and traffic, or "
                "take the task stream"
            )


def divide(settings: Settings, folders: Folders, seed: int) -> tuple[list[Labelled], list[Labelled]]:
    """Return the requests known beforehand, a seeded half of the first file, and the streamed ones."""
    data = read_requests(settings.data, folders.data, seed)
    known, _ = split([record for record in data if record.part == 0], settings.head.fit_share, seed)
    seen = {record.id for record in known}
    rest = [record for record in data if record.id not in seen]
    if settings.arrival is not None:
        rest = arrange(rest, lambda record: record.label, settings.arrival, seed)
    rest = rest[: settings.limit]
    if settings.is_filled:  # a word has at least one token, and longer texts are cut
        known, rest = ([_filled(one, settings.max_length) for one in part] for part in (known, rest))
    return known, rest


def _filled(record: Labelled, n_tokens: int) -> Labelled:
    n_words = max(1, len(record.text.split()))
    return replace(record, text=" ".join([record.text] * (n_tokens // n_words + 1)))


def build(settings: Settings, folders: Folders, seed: int) -> stream.Stream:
    fit, requests = divide(settings, folders, seed)
    loaded = load(settings.model, "states", folders.models)
    check_length(loaded, settings.max_length)
    classifier = fit_logistic(loaded, settings.head.pool, fit, requests, settings.max_length)
    return stream.Stream(classifier, requests, settings.max_length, payload=settings.head.pool)
