"""Table of eviction policies: hits of each, beside the most that any policy can get."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.measures.policies import BEST
from experiments.report.markdown import percent, table
from experiments.report.pages.files import runs_of
from experiments.runs.read import Run

SHARES = {"hit_rate": "hits", "tokens_saved": "tokens saved"}


def policies(results_dir: Path) -> str:
    """Return the table of every stream and size; with a third of a Zipf stream's keys held, policies hardly differ."""
    runs = runs_of(results_dir, "policies")
    names = list(dict.fromkeys(row["policy"] for run in runs for row in run.metrics["summary"]))
    names = [*(name for name in names if name != BEST), BEST]
    lines = [line for run in runs for line in _lines(run, names)]
    return table(("[keys](configs/policies.yaml)", "cache holds", "share of", *names), lines)


def _lines(run: Run, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield two rows per size if costs differ, else one. The optimum is known only for uniform entries."""
    rows = run.metrics["summary"]
    differ = any(row["hit_rate"] != row["tokens_saved"] for row in rows)
    for share in dict.fromkeys(row["share"] for row in rows):
        if share >= 0.3 and run.config["stream"]["name"] != "mooncake":
            continue
        by_name = {row["policy"]: row for row in rows if row["share"] == share}
        for key in SHARES if differ else ("hit_rate",):
            cells = (percent(by_name[name][key]) if name in by_name else "" for name in names)
            yield run.task, percent(share, 0), SHARES[key], *cells
