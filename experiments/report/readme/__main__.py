"""Write the tables of README.md and docs/demo.png from files of results: `python -m experiments.report.readme`."""

from pathlib import Path

from experiments.report.plots import plot_speed_against_changes
from experiments.report.readme import fill
from experiments.report.readme.files import figures_of, is_timed
from experiments.support.files import write_whole

ROOT = Path(__file__).parents[3]
README, RESULTS = ROOT / "README.md", ROOT / "results"

if __name__ == "__main__":
    write_whole(README, fill(README.read_text(encoding="utf-8"), RESULTS))
    if is_timed(RESULTS, "demo"):  # else the picture stays: it would show times of a busy machine
        plot_speed_against_changes(figures_of(RESULTS, "demo"), ROOT / "docs" / "demo.png")
