"""Tasks: one file each, with its settings and its workload, the same for every method.

settings -> Workload   a model, requests in order, how answers are read and scored
"""

from collections.abc import Mapping
from typing import Any

from experiments.models.loading import UNTRAINED, find, prepared_figures
from experiments.support.files import Folders
from experiments.support.section import Section, choose
from experiments.tasks import openbookqa, prompts, squad_v2, stream, wikitext
from experiments.tasks.workload import TaskSettings, Workload

TASKS: Mapping[str, type[TaskSettings]] = {
    "stream": stream.Settings,
    "held_out": stream.HeldOut,
    "squad_v2": squad_v2.Settings,
    "wikitext": wikitext.Settings,
    "openbookqa": openbookqa.Settings,
    "prompts": prompts.Settings,
}


def make_task(values: Any, key: str = "task") -> Section:
    """Check the settings of a task; `name` selects the task."""
    if isinstance(values, Section):
        return values
    task, rest = choose(TASKS, values, "name", key)
    settings: Section = task.make({"name": values["name"], **rest}, key)
    return settings


def build(settings: Any, folders: Folders, seed: int) -> Workload:
    if settings.model != UNTRAINED:
        find(settings.model, folders.models)  # report an unprepared model before fetching data
    workload = settings.build(folders, seed)
    if settings.model == UNTRAINED:
        workload.facts["weights"] = "random"
    elif figures := prepared_figures(settings.model, folders.models):
        workload.facts["prepared"] = figures
    return workload
