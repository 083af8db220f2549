"""Tables by measure, made from the runs of one experiment. Pages and reports show results through these."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.measures.decode import KINDS
from experiments.measures.policies import BEST
from experiments.metrics.frontier import best, curves
from experiments.report import columns as show
from experiments.report import trust
from experiments.report.markdown import Cell, columns, number, of, percent, table
from experiments.runs.read import Figures, Run, at, by_size, label_of, varied

#: Makes the table of the runs of one measure.
Table = Callable[[Sequence[Run]], str]


def rows_of(runs: Iterable[Run], rows: Callable[[Run], Iterable[Figures]]) -> list[Figures]:
    """Return the rows of all runs; each has its run under `run`."""
    return [{"run": run, **row} for run in runs for row in rows(run)]


def figure(name: str) -> Callable[[Run], Iterable[Figures]]:
    return lambda run: run.metrics.get(name, ())  # type: ignore[no-any-return]


SUMMARY = figure("summary")


def by_row(cells: Mapping[str, Cell], rows: Callable[[Run], Iterable[Figures]] = SUMMARY) -> Table:
    """Return the function that shows every row of runs in these columns."""
    return lambda runs: columns(cells, rows_of(runs, rows))


def of_runs(runs: Sequence[Run]) -> str:
    """Return the table of all runs of one experiment; all runs are of one measure."""
    return TABLES.get(runs[0].measure, as_on_screen)(runs)


def as_on_screen(runs: Sequence[Run]) -> str:
    """Return the table that `llmcache run` prints. Shares are fractions of 1."""
    rows = rows_of(runs, SUMMARY)
    names = [name for name, value in (rows[0] if rows else {}).items() if not isinstance(value, dict | Run)]
    cells = {name: lambda row, name=name: _text(row.get(name)) for name in names}
    return columns({**show.STREAM, **show.SEED, **cells}, rows)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def methods(run: Run) -> list[Figures]:
    return [{"label": label, **figures} for label, figures in run.metrics["methods"].items()]


def observed(runs: Sequence[Run]) -> str:
    """Return the table of observed runs; the first columns are the settings that vary."""
    names = varied([run.config for run in runs])
    settings = {label_of(name): lambda row, name=name: at(row["run"].config, name) for name in names}
    cells = {**settings, **show.OBSERVED}
    if any(run.metrics["reconstruction_error"] is not None for run in runs):
        cells["codec's error"] = of(number, "reconstruction_error", 4)
    ordered = sorted(runs, key=lambda run: [by_size(at(run.config, name)) for name in names])
    return columns(cells, rows_of(ordered, lambda run: [run.metrics]))


def swept(runs: Sequence[Run]) -> str:
    """Return the table of the most hits of each curve in hindsight."""
    return columns(show.CURVES, rows_of(runs, _curves))


def _curves(run: Run) -> Iterator[Figures]:
    for curve in curves(run.metrics["points"]):
        found = {loss: best(run.metrics["points"], curve, loss) for loss in ("accuracy_drop", "changed_answers")}
        yield {"curve": " ".join(_METHODS.get(name, name) for name in curve if name), **found}


_METHODS = {"doccache": "DocCache", "semantic_response": "semantic response cache"}


def swept_and_live(runs: Sequence[Run]) -> str:
    """Return both tables of a sweep: hits in hindsight, and live runs if there were any."""
    live = any(run.metrics["live"] for run in runs)
    return "\n\n".join([swept(runs), *([by_row(show.LIVE, figure("live"))(runs)] if live else ())])


def limits(runs: Sequence[Run]) -> str:
    """Return the table of times to first token beside the least possible; times are empty if the machine was busy."""
    rows = rows_of(runs, lambda run: [{**row, **({} if run.is_timed else UNTIMED)} for row in run.metrics["ways"]])
    return columns(show.LIMIT, sorted(rows, key=lambda row: (row["model"], row["length"], row["share"] or 0.0)))


UNTIMED = dict.fromkeys(("plain_ms", "cache_ms", "limit_ms", "batching_ms", "copy_ms", "of_limit"))


def generations(run: Run) -> Iterator[Figures]:
    for row in run.metrics["generation"]:
        yield from ({"kind": kind, **row} for kind in KINDS)


def compiled(runs: Sequence[Run]) -> str:
    """Return the table of calls with and without a compiler and a cache, with the reasons of those not run."""
    rows = rows_of(runs, figure("calls"))
    more = [name for name in ("dtype", "banks") if len({row.get(name) for row in rows}) > 1]
    more += ["not_run"] if any(row.get("not_run") for row in rows) else []
    extra = {name.replace("_", " "): lambda row, name=name: row.get(name) for name in more}
    return columns({**show.COMPILED, **extra}, rows)


def policies(runs: Sequence[Run]) -> str:
    """Return the table of every stream and size; with a third of a Zipf stream's keys held, policies hardly differ."""
    found = dict.fromkeys(row["policy"] for row in rows_of(runs, SUMMARY))
    names = [*(name for name in found if name != BEST), BEST]
    lines = [line for run in runs for line in _by_policy(run, names)]
    return table((f"[keys](configs/{runs[0].group}.yaml)", "cache holds", "share of", *names), lines)


def _by_policy(run: Run, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield two rows per size if costs differ, else one. The optimum is known only for uniform entries."""
    rows = run.metrics["summary"]
    differ = any(row["hit_rate"] != row["tokens_saved"] for row in rows)
    for held in dict.fromkeys(row["share"] for row in rows):
        if held >= 0.3 and run.config["stream"]["name"] != "mooncake":
            continue
        by_name = {row["policy"]: row for row in rows if row["share"] == held}
        for key, told in {"hit_rate": "hits", **({"tokens_saved": "tokens saved"} if differ else {})}.items():
            cells = (percent(by_name[name][key]) if name in by_name else "" for name in names)
            yield run.task, percent(held, 0), told, *cells


#: Tables of measures; other measures are shown as on the screen.
TABLES: Mapping[str, Table] = {
    "serve": by_row({**show.STREAM, **show.SERVED}, methods),
    "observe": observed,
    "sweep": swept_and_live,
    "trust": lambda runs: f"{trust.calibrated(runs)}\n\n{trust.ways(runs)}",
    "bound": by_row(show.BOUND_DRAFT, figure("claims")),
    "service": by_row(show.PASSES),
    "set_rates": by_row({**show.STREAM, **show.RATED}),
    "second_pass": by_row(show.KNOWN),
    "engines": by_row(show.ENGINES),
    "engine_parity": by_row(show.ENGINE_PARITY),
    "prefix_limit": limits,
    "parity": by_row(show.PARITY, lambda run: [run.metrics]),
    "decode": by_row(show.GENERATION, generations),
    "compiled": compiled,
    "serve_load": by_row(show.LOADED),
    "serve_soak": by_row(show.SOAKED),
    "ray_replicas": by_row(show.REPLICAS),
    "store_faults": by_row(show.FAULTS),
    "policies": policies,
    "commands": by_row(show.COMMANDS),
}
