"""README.md and docs/results/: table figures equal those in the files of `results/`."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.report.markdown import MISSING, each
from experiments.report.pages import MARK, PAGES, TABLES, fill, lines_of
from experiments.report.pages.files import is_timed
from llmcache.errors import ConfigError

ROOT = Path(__file__).parents[1]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
RESULTS = ROOT / "results"


def figures_without_a_file(text: str) -> Iterator[str]:
    """Yield lines of unmarked tables that have a digit outside code and link targets."""
    for line in MARK.sub("", text).splitlines():
        if line.startswith("|") and re.search(r"\d", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
            yield line


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_files_of_results_say(name: str) -> None:
    """To renew the tables after a measurement: python -m experiments.report.pages"""
    ((page, lines),) = [(page, found[2]) for page in PAGES for found in MARK.finditer(TEXTS[page]) if found[1] == name]
    assert lines.rstrip("\n") == lines_of(name, RESULTS, PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_every_table_with_figures_has_a_mark(page: str) -> None:
    assert list(figures_without_a_file(TEXTS[page])) == []


def test_the_first_screen_is_short() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 100 and text.index("<!-- table: jobs -->") < 800
    assert [found[1] for found in MARK.finditer(text)] == ["jobs", "first_screen"]


def test_the_time_to_the_first_hit_is_measured() -> None:
    (total,) = re.findall(r"\[(\d+) s\]\(docs/results/speed.md#from-a-clone", TEXTS["README.md"])
    (path,) = (RESULTS / "first_hit").glob("*/metrics.json")
    rows = {row["command"]: row["seconds"] for row in json.loads(path.read_text())["summary"]}
    assert round(rows["all"]) == int(total) and rows["first hit"] < 0.2 * rows["all"]


def test_a_figure_that_differs_or_has_no_file_is_seen() -> None:
    table = "| a | hits |\n|---|---|\n| tau `0.9` | 5.5 % |\n"
    assert list(figures_without_a_file(f"text\n\n{table}\n")) == ["| tau `0.9` | 5.5 % |"]
    assert list(figures_without_a_file("| a [b](c/d9.yaml) | `wrap(tau=0.9)` |\n")) == []
    stale = f"before\n\n<!-- table: bound -->\n{table}\nafter\n"
    assert list(figures_without_a_file(stale)) == []
    renewed = fill(stale, RESULTS)
    assert renewed == f"before\n\n<!-- table: bound -->\n{TABLES['bound'](RESULTS)}\n\nafter\n" != stale
    assert fill(renewed, RESULTS) == renewed
    with pytest.raises(ConfigError, match="no table 'bond'; known: first_screen, jobs, advice"):
        fill("<!-- table: bond -->\n", RESULTS)


def test_links_of_a_page_reach_the_root() -> None:
    lines = lines_of("parity", RESULTS, "../../")
    assert "](../../configs/prefix_parity.yaml)" in lines and "](configs/" not in lines


@pytest.mark.parametrize(
    ("name", "told"),
    [("bound", "llmcache run configs/trust_bound.yaml"), ("demo", "llmcache demo --results-dir results")],
)
def test_what_is_not_measured_is_told_with_its_command(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        TABLES[name](tmp_path / "results")


def test_times_of_a_busy_machine_are_not_shown(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "demo", tmp_path / "demo")
    path = tmp_path / "demo" / "env.json"
    env = json.loads(path.read_text())
    for load in (env["n_cpus"], env["n_cpus"] + 2):
        path.write_text(json.dumps(env | {"load_average": load}))
        is_idle = load == env["n_cpus"]
        assert is_timed(tmp_path, "demo") == is_idle
        assert (MISSING in TABLES["demo"](tmp_path)) != is_idle


def test_a_cell_has_the_figure_of_every_seed() -> None:
    assert each([0.5471, None, 0.5]) == "54.7 / - / 50.0 %"
    assert each([-0.00001, -0.0004], 2, unit="") == "0.00 / -0.04"
    assert each([None, None]) == ""
