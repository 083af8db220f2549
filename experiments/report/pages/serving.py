"""The tables of servers over HTTP; times that were not taken on an idle machine are not shown."""

from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.report.markdown import Cell, columns, table
from experiments.report.pages.files import MISSING, runs_if_any
from experiments.report.serving import CHATS, HIT, KILLS, LOADED, SOAKED, TIMINGS, points


def _table(group: str, cells: Mapping[str, Cell], has_times: bool = True) -> Callable[[Path], str]:
    """The table of an experiment."""

    def lines(results_dir: Path) -> str:
        found = [run for run in runs_if_any(results_dir, group) if run.is_timed or not has_times]
        if not found:
            return table(tuple(cells), [(f"`{group}`", MISSING, *[""] * (len(cells) - 2))])
        return columns(cells, points(found))

    return lines


serve_load = _table("serve_load", LOADED)
serve_hits = _table("serve_hits", HIT)
serve_chat = _table("serve_chat", CHATS)
serve_timing = _table("serve_timing", TIMINGS)
serve_soak = _table("serve_soak", SOAKED)
serve_kill = _table("serve_kill", KILLS, has_times=False)
