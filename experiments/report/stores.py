"""Tables of a store that workers share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter

from experiments.report.markdown import Cell, bounded, columns, count, number, of, percent, share
from experiments.runs.read import Figures, Run


def rows_of(runs: Sequence[Run]) -> list[Figures]:
    """All rows of all runs."""
    return [row for run in runs for row in run.metrics["summary"]]


def _shown(cells: Mapping[str, Cell], note: str) -> Callable[[Sequence[Run]], Iterator[str]]:
    """The table of such runs, and what is to be known of it."""

    def tables(runs: Sequence[Run]) -> Iterator[str]:
        yield columns(cells, rows_of(runs))
        yield note

    return tables


def _rung(*names: str) -> Cell:
    return lambda row: percent(sum(row["hits_by_rung"].get(name, 0.0) for name in names))


WORKERS: Mapping[str, Cell] = {
    "bank": itemgetter("way"),
    "workers": of(count, "workers"),
    "requests": of(count, "n"),
    "hit rate": bounded(share, "hit_rate"),
    "exact": _rung("exact"),
    "approximate": _rung("semantic", "student"),
    "fewer than one, points": of(number, "points_lost", 2),
    "changed answers": bounded(share, "changed_answers"),
    "values from Redis": of(count, "n_fetched"),
    "failures": of(count, "n_errors"),
}
REMOTE: Mapping[str, Cell] = {
    "what": lambda row: {
        "local": "hit in memory",
        "remote": "hit in Redis",
        "late": "such a request for which Redis was late: computed",
        "paused": "lookup while Redis is stopped",
        "read": "read of the store alone while Redis is stopped",
        "announced": "until all workers have heard of a request",
    }[row["kind"]],
    "p50, ms": of(number, "p50_ms", 2),
    "p99": of(number, "p99_ms", 2),
    "p99.9": of(number, "p999_ms", 2),
    "most": of(number, "max_ms", 2),
    "n": of(count, "n"),
}
FAULTS: Mapping[str, Cell] = {
    "fault": itemgetter("kind"),
    **{name: of(count, name) for name in ("n", "requests", "hits", "purges")},
    "wrong answers": of(count, "wrong"),
    "served after a purge": of(count, "stale"),
    "crashes": of(count, "crashed"),
}
store_faults = _shown(
    FAULTS, "Requests during a fault and after it, of two caches that share the Redis, and namespaces purged."
)
store_workers = _shown(WORKERS, "One calibration for all ways; its sources grow. Changed: not the model's own answers.")
store_remote = _shown(
    REMOTE,
    "Whole calls, but for lookups: these end before the layers. Hits in turn, on equal requests; one for which Redis "
    "was late is computed, and has a row of its own.",
)
