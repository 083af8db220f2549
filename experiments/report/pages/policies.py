"""Table of eviction policies."""

from pathlib import Path

from experiments.report import eviction
from experiments.report.pages.files import runs_of


def policies(results_dir: Path) -> str:
    """What each finds of streams of keys, beside the most that any could."""
    runs = runs_of(results_dir, "policies")
    return "\n".join(eviction.policies(runs))
