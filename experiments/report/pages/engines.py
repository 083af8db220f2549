"""Tables of engines and drafts: every way to answer a stream in whole passes, and how engines differ from the model."""

from collections.abc import Mapping
from pathlib import Path

from experiments.measures import engines as measure
from experiments.report.markdown import Cell, columns, count, number, of, percent, table
from experiments.report.markdown import speed as times
from experiments.report.pages.files import MISSING, runs_if_any
from experiments.report.pages.serving import STREAM, table_of
from experiments.runs.read import Figures

NAMES = {
    measure.EAGER: "PyTorch, eager",
    measure.ONNX: "ONNX Runtime alone",
    measure.INT8: "ONNX Runtime alone, int8",
    measure.SEMANTIC: "semantic response cache",
    measure.EXACT: "llmcache, exact repeats",
    measure.REUSE: "llmcache, reuse",
    measure.DRAFT: "llmcache, draft",
    measure.ALL: "llmcache, reuse and draft",
}
#: Stream, threads and target of the README's table.
FIRST = ("banking77", 1, 0.005)

WAY: Mapping[str, Cell] = {"way": lambda row: NAMES[row["way"]]}
FOUR: Mapping[str, Cell] = {
    **WAY,
    "ms": of(number, "ms", 2),
    "times eager": of(number, "speedup", 2),
    "changed": of(percent, "changed_answers", 2),
    "bound": of(percent, "max_drop"),
}
COSTS: Mapping[str, Cell] = {
    **STREAM,
    "threads": of(count, "threads"),
    **WAY,
    "target": of(percent, "max_drop"),
    "ms": of(number, "ms", 2),
    "times eager": times,
    "times ONNX Runtime": of(number, "times_onnx", 2),
    "requests / s": of(number, "per_s", 0),
    "not computed": of(percent, "hit_rate"),
    "changed": of(percent, "changed_answers", 2),
    "accuracy": of(percent, "accuracy"),
    "weights, MB": of(number, "weights_mb", 0),
    "cache, MB": of(number, "cache_mb"),
    "rungs": lambda row: row["rungs"] or "",
}
PARITY: Mapping[str, Cell] = {
    **STREAM,
    "engine": lambda row: row["engine"],
    "misses": of(count, "n_misses"),
    "largest difference": lambda row: f"{row['difference_most']:.1e}",
    "beyond the tolerance": of(count, "n_beyond"),
    "answers changed": of(count, "n_changed"),
}
engines = table_of("engines", COSTS)
engines_bert = table_of("engines_bert", COSTS)
engines_batch = table_of("engines_batch", COSTS)
engines_parity = table_of("engines_parity", PARITY, has_times=False)


def first_screen(results_dir: Path) -> str:
    """Return the README's table: one stream, and llmcache at one target."""
    rows = first_rows(results_dir).get(FIRST[0])
    return columns(FOUR, rows) if rows else table(tuple(FOUR), [("`engines`", MISSING, "", "", "")])


def first_rows(results_dir: Path) -> dict[str, list[Figures]]:
    """Return the rows of each stream at the README's number of threads and target."""
    _, threads, drop = FIRST
    found: dict[str, list[Figures]] = {}
    for run in runs_if_any(results_dir, "engines"):
        rows = [row for row in run.metrics["summary"] if (row["threads"], row["max_drop"] or drop) == (threads, drop)]
        if run.is_timed and rows:
            found[run.task] = rows
    return found
