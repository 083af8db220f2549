"""The table of indexes by number of entries."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from experiments.report.markdown import Cell, columns, count, number, of, percent, table
from experiments.report.pages.files import MISSING, runs_if_any


def index_scale(results_dir: Path) -> str:
    """Every index at every size; times are empty where the machine was busy."""
    runs = sorted(
        runs_if_any(results_dir, "index_scale"),
        key=lambda run: (run.task, run.config["dim"], run.config["n"]),
    )
    if not runs:
        return table(tuple(INDEX_SCALE), [("paraphrases", MISSING, *[""] * (len(INDEX_SCALE) - 2))])
    rows = [
        {"insert_p99_ms": None, **row, **({} if run.is_timed else UNTIMED)}
        for run in runs
        for row in run.metrics["summary"]
    ]
    return columns(INDEX_SCALE, rows)


INDEX_SCALE: Mapping[str, Cell] = {
    "vectors": itemgetter("drawn"),
    "width": itemgetter("dim"),
    "entries": of(count, "n"),
    "index": itemgetter("index"),
    "search p50, ms": of(number, "search_p50_ms", 2),
    "p99": of(number, "search_p99_ms", 2),
    "recall@1": of(percent, "recall"),
    "inserts / s": of(number, "inserts_per_s", 0),
    "their p99, ms": of(number, "insert_p99_ms", 2),
    "longest, ms": of(number, "insert_max_ms"),
    "removals / s": of(number, "removes_per_s", 0),
    "bytes an entry": of(number, "bytes_per_entry", 0),
    "build, s": of(number, "build_s"),
}
TIMES = (
    "search_p50_ms",
    "search_p99_ms",
    "inserts_per_s",
    "insert_p99_ms",
    "insert_max_ms",
    "removes_per_s",
    "build_s",
)
UNTIMED = dict.fromkeys(TIMES)
