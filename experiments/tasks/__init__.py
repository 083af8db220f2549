"""Tasks: one file each, with its settings and its workload, the same for every method.

settings -> Workload   a model, requests in order, how answers are read and scored
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.models.loading import UNTRAINED, find, prepared_figures
from experiments.support.files import Folders
from experiments.support.section import Section, choose
from experiments.tasks import held_out, openbookqa, prompts, squad_v2, stream, wikitext
from experiments.tasks.workload import Workload


@dataclass(frozen=True, slots=True)
class Task:
    settings: type[Section]
    build: Callable[[Any, Folders, int], Workload]  # `(settings, folders, seed) -> workload`


TASKS: Mapping[str, Task] = {
    "stream": Task(stream.Settings, stream.build),
    "held_out": Task(held_out.Settings, held_out.build),
    "squad_v2": Task(squad_v2.Settings, squad_v2.build),
    "wikitext": Task(wikitext.Settings, wikitext.build),
    "openbookqa": Task(openbookqa.Settings, openbookqa.build),
    "prompts": Task(prompts.Settings, prompts.build),
}


def make_task(values: Any, key: str = "task") -> Section:
    """Check the settings of a task; `name` selects the task."""
    if isinstance(values, Section):
        return values
    task, rest = choose(TASKS, values, "name", key)
    settings: Section = task.settings.make({"name": values["name"], **rest}, key)
    return settings


def build(settings: Any, folders: Folders, seed: int) -> Workload:
    if settings.model != UNTRAINED:
        find(settings.model, folders.models)  # report an unprepared model before fetching data
    workload = TASKS[settings.name].build(settings, folders, seed)
    if settings.model == UNTRAINED:
        workload.facts["weights"] = "random"
    elif figures := prepared_figures(settings.model, folders.models):
        workload.facts["prepared"] = figures
    return workload
