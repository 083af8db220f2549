"""Table of what misleads calibrated reuse: requests that are edited to mean something else."""

from pathlib import Path

from experiments.report.markdown import table
from experiments.report.pages.files import by_task, each, row_of, runs_of

ASKED = 0.02  # of the experiment
_ROWS = {
    "requests [edited to mislead](configs/trust_adversaries.yaml): another answer": ("off", "with another answer"),
    "the same with the content gate": ("on", "with another answer"),
    "hits of the stream without the gate": ("off", "hit rate"),
    "with it": ("on", "hit rate"),
}


def limits(results_dir: Path) -> str:
    """How many edited requests get another answer, and what the content gate costs, by stream."""
    found = by_task(runs_of(results_dir, "trust_adversaries"))
    wanted = {"edit": "all", "asked: changed": ASKED}
    rows = [
        (
            told,
            *(each([row_of(r.metrics["summary"], gate=gate, **wanted)[name] for r in runs]) for runs in found.values()),
        )
        for told, (gate, name) in _ROWS.items()
    ]
    return table(("target 2 %", *found), rows)
