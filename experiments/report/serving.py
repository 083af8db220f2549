"""Tables of servers that were asked over their socket, and of a store that workers share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter

from experiments.report.markdown import Cell, columns, count, number, of, percent
from experiments.runs.read import Figures, Run


def points(runs: Sequence[Run]) -> list[Figures]:
    """All rows of all runs."""
    return [{"run": run, **point} for run in runs for point in run.metrics.get("points", run.metrics["summary"])]


def _shown(cells: Mapping[str, Cell], note: str) -> Callable[[Sequence[Run]], Iterator[str]]:
    """The table of such runs, and what is to be known of it."""

    def tables(runs: Sequence[Run]) -> Iterator[str]:
        yield columns(cells, points(runs))
        yield note

    return tables


def _run(name: str, show: Callable[..., str] = str) -> Cell:
    """A figure of the whole run."""
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
serve_load = _shown(
    LOADED,
    "Goodput: the largest rate at which 99 % of all requests are answered with 200 in time; median and range of "
    "rounds. Latencies, from when a request was due, and CPU time of a request are of the last rate that was held.",
)
serve_soak = _shown(
    SOAKED,
    "Failed: 5xx, no connection or no answer in time. Unequal: answers that no approximate rung served and that are "
    "not the model's own. Changed: of all that were checked.",
)
ray_replicas = _shown(
    REPLICAS,
    "In its hands: sent before a kill, and not answered by then. Repeats: of texts that were answered before. Wrong: "
    "not the model's own.",
)
store_faults = _shown(
    FAULTS, "Requests during a fault and after it, of two caches that share the Redis, and namespaces purged."
)
