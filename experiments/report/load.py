"""The table of an open loop: latency from arrival to answer, by offered load."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from experiments.report.markdown import Cell, columns, number, of, percent
from experiments.runs.read import Figures, Run

PICTURE = "loads.png"  # in the folder of a run


def load(runs: Sequence[Run]) -> Iterator[str]:
    """What the model alone and the cache take at each load, and what waits for them."""
    for run in runs:
        yield f"![Latency by offered load of {run.task}]({run.group}/{run.path.name}/{PICTURE})"
    yield columns(LOADED, points(runs))
    yield (
        "Milliseconds from arrival to answer, one thread answering in order. Load: requests a second over what the "
        "model alone answers a second. Busy: share of the time in which an answer was being made. n: requests a round, "
        "and rounds; from a load of 1 on latencies of the model alone grow with it."
    )


def points(runs: Sequence[Run]) -> list[Figures]:
    """All loads of all runs."""
    return [{"run": run, **point} for run in runs for point in run.metrics["points"]]


def _pair(name: str) -> Cell:
    return lambda row: f"{number(row['plain'][name])} / {number(row['cache'][name])}"


LOADED: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "allowed loss": of(percent, "max_drop"),
    "threads": itemgetter("threads"),
    "arrivals": itemgetter("arrivals"),
    "load": itemgetter("load"),
    "hits": of(percent, "hit_rate"),
    **{f"{name}, ms: model alone / cache": _pair(name) for name in ("p50", "p95", "p99")},
    "p99: gain": of(number, "gain_p99"),
    "busy: model alone": of(percent, "plain_busy", 0),
    "cache": of(percent, "cache_busy", 0),
    "n": lambda row: f"{row['run'].metrics['n_counted']:,} x {row['run'].metrics['rounds']}",
}
