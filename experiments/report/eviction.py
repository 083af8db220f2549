"""The table of policies: what each finds, beside the most that any could."""

from collections.abc import Iterator, Sequence

from experiments.measures.policies import BEST
from experiments.report.markdown import percent, table
from experiments.runs.read import Figures, Run

COUNTED = {"hit_rate": "hits", "tokens_saved": "tokens saved"}


def policies(runs: Sequence[Run]) -> Iterator[str]:
    """What each policy finds of each stream, at each size."""
    names = list(dict.fromkeys(row["policy"] for run in runs for row in run.metrics["summary"] if _is_policy(row)))
    yield table(
        ("keys", "cache holds", "share of", *names, BEST),
        [line for run in runs for line in lines_of(run, names)],
    )


def lines_of(run: Run, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Two lines a size where costs differ, else one. A bound is known where all entries are alike."""
    rows = run.metrics["summary"]
    differ = any(row["hit_rate"] != row["tokens_saved"] for row in rows)
    for share in dict.fromkeys(row["share"] for row in rows):
        by_name = {row["policy"]: row for row in rows if row["share"] == share}
        for key in COUNTED if differ else ("hit_rate",):
            cells = (percent(by_name[name][key]) if name in by_name else "" for name in (*names, BEST))
            yield run.task, percent(share, 0), COUNTED[key], *cells


def _is_policy(row: Figures) -> bool:
    return bool(row["policy"] != BEST)
