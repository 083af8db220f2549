"""What one experiment is: a YAML file, checked, with lists spread out to one run each.

    runs = load_experiments("configs/banking77.yaml", ["methods=[{method: llmcache, tau: 0.9}]"])

A list is a grid: one run for each of its values. Keys in `LISTS` hold a list by nature; there, a list of lists is one.
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

#: Keys that hold a list by nature.
LISTS = (
    *("task.data.path", "cache.layers", "methods", "taus", "live_taus", "max_drops", "hit_rates", "rates", "arrivals"),
    *("sources", "baselines", "models", "token_heads", "fingerprints", "kept", "shares", "policies", "batch_sizes"),
    *("seq_lens", "buckets", "dtypes", "banks", "generate"),
)


def make_experiment(values: Mapping[str, Any]) -> Experiment:
    """Check all settings of one run, which are those of the measure that `measure` names."""
    measure, rest = choose(MEASURES, values, "measure", "")
    experiment: Experiment = measure.settings.make({"measure": values["measure"], **rest})
    return experiment


@dataclass(frozen=True, slots=True)
class Named:
    group: str  # name of the experiment: the file's stem
    name: str  # readable name of the run within it: the model, then the keys of the grid with their values
    experiment: Experiment


def load_experiments(path: str | Path, changes: Sequence[str] = ()) -> list[Named]:
    """Read a file, change settings (`key=value` with dotted keys), and spread its lists out to one run each."""
    # A key below a list of mappings is that of each: `task.limit=50` cuts every task of a grid. `task.` may be left out
    # where the file has no such section of its own: `data.path=a.csv`, `head.pool=cls`.
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
    """A value of the grid in a folder's name; one with settings of its own goes by its name."""
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
    """Whether a key is a setting of all tasks, of which there are some."""
    known = ((task, TASKS.get(str(task.get("name")))) for task in tasks)
    return bool(tasks) and all(key in task or (kind and key in kind.settings.model_fields) for task, kind in known)


def _mappings(value: Any) -> list[dict[str, Any]]:
    """The mapping itself, or all those of a list of nothing else; none of other values."""
    found = value if isinstance(value, list) else [value]
    return found if all(isinstance(item, dict) for item in found) else []


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
