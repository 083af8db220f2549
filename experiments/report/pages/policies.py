"""Table of eviction policies."""

from pathlib import Path

from experiments.report.eviction import found_by
from experiments.report.pages.files import runs_of
from experiments.runs.read import Run


def policies(results_dir: Path) -> str:
    """What each finds of streams of keys, beside the most that any could."""
    return found_by(runs_of(results_dir, "policies"), "[keys](configs/policies.yaml)", _tells_apart)


def _tells_apart(run: Run, share: float) -> bool:
    """Whether policies differ at a size: where a third of a Zipf stream's keys fit, they hardly do."""
    return share < 0.3 or run.config["stream"]["name"] == "mooncake"
