"""The table of policies: what each finds, beside the most that any could."""

from collections.abc import Callable, Iterator, Sequence

from experiments.measures.policies import BEST
from experiments.report.markdown import percent, table
from experiments.runs.read import Run

SHARES = {"hit_rate": "hits", "tokens_saved": "tokens saved"}


def policies(runs: Sequence[Run]) -> Iterator[str]:
    """What each policy finds of each stream, at each size."""
    yield found_by(runs, "keys")


def found_by(runs: Sequence[Run], heading: str, shows: Callable[[Run, float], bool] = lambda run, share: True) -> str:
    """The table, its first column under a heading; of all sizes, or of some."""
    names = list(dict.fromkeys(row["policy"] for run in runs for row in run.metrics["summary"]))
    names = [*(name for name in names if name != BEST), BEST]
    lines = [line for run in runs for line in _lines(run, names, shows)]
    return table((heading, "cache holds", "share of", *names), lines)


def _lines(run: Run, names: Sequence[str], shows: Callable[[Run, float], bool]) -> Iterator[tuple[str, ...]]:
    """Two lines a size where costs differ, else one. The best is known where all entries are alike."""
    rows = run.metrics["summary"]
    differ = any(row["hit_rate"] != row["tokens_saved"] for row in rows)
    for share in dict.fromkeys(row["share"] for row in rows):
        if not shows(run, share):
            continue
        by_name = {row["policy"]: row for row in rows if row["share"] == share}
        for key in SHARES if differ else ("hit_rate",):
            cells = (percent(by_name[name][key]) if name in by_name else "" for name in names)
            yield run.task, percent(share, 0), SHARES[key], *cells
