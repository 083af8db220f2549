"""Experiments: a checked YAML file whose lists expand to one run per combination.

    runs = load_experiments("configs/banking77.yaml", ["methods=[{method: llmcache, tau: 0.9}]"])

A list is a grid: one run for each of its values. Keys in `LISTS` hold lists; for these, a list of lists is a grid.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.measures import MEASURES
from experiments.measures.base import Experiment
from experiments.support.section import choose
from experiments.tasks import TASKS
from llmcache import ConfigError
from llmcache.lab import parse_yaml, read_yaml

#: Keys whose values are lists.
LISTS = (
    *("task.data.path", "cache.layers", "methods", "taus", "live_taus", "max_drops", "hit_rates"),
    *("sources", "baselines", "models", "token_heads", "fingerprints", "kept", "shares", "policies", "batch_sizes"),
    *("seq_lens", "buckets", "dtypes", "banks", "generate", "ways"),
)


def make_experiment(values: Mapping[str, Any]) -> Experiment:
    """Check the settings of one run against the measure named by `measure`."""
    measure, rest = choose(MEASURES, values, "measure", "")
    experiment: Experiment = measure.settings.make({"measure": values["measure"], **rest})
    return experiment


@dataclass(frozen=True, slots=True)
class Named:
    group: str  # the experiment's name: the file's stem
    name: str  # readable name of the run: the model, then the grid's keys with their values
    experiment: Experiment


def load_experiments(path: str | Path, changes: Sequence[str] = ()) -> list[Named]:
    """Read a file, change settings (`key=value` with dotted keys), and expand its lists to runs."""
    # A key below a list of mappings applies to each of them: `task.limit=50` sets the limit of every task in a grid.
    # `task.` may be omitted where the file has no section of that name: `data.path=a.csv`, `head.pool=cls`.
    values = read_yaml(path)
    for change in changes:
        _set(values, change)
    runs = []
    for point, chosen in _spread(values):
        try:
            experiment = make_experiment(point)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        labels = [_label(key, value) for key, value in chosen.items() if key != "task"]
        runs.append(Named(Path(path).stem, "-".join([experiment.name, *labels]), experiment))
    return runs


def _label(key: str, value: Any) -> str:
    """Format a grid's value for a folder name; a value with settings of its own is written as its name."""
    shown = value.get("name", value) if isinstance(value, dict) else value
    return f"{key.rpartition('.')[2]}={shown}"


def _set(values: dict[str, Any], change: str) -> None:
    key, sign, text = change.partition("=")
    if not (key and sign):
        raise ConfigError(f"--set {change!r}: write key=value, for instance cache.tau=0.9")
    value = parse_yaml(text, f"--set {change!r}")
    *path, last = key.split(".")
    sections = [values]
    if path and path[0] not in values and _is_of_task(path[0], _mappings(values.get("task"))):
        path = ["task", *path]
    for part in path:
        below = [_mappings(section.setdefault(part, {})) for section in sections]
        if not all(below):
            raise ConfigError(f"--set {change!r}: {part} is no mapping, nor a list of them, and has no keys below it")
        sections = list(itertools.chain(*below))
    for section in sections:
        section[last] = value


def _is_of_task(key: str, tasks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are tasks and the key is a setting of all of them."""
    known = ((task, TASKS.get(str(task.get("name")))) for task in tasks)
    return bool(tasks) and all(key in task or (kind and key in kind.model_fields) for task, kind in known)


def _mappings(value: Any) -> list[dict[str, Any]]:
    """Return a mapping as a list, or a list of mappings as it is; [] for other values."""
    found = value if isinstance(value, list) else [value]
    return found if all(isinstance(item, dict) for item in found) else []


def _spread(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each point of the grid, with its chosen values by dotted key."""
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
    """Return the leaves by dotted key. Only mappings with text keys are opened: `tau: {0: 0.9}` is one value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and bool(value) and all(isinstance(name, str) for name in value)
        flat |= _flatten(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat
