"""The tables of a store that workers share; times that were not taken on an idle machine are not shown."""

from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.report.markdown import Cell, columns, table
from experiments.report.pages.files import MISSING, runs_if_any
from experiments.report.stores import FAULTS, rows_of


def _table(group: str, cells: Mapping[str, Cell], has_times: bool) -> Callable[[Path], str]:
    """The table of an experiment."""

    def lines(results_dir: Path) -> str:
        found = [run for run in runs_if_any(results_dir, group) if run.is_timed or not has_times]
        if not found:
            return table(tuple(cells), [(f"`{group}`", MISSING, *[""] * (len(cells) - 2))])
        return columns(cells, rows_of(found))

    return lines


store_faults = _table("store_faults", FAULTS, has_times=False)
