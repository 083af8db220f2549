"""Folders a server loads: a classifier and a calibrated cache.

head fitted on pooled states (`held_out`)
    -> trunk, pooling and `Dense`, as sentence-transformers saves them; logits equal those of the fitted head
    -> calibration on its answers to the first `learn` requests, wrapped as `llmcache serve` does -> a saved cache
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field

from experiments.data.labelled import Labelled
from experiments.measures.learning import LearningExperiment
from experiments.measures.over_http.servers import SERVERS, Running, running
from experiments.models.heads import as_sentence_model, fit_logistic
from experiments.models.loading import encode, load
from experiments.support.files import Folders, written_by_others
from experiments.support.progress import tracked
from experiments.tasks.stream import divide
from llmcache import CacheConfig, ConfigError
from llmcache.lab import quiet

if TYPE_CHECKING:
    from llmcache.lab import Served

DONE = "made.json"  # written last


class ServingExperiment(LearningExperiment):
    """Settings of a measure of servers on labelled requests; the task is `held_out`."""

    max_drops: tuple[float, ...] = Field(default=(0.01,), min_length=1, max_length=1)  # exactly one loss
    servers: dict[str, str] = Field(default_factory=lambda: dict(SERVERS), min_length=1)  # commands by name
    start_s: float = Field(default=180.0, gt=0)  # longest time until a server is ready

    def learned_texts(self, requests: Sequence[Labelled]) -> list[str]:
        """Return the texts to calibrate on, made from the requests to learn from."""
        return [request.text for request in requests]

    def check(self) -> None:
        super().check()
        if self.task.name != "held_out":
            raise ConfigError(
                f"task.name: a server's classifier is fitted here; take held_out (got {self.task.name!r})"
            )


@dataclass(frozen=True, slots=True)
class Made:
    """Folders for a server, and requests to send."""

    model: Path
    save: Path
    known: Sequence[Labelled]  # requests the head was fitted on; for warming up
    stream: Sequence[Labelled]  # requests after those learned from

    def classifier(self) -> "Served":
        from llmcache.lab import load_served

        with quiet():
            return load_served(str(self.model))


@contextmanager
def made(experiment: ServingExperiment, folders: Folders) -> Iterator[Made]:
    """Yield the folders, making them if needed. With a models folder they are kept there and reused."""
    known, requests = divide(experiment.task, folders, experiment.seed)
    if len(requests) <= experiment.learn:
        raise ConfigError(f"learn={experiment.learn}: the stream has {len(requests)} requests; raise task.limit")
    with _place(experiment, folders) as place:
        found = Made(place / "model", place / "save", known, requests[experiment.learn :])
        if not (place / DONE).is_file():
            _make(experiment, folders, found, requests[: experiment.learn])
            (place / DONE).write_text(json.dumps(_depends_on(experiment), indent=2) + "\n", encoding="utf-8")
        yield found


@contextmanager
def serving(experiment: ServingExperiment, server: str, made: Made, **more: str) -> Iterator[Running]:
    """Run a server of the experiment on a copy of the calibrated cache; `more` fills placeholders of its command."""
    with TemporaryDirectory() as place:
        save = shutil.copytree(made.save, Path(place, "save"))
        values = {"model": str(made.model), "save": str(save), **more}
        with running(experiment.servers[server], values, start_s=experiment.start_s) as found:
            yield found


def write_classifier(experiment: ServingExperiment, folders: Folders, made: Made) -> None:
    task = experiment.task
    fitted = fit_logistic(
        load(task.model, "states", folders.models), task.head.pool, made.known, made.stream, task.max_length
    )
    whole = load(task.model, "states", folders.models)
    with quiet(), written_by_others(made.model):
        as_sentence_model(whole, fitted, task.head.pool, task.max_length).save(str(made.model))


def labels_of(served: "Served", texts: Sequence[str]) -> list[tuple[str, float]]:
    """Return the classifier's label and its probability for each text, computed alone."""
    answers = []
    with torch.inference_mode():
        for text in tracked(texts, "The model alone"):
            scores = served.forward(encode(served.tokenizer, text, served.max_length))[0].softmax(-1)
            answers.append((served.labels[int(scores.argmax())], float(scores.max())))
    return answers


def _make(experiment: ServingExperiment, folders: Folders, made: Made, learned: Sequence[Labelled]) -> None:
    from llmcache.lab import Saves

    write_classifier(experiment, folders, made)
    served = made.classifier()
    config = CacheConfig.make({"answer": "class", **experiment.cache, "max_drop": experiment.max_drops[0]})
    cache = Saves(None).attach_cache(served, config)
    inputs = [encode(served.tokenizer, text, served.max_length) for text in experiment.learned_texts(learned)]
    found = cache.calibrate(tracked(inputs, "Calibrating"), seed=experiment.seed)
    if found.chosen is None:
        raise ConfigError(f"max_drops={experiment.max_drops[0]:g}: no limit keeps to it on these requests")
    cache.save(made.save)
    cache.unwrap()


def _depends_on(experiment: ServingExperiment) -> dict[str, Any]:
    settings = experiment.to_dict()
    found = {name: settings[name] for name in ("task", "learn", "max_drops", "cache", "seed")}
    has_own = type(experiment).learned_texts is not ServingExperiment.learned_texts
    return found | ({"learned_as": experiment.measure} if has_own else {})


@contextmanager
def _place(experiment: ServingExperiment, folders: Folders) -> Iterator[Path]:
    if folders.models is None:
        with TemporaryDirectory() as place:
            yield Path(place)
    else:
        digest = hashlib.sha256(json.dumps(_depends_on(experiment), sort_keys=True).encode()).hexdigest()
        place = folders.models / f"served-{experiment.task.title}-{digest[:8]}"
        place.mkdir(parents=True, exist_ok=True)
        yield place
