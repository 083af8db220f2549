"""What one experiment is: a YAML file, checked, with lists spread out to one run each.

    experiments = load_experiments("configs/banking77.yaml", ["cache.tau=[0.8, 0.9]"])

A list is a grid: one run for each of its values. Keys in `LISTS` hold a list by nature; there, a list of lists is one.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from llmcache.config import CacheConfig, explain, read_yaml
from llmcache.errors import ConfigError

LISTS = ("data.path", "cache.layers")

_Section = TypeVar("_Section", bound="Section")


class Section(BaseModel):
    """A part of the settings. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check the values of one section.

        Args:
            values: A mapping, as YAML gave it.
            name: Dotted name of the section, for the error text.

        Raises:
            ConfigError: Naming the key, its value and what would be accepted.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name}: expected a mapping of settings (got {values!r})")
        prefix = f"{name}." if name else ""
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in values:
                raise ConfigError(f"{prefix}{key}: missing; known settings: {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(prefix + explain(error, list(cls.model_fields))) from error


class Data(Section):
    """Labelled requests.

    Attributes:
        path: A known set (`banking77`, `snips`, `hwu64`) whose files lie in the data folder; or a CSV (with a header)
            or JSONL file, or several, joined in this order, relative to the data folder; or the name of a stream that
            the project makes itself: `support_desk`.
        text: Column of the request's text; known sets bring their own.
        label: Column of what it is about; likewise.
        order: `file`, or `shuffled`, seeded: some files are sorted by label, which no traffic is.
    """

    path: tuple[str, ...] = Field(min_length=1)
    text: str = "text"
    label: str = "label"
    order: Literal["file", "shuffled"] = "file"

    @field_validator("path", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class Head(Section):
    """What turns the model's states into an answer.

    Attributes:
        kind: `logistic`: logistic regression on the pooled last states, fitted on a part of the labelled data; the rest
            is the stream. `ready`: the model is a sequence classifier; all data is the stream.
        pool: How `logistic` makes one vector of a request: `mean` over valid tokens, or `cls`, the first.
        fit_share: Share of the labelled data that `logistic` is fitted on, between 0 and 1.
    """

    kind: Literal["logistic", "ready"] = "logistic"
    pool: Literal["mean", "cls"] = "mean"
    fit_share: float = Field(default=0.5, gt=0.0, lt=1.0)


class Experiment(Section):
    """All settings of one run.

    Attributes:
        task: What is done with the data.
        seed: Of the sub-sample, of the split and of streams that are made.
        data: Labelled requests.
        model: `minilm` (all-MiniLM-L6-v2 from its package), a local folder, or a name on the Hugging Face hub.
        head: What answers.
        cache: Settings of `llmcache.CacheConfig`.
        max_length: Most tokens a request, special tokens included; longer ones are cut.
        limit: Use that many labelled records only: a seeded sample in data order; of a made stream, its beginning.
        rounds: How often the stream is run; each round begins with a cold cache.
        warmup: Requests that run, unmeasured, before each round.
    """

    task: Literal["stream"]
    seed: int = Field(default=0, ge=0)
    data: Data
    model: str = Field(min_length=1)
    head: Head = Head()
    cache: CacheConfig = CacheConfig()
    max_length: int = Field(default=128, ge=3)
    limit: int | None = Field(default=None, ge=1)
    rounds: int = Field(default=5, ge=1)
    warmup: int = Field(default=20, ge=0)

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings, section by section; see `Section.make`."""
        head = Head.make(values.get("head", {}), "head")
        parts: dict[str, Any] = {**values, "head": head, "cache": _cache(values.get("cache", {}), head)}
        if "data" in values:
            parts["data"] = Data.make(values["data"], "data")
        return super().make(parts, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of every setting, defaults included; `make` takes them back."""
        return self.model_dump(mode="json")


def _cache(values: Any, head: Head) -> CacheConfig:
    """The cache's settings; a fitted head says itself which payload it reads, which no library could see from outside.

    Raises:
        ConfigError: A setting is wrong, or the payload keeps another vector than the head reads.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"cache: expected a mapping of settings (got {values!r})")
    if head.kind == "logistic" and values.get("mode") != "paper":  # which stores whole sequences, layer by layer
        values = {"payload": head.pool, **values}
    try:
        cache = CacheConfig.make(values)
    except ConfigError as error:
        raise ConfigError(f"cache.{error}") from error
    if head.kind == "logistic" and cache.payload not in (head.pool, "sequence", "auto"):
        raise ConfigError(
            f"cache.payload: the head reads {head.pool!r} (got {cache.payload!r}); leave it out, or change head.pool"
        )
    return cache


@dataclass(frozen=True, slots=True)
class Named:
    """One run to do.

    Attributes:
        group: Name of the experiment: the file's stem.
        name: Readable name of the run within it: the model, then the keys of the grid with their values.
        experiment: Its settings.
    """

    group: str
    name: str
    experiment: Experiment


def load_experiments(path: str | Path, changes: Sequence[str] = ()) -> list[Named]:
    """Read a file and spread its lists out to one run each.

    Args:
        path: YAML file.
        changes: `key=value` with dotted keys, values in YAML; they replace what the file says.

    Raises:
        ConfigError: A setting is wrong; names the file, the key, the value and the fix.
        FileNotFoundError: No such file.
    """
    values = read_yaml(path)
    for change in changes:
        _set(values, change)
    runs = []
    for point, chosen in _spread(values):
        try:
            experiment = Experiment.make(point)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        labels = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
        runs.append(Named(Path(path).stem, "-".join([Path(experiment.model).name, *labels]), experiment))
    return runs


def _set(values: dict[str, Any], change: str) -> None:
    key, sign, text = change.partition("=")
    if not (key and sign):
        raise ConfigError(f"--set {change!r}: write key=value, for instance cache.tau=0.9")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change!r}: the value is not valid YAML") from error
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {change!r}: {part} is a single value and has no keys below it")
    values[last] = value


def _spread(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each point of the grid, with the values chosen for it by dotted key."""
    flat = _flatten(values)
    axes = {key: value for key, value in flat.items() if _is_axis(key, value)}
    if empty := [key for key, value in axes.items() if not value]:
        raise ConfigError(f"{empty[0]}: the list is empty, so there is nothing to run; give at least one value")
    for chosen in itertools.product(*axes.values()):
        point: dict[str, Any] = {}
        choice = dict(zip(axes, chosen, strict=True))
        for key, value in (flat | choice).items():
            *path, last = key.split(".")
            inner = point
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        yield point, choice


def _is_axis(key: str, value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return key not in LISTS or (len(value) > 0 and all(isinstance(item, list) for item in value))


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key. Only mappings with text keys are opened: `tau: {0: 0.9}` is one value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and bool(value) and all(isinstance(name, str) for name in value)
        flat |= _flatten(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat
