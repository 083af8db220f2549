"""Tables of runs on a GPU, by the card's name: what `make gpu` and `make bench-gpu` write to `results/gpu`."""

from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path

from experiments.report import columns as show
from experiments.report.markdown import Cell
from experiments.report.pages.files import any_of
from experiments.report.tables import by_row, figure, generations

#: The card; and where entries are kept.
CARD: Mapping[str, Cell] = {
    "card": lambda row: row["run"].env["gpu"] or "none",
    "entries on": lambda row: row["banks"] if "banks" in row else row["run"].config["kept_on"],
}
CALLS: Mapping[str, Cell] = {**CARD, "dtype": itemgetter("dtype"), **show.COMPILED}
GENERATION: Mapping[str, Cell] = {**CARD, **{name: itemgetter(name) for name in ("model", "dtype")}, **show.GENERATION}
LIMIT: Mapping[str, Cell] = {**CARD, **show.LIMIT}
TREES: Mapping[str, Cell] = {
    **CARD,
    "model": lambda row: row["run"].config["model"],
    **{name: cell for name, cell in show.TREES.items() if name != "CPU, s"},
    "ms": lambda row: f"{1e3 * row['plain_s']:.1f} / {1e3 * row['cached_s']:.1f}",
}

#: As `pages.TABLES`.
TABLES: Mapping[str, Callable[[Path], str]] = {
    "gpu_calls": any_of(by_row(CALLS, figure("calls")), "gpu/compiled", is_timed=True),
    "gpu_generation": any_of(by_row(GENERATION, generations), "gpu/prefix_decode", is_timed=True),
    "gpu_prefixes": any_of(by_row(LIMIT, figure("ways")), "gpu/prefix_limit", is_timed=True),
    "gpu_trees": any_of(by_row(TREES), "gpu/prefix_tree", is_timed=True),
}
