"""Write the tables and pictures of the pages from files of results: `python -m experiments.report.pages`."""

from pathlib import Path

from experiments.report.pages import PAGES, draw, fill
from experiments.report.pages.files import figures_of, is_timed
from experiments.report.pictures import plot_ways
from experiments.support.files import write_whole

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"

if __name__ == "__main__":
    for page, root in PAGES.items():
        write_whole(ROOT / page, fill((ROOT / page).read_text(encoding="utf-8"), RESULTS, root))
    draw(RESULTS, ROOT / "docs" / "results")
    if is_timed(RESULTS, "demo"):  # else the picture stays: a new one would show times from a busy machine
        plot_ways(figures_of(RESULTS, "demo"), ROOT / "docs" / "demo.png")
