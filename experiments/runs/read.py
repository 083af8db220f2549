"""Reading of a results folder."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.runs.runner import METRICS, RunFolder, load_all
from llmcache import ConfigError

Figures = Mapping[str, Any]


def was_idle(env: Figures) -> bool:
    """Whether the machine was idle when a command started timing; other times are not shown."""
    # The average may still include what ran just before, with one thread per core. Early results lack it.
    return "load_average" not in env or float(env["load_average"]) <= env["n_cpus"] + 1


@dataclass(frozen=True, slots=True)
class Run:
    group: str
    path: Path
    config: Figures
    env: Figures
    metrics: Figures

    @property
    def is_timed(self) -> bool:
        return was_idle(self.env)

    @property
    def measure(self) -> str:
        return str(self.config["measure"])

    @property
    def task(self) -> str:
        """Name of its requests: `wikitext-repeats`, or the labelled set; "" without requests."""
        return str(self.metrics.get("task", ""))


def folders_of(configs: Sequence[Path], results_dir: Path, changes: Sequence[str] = ()) -> list[Path]:
    """Return the folders of the runs in YAML files, changed as by `--set`, existing or not."""
    return [RunFolder(results_dir, run).path for run in load_all(configs, changes)]


def others_beside(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of finished runs of the same experiments with other settings."""
    groups = dict.fromkeys(folder.parent for folder in folders)
    found = [path.parent for group in groups for path in sorted(group.glob(f"*/{METRICS}"))]
    return [folder for folder in found if folder not in folders]


def read_runs(folders: Iterable[Path]) -> list[Run]:
    return [_read(folder) for folder in folders if (folder / METRICS).is_file()]


def _read(folder: Path) -> Run:
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"), object_hook=_without_points)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{folder}: not a whole run; measure it again with --force, or delete it ({error})"
        ) from error
    return Run(folder.parent.name, folder, config, env, metrics)


def _without_points(figures: dict[str, Any]) -> dict[str, Any]:
    """Replace intervals without width by None: a bootstrap without events, or with one cluster, has no bounds."""
    return {
        name: None if name.endswith("_ci") and value is not None and value[0] == value[1] else value
        for name, value in figures.items()
    }


def unfinished(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the names of missing runs, without hash, by experiment."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        if not (folder / METRICS).is_file():
            found.setdefault(folder.parent.name, []).append(folder.name.rpartition("-")[0])
    return found


def grouped(runs: Iterable[Run], by: str) -> dict[str, list[Run]]:
    """Return runs by `group` or `task`, in their order."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(getattr(run, by), []).append(run)
    return found


def varied(configs: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Return the keys, as paths, whose values differ between settings; for a named component, only its name."""
    paths = dict.fromkeys(path for config in configs for path in _paths(config))
    return [path for path in paths if len({str(at(config, path)) for config in configs}) > 1]


def _paths(config: Figures, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and "name" in value and above:
            yield (*above, key, "name")
        elif isinstance(value, Mapping):
            yield from _paths(value, (*above, key))
        else:
            yield (*above, key)


def at(config: Figures, path: Sequence[str]) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def by_size(value: Any) -> tuple[bool, Any]:
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else str(value)


def label_of(path: Sequence[str]) -> str:
    return (path[-2] if path[-1] == "name" else path[-1]).replace("_", " ")
