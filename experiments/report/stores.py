"""Tables of a store that workers share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter

from experiments.report.markdown import Cell, columns, count, of
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
