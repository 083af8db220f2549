"""The tables of servers over HTTP, and of a store that workers share; times of a busy machine are not shown."""

from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path

from experiments.report.markdown import Cell, columns, count, of, table
from experiments.report.pages.files import MISSING, figures_of, runs_if_any
from experiments.report.serving import FAULTS, LOADED, REPLICAS, SOAKED, points
from experiments.runs.folder import METRICS


def _table(group: str, cells: Mapping[str, Cell], has_times: bool = True) -> Callable[[Path], str]:
    """The table of an experiment."""

    def lines(results_dir: Path) -> str:
        found = [run for run in runs_if_any(results_dir, group) if run.is_timed or not has_times]
        if not found:
            return table(tuple(cells), [(f"`{group}`", MISSING, *[""] * (len(cells) - 2))])
        return columns(cells, points(found))

    return lines


serve_load = _table("serve_load", LOADED)
serve_soak = _table("serve_soak", SOAKED)
ray_replicas = _table("ray_replicas", REPLICAS, has_times=False)
store_faults = _table("store_faults", FAULTS, has_times=False)

HOSTILE: Mapping[str, Cell] = {
    "list": itemgetter("list"),
    "tests": of(count, "tests"),
    "requests": of(count, "requests"),
    **{status: lambda row, status=status: count(row.get(status, 0)) for status in ("2xx", "4xx", "5xx")},
    "unanswered": lambda row: count(row.get("unanswered", 0)),
}


def hostile(results_dir: Path) -> str:
    """What was asked of servers that hostile clients ask."""
    if not (results_dir / "hostile" / METRICS).is_file():
        return table(tuple(HOSTILE), [("`make test-hostile`", MISSING, *[""] * (len(HOSTILE) - 2))])
    return columns(HOSTILE, figures_of(results_dir, "hostile")["lists"])
