"""Tables of HTTP servers, and of a store shared by workers; times from a busy machine are not shown."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from experiments.report.markdown import Cell, columns, count, number, of, percent, table
from experiments.report.pages.files import MISSING, figures_of, runs_if_any
from experiments.runs.folder import METRICS
from experiments.runs.read import Figures, Run


def _points(runs: Sequence[Run]) -> list[Figures]:
    return [{"run": run, **point} for run in runs for point in run.metrics.get("points", run.metrics["summary"])]


def table_of(group: str, cells: Mapping[str, Cell], has_times: bool = True) -> Callable[[Path], str]:
    """Return the function that makes the table of an experiment; one that was not measured has a row that says so."""

    def lines(results_dir: Path) -> str:
        found = [run for run in runs_if_any(results_dir, group) if run.is_timed or not has_times]
        if not found:
            return table(tuple(cells), [(f"`{group}`", MISSING, *[""] * (len(cells) - 2))])
        return columns(cells, _points(found))

    return lines


def _run(name: str, show: Callable[..., str] = str) -> Cell:
    """Return a cell for a figure of the whole run."""
    return lambda row: show(row["run"].metrics[name])


def _spread(row: Figures) -> str:
    if "goodput" not in row:
        return f"{number(row['rate'])}{'' if row['is_held'] else ', broken'}"
    return f"{number(row['goodput'])} ({number(row['goodput_min'])} to {number(row['goodput_max'])})"


def _gain(row: Figures) -> str:
    return number(row.get("gain"), 2)


def _of_queue(row: Figures) -> str:
    return f"{number(row['p99_ms'])} / {number(1e3 * row['max_queue_s'], 0)}"


def _growth(row: Figures) -> str:
    return f"{number(row['rss_warm_mb'], 0)} / {number(row['rss_end_mb'], 0)}"


STREAM: Mapping[str, Cell] = {"stream": lambda row: row["run"].task}
TIMES: Mapping[str, Cell] = {f"{name}, ms": of(number, f"{name}_ms") for name in ("p50", "p90", "p99")}
CPU: Mapping[str, Cell] = {
    "server, CPU ms": of(number, "server_cpu_ms", 2),
    "generator": of(number, "generator_cpu_ms", 2),
}
LOADED: Mapping[str, Cell] = {
    **STREAM,
    "server": itemgetter("server"),
    "arrivals": itemgetter("arrivals"),
    "goodput, requests / s": _spread,
    "gain of the cache": _gain,
    "hits": of(percent, "hit_rate"),
    "changed": of(percent, "changed_answers", 2),
    **TIMES,
    **CPU,
}
SOAKED: Mapping[str, Cell] = {
    **STREAM,
    "capacity, requests / s": of(number, "capacity"),
    "asked": of(number, "rate"),
    "requests": of(count, "n"),
    "accepted": of(percent, "accepted"),
    "failed": of(count, "n_failed"),
    "p99 of accepted / queue limit, ms": _of_queue,
    "most waiting": of(number, "waiting_max", 0),
    "memory when warm / at the end, MB": _growth,
    "hits": of(percent, "hit_rate"),
    "checked": of(count, "n_checked"),
    "unequal": of(count, "n_unequal"),
    "changed": of(percent, "changed_answers", 2),
}
REPLICAS: Mapping[str, Cell] = {
    "model": _run("model"),
    "kills": _run("n_kills", count),
    "requests while": itemgetter("phase"),
    "n": of(count, "n"),
    "first tries that failed in its hands": of(count, "n_failed_in_hands"),
    "others that failed": of(count, "n_failed_others"),
    "failed three times": of(count, "n_lost"),
    "repeats": of(count, "n_repeats"),
    "of these hits": of(percent, "hit_rate", 2),
    "wrong answers": of(count, "n_wrong"),
}
FAULTS: Mapping[str, Cell] = {
    "fault": itemgetter("kind"),
    **{name: of(count, name) for name in ("n", "requests", "hits", "purges")},
    "wrong answers": of(count, "wrong"),
    "served after a purge": of(count, "stale"),
    "crashes": of(count, "crashed"),
}
serve_load = table_of("serve_load", LOADED)
serve_load_engines = table_of("serve_load_engines", LOADED)
serve_soak = table_of("serve_soak", SOAKED)
ray_replicas = table_of("ray_replicas", REPLICAS, has_times=False)
store_faults = table_of("store_faults", FAULTS, has_times=False)

HOSTILE: Mapping[str, Cell] = {
    "list": itemgetter("list"),
    "tests": of(count, "tests"),
    "requests": of(count, "requests"),
    **{status: lambda row, status=status: count(row.get(status, 0)) for status in ("2xx", "4xx", "5xx")},
    "unanswered": lambda row: count(row.get("unanswered", 0)),
}


def hostile(results_dir: Path) -> str:
    if not (results_dir / "hostile" / METRICS).is_file():
        return table(tuple(HOSTILE), [("`make test-hostile`", MISSING, *[""] * (len(HOSTILE) - 2))])
    return columns(HOSTILE, figures_of(results_dir, "hostile")["lists"])
