"""Tasks `stream` and `held_out`: labelled requests, one by one; the answer is a label.

    stream     a seeded part of all data fits the head, the rest is streamed
    held_out   a seeded half of the first file, published for training, fits the head; the other half and the other
               files are streamed whole

Sizes: N requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from experiments.data.labelled import SETS, Data, Labelled, read_requests, split
from experiments.data.streams.traffic import Arrival, Traffic, arrange, draw
from experiments.models.heads import Classifier, Head, fit_logistic, ready
from experiments.models.loading import check_length, encode, load, prepared_figures
from experiments.support.files import Folders
from experiments.tasks.workload import Request, TaskSettings, Workload
from llmcache import ConfigError


class Settings(TaskSettings):
    name: Literal["stream"]
    data: Data  # labelled requests
    head: Head = Head()  # head that answers
    # Draw a stream with repeats from the requests; None: each request occurs once.
    traffic: Traffic | None = None
    max_length: int = Field(default=128, ge=3)  # most tokens per request, special tokens included; longer ones are cut

    @property
    def title(self) -> str:
        """Name of the data: the file or folder; for several files, or for `train`, their folder."""
        first = Path(self.data.path[0])
        is_part = len(self.data.path) > 1 or first.stem == "train"
        return first.parent.name or self.name if is_part else first.stem

    def build(self, folders: Folders, seed: int) -> "Stream":
        check_unseen(self, prepared_figures(self.model, folders.models) or {}, seed)
        data = read_requests(self.data, folders.data, seed)
        fit, requests = split(data, self.head.fit_share, seed) if self.head.fit_share else ([], data)
        requests = (draw(requests, self.traffic) if self.traffic else requests)[: self.limit]
        return _with_head(self, folders, fit, requests)


def _with_head(settings: Settings, folders: Folders, fit: Sequence[Labelled], requests: Sequence[Labelled]) -> "Stream":
    is_ready = settings.head.kind == "ready"
    loaded = load(settings.model, "class" if is_ready else "states", folders.models)
    check_length(loaded, settings.max_length)
    if is_ready:
        return Stream(ready(loaded, requests), requests, settings.max_length, payload=None)
    classifier = fit_logistic(loaded, settings.head.pool, fit, requests, settings.max_length)
    return Stream(classifier, requests, settings.max_length, payload=settings.head.pool)


def check_unseen(settings: Settings, figures: Mapping[str, Any], seed: int) -> None:
    """Raise if a prepared model, whose folder has these figures, was trained on the stream's requests."""
    # Its training half depends on seed, limit and share; only with the same values is the rest unseen.
    known = str(figures.get("recipe")).partition("-")[2]  # a recipe's name is its model and its data
    files = SETS[known][0] if known in SETS else ()
    given = {known if path == known else _end(path) for path in settings.data.path}
    if "fit_share" not in figures or not {known, *map(_end, files)} & given:
        return
    trained = (known, figures["options"]["limit"], figures["fit_share"], figures["seed"])
    asked = (", ".join(settings.data.path), settings.data.limit, settings.head.fit_share, seed)
    names = ("data.path", "data.limit", "head.fit_share", "seed")
    wrong = [
        f"{name}={right} (got {got})" for name, right, got in zip(names, trained, asked, strict=True) if right != got
    ]
    if wrong:
        seen = f"model: {settings.model!r} was trained on a part of {known}"
        raise ConfigError(f"{seen}; the rest, which it did not see, is asked with {', '.join(wrong)}")


def _end(path: str) -> str:
    """Return folder and name of a file, independent of where the data lie."""
    return "/".join(Path(path).parts[-2:])


class Stream(Workload):
    def __init__(
        self, classifier: Classifier, requests: Sequence[Labelled], max_length: int, payload: str | None
    ) -> None:
        """Tokenise the requests; `payload` is what the head reads, if it cannot be detected."""
        self.module = classifier.module
        self.tokenizer = classifier.tokenizer
        self.payload = payload
        self._labels = (*classifier.labels, *classifier.unanswerable)
        self.requests = [
            Request(
                str(request.id),
                encode(classifier.tokenizer, request.text, max_length),
                request.text,
                self._labels.index(request.label),
            )
            for request in requests
        ]
        self.facts = {
            "n_fit": classifier.n_fit,
            "n_labels": len(classifier.labels),
            "n_unanswerable": sum(request.label in classifier.unanswerable for request in requests),
            "n_distinct": len({request.text for request in requests}),
        }

    def answer(self, output: Any, number: int) -> int:
        logits: Tensor = getattr(output, "logits", output)
        return int(logits.argmax(dim=-1))

    def show(self, answer: int) -> str:
        return self._labels[answer]


class HeldOut(Settings):
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

    def build(self, folders: Folders, seed: int) -> Stream:
        return _with_head(self, folders, *divide(self, folders, seed))


def divide(settings: HeldOut, folders: Folders, seed: int) -> tuple[list[Labelled], list[Labelled]]:
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
