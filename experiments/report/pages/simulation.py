"""Tables of simulated workers; all rest on times, so those of a machine that was busy are not shown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from experiments.report.markdown import Cell, columns, table
from experiments.report.pages.files import MISSING, runs_if_any
from experiments.report.simulation import CHECKED, POINTS, STOPS, TIMES, checked, stops, times
from experiments.runs.read import Figures, Run

_SHOWN = (1, 4, 16, 64, 256)  # workers


def _table(cells: Mapping[str, Cell], rows_of: Callable[[Sequence[Run]], Iterable[Figures]]) -> Callable[[Path], str]:
    """The table of all runs."""

    def lines(results_dir: Path) -> str:
        found = [run for run in runs_if_any(results_dir, "simulation") if run.is_timed]
        if not found:
            return table(tuple(cells), [("`simulation`", MISSING, *[""] * (len(cells) - 2))])
        return columns(cells, rows_of(found))

    return lines


def _some(runs: Sequence[Run]) -> list[Figures]:
    return [row for run in runs for row in run.metrics["summary"] if row["workers"] in _SHOWN]


simulation = _table(POINTS, _some)
simulation_check = _table(CHECKED, checked)
simulation_times = _table(TIMES, times)
simulation_stops = _table(STOPS, stops)
