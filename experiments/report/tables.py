"""Tables by measure, made from the runs of one experiment. Pages and reports show results through these."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.measures.decode import KINDS
from experiments.measures.policies import BEST
from experiments.metrics.frontier import best, curves
from experiments.report import columns as show
from experiments.report.markdown import MISSING, Cell, columns, each, number, of, percent, table
from experiments.runs.read import Figures, Run, at, by_size, grouped, label_of, varied

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


def drawn(run: Run) -> Iterator[Figures]:
    """Yield a row for each rule of drawing hits, with the figures of each scenario; of faults by times as well."""
    for rule in dict.fromkeys(row["rule"] for row in run.metrics["summary"]):
        mine = [row for row in run.metrics["summary"] if row["rule"] == rule]
        found = {row["scenario"] if row["times"] <= 1 else (row["scenario"], row["times"]): row for row in mine}
        yield {"rule": rule, **found}


def compared(run: Run) -> Iterator[Figures]:
    """Yield the rule in use beside the former one."""
    before, *_, now = drawn(run)
    yield {"before": before, "now": now}


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
    "trust": lambda runs: f"{calibrated(runs)}\n\n{ways(runs)}",
    "bound": by_row(show.BOUND_DRAFT, figure("claims")),
    "audit": by_row(show.DRAWING, drawn),
    "service": by_row(show.PASSES),
    "set_rates": by_row({**show.STREAM, **show.RATED}),
    "second_pass": by_row(show.KNOWN),
    "engines": by_row(show.ENGINES),
    "engine_parity": by_row(show.ENGINE_PARITY),
    "prefix_limit": limits,
    "parity": by_row(show.PARITY, lambda run: [run.metrics]),
    "decode": by_row(show.GENERATION, generations),
    "lm_eval": by_row(show.EVALUATED),
    "tree": by_row(show.TREES),
    "turns": by_row(show.TURNS),
    "compiled": compiled,
    "serve_load": by_row(show.LOADED),
    "serve_streams": by_row(show.STREAMED),
    "serve_soak": by_row(show.SOAKED),
    "ray_replicas": by_row(show.REPLICAS),
    "store_faults": by_row(show.FAULTS),
    "policies": policies,
    "commands": by_row(show.COMMANDS),
}


#: Methods in row order, with their titles.
WAYS = {
    "llmcache": "llmcache: neighbours and forecast",
    "student": "the forecast alone",
    "semantic_response": "semantic response cache",
    "doccache": "DocCache",
    "paper": "the paper's method",
}
#: Methods whose errors are shown by hit and by intent.
OWN = ("llmcache", "student")
#: Curves in column order, with their headings.
CURVES = {
    ("llmcache", "frozen"): "llmcache, frozen",
    ("llmcache", "growing"): "llmcache, growing",
    ("semantic_response", None): "semantic response cache",
    ("doccache", None): "DocCache",
    ("paper", None): "the paper's method",
    ("student", "frozen"): "the forecast alone",
}
SOURCES = {"frozen": "frozen", "growing": "growing, no bound"}
LOSSES = {"changed_answers": "0.5 % of answers changed", "accuracy_drop": "half a point of accuracy lost"}
WORTH_TELLING = 0.01  # share of all requests from which exact repeats are shown apart from all hits


def calibrated(runs: Sequence[Run]) -> str:
    """Return the table of limits chosen in advance: every stream and target, with frozen and growing sources."""
    heads = [f"{title}: {name}" for title in SOURCES.values() for name in ("hits", "changed", "points lost")]
    rows = [
        (
            task,
            percent(drop),
            *(cell for sources in SOURCES for cell in _limits(found_of(seeds, "llmcache", drop, sources))),
        )
        for task, seeds in grouped(runs, "task").items()
        for drop in drops_of(seeds)
    ]
    return table(("stream", "target", *heads), rows)


def ways(runs: Sequence[Run]) -> str:
    """Return the table of hits and changed answers: every method, frozen sources, limits chosen in advance."""
    drops = drops_of(runs)
    heads = [f"target {percent(drop)}: {what}" for drop in drops for what in ("hits", "changed")]
    rows = [
        (task, told, *(cell for drop in drops for cell in hits_and_changed(found_of(seeds, way, drop))))
        for task, seeds in grouped(runs, "task").items()
        for way, told in WAYS.items()
    ]
    return table(("stream", "way", *heads), rows)


def errors(runs: Sequence[Run]) -> str:
    """Return the table of changed answers by hit, by intent and overall; frozen sources."""
    rows = [
        (task, WAYS[way], percent(drop), *_errors(found_of(seeds, way, drop)))
        for task, seeds in grouped(runs, "task").items()
        for way in OWN
        for drop in drops_of(seeds)
    ]
    return table(("stream", "way", "target", "changed", "of hits", "worst intent", "median intent"), rows)


def hindsight(runs: Sequence[Run]) -> str:
    """Return the table of each method's best threshold in hindsight, on the requests it is counted on."""
    rows = [
        (task, told, *(_best(seeds, curve, loss) for curve in CURVES))
        for loss, told in LOSSES.items()
        for task, seeds in grouped(runs, "task").items()
    ]
    return table(("stream", "at most", *CURVES.values()), rows)


def drops_of(runs: Sequence[Run]) -> list[float]:
    return list(dict.fromkeys(row["max_drop"] for row in runs[0].metrics["calibrated"])) if runs else []


def chosen(run: Run, way: str, sources: str, drop: float) -> Figures | None:
    """Return a method's figures at a limit chosen in advance; None if not measured."""
    wanted = (way, sources, drop)
    rows = run.metrics["calibrated"]
    return next((r for r in rows if (r.get("method", "llmcache"), r["sources"], r["max_drop"]) == wanted), None)


def found_of(runs: Sequence[Run], way: str, drop: float, sources: str = "frozen") -> list[Figures]:
    """Return a method's figures in every run; none if any run lacks them."""
    rows = [chosen(run, way, sources, drop) for run in runs]
    found = [row for row in rows if row is not None]
    return found if len(found) == len(rows) else []


def _of(found: Sequence[Figures], get: str | Callable[[Figures], Any], digits: int = 1, unit: str = " %") -> str:
    return each([row[get] if isinstance(get, str) else get(row) for row in found], digits, unit)


def _limits(found: Sequence[Figures]) -> tuple[str, ...]:
    if not found:
        return MISSING, "", ""
    return _of(found, "hit_rate"), _of(found, "changed_answers", 2), _of(found, "accuracy_drop", 2, unit="")


def hits_and_changed(found: Sequence[Figures]) -> tuple[str, str]:
    if not found:
        return MISSING, ""
    hits = _of(found, "hit_rate")
    if max(map(_exact, found)) >= WORTH_TELLING:
        hits += f", of these exact {_of(found, _exact)}"
    return hits, _of(found, "changed_answers", 2)


def _exact(row: Figures) -> float:
    """Return the hits on a request's own repeat, as a share of all requests."""
    return float(row["hits_by_rung"].get("exact", 0.0))


def _errors(found: Sequence[Figures]) -> tuple[str, ...]:
    if not found:
        return MISSING, "", "", ""
    told = _of(found, "changed_answers", 2), _of(found, "changed_per_hit", 2)
    if any(row.get("by_intent") is None for row in found):
        return *told, MISSING, MISSING
    worst, middle = (lambda row: row["by_intent"]["worst"]["changed"]), (lambda row: row["by_intent"]["median"])
    return *told, _of(found, worst), _of(found, middle, 2)


def _best(runs: Sequence[Run], curve: tuple[str, str | None], loss: str) -> str:
    """Format the hits of every seed; if accuracy is the limit, also the changed answers."""
    found = [best(run.metrics["points"], curve, loss) for run in runs]
    if all(point is None for point in found):
        return MISSING
    hits, changed = (each([point and point[name] for point in found]) for name in ("hit_rate", "changed_answers"))
    return hits if loss != "accuracy_drop" else f"{hits}; changed {changed}"
