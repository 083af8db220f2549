"""Console output: tables fit and break no number; without a terminal, progress is printed in lines."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.support import progress
from experiments.support.progress import tracked
from llmcache.cli.table import cell, show_table
from tests.fixtures import Patch, Shown


@pytest.mark.parametrize("room", [40, 80, 200])
def test_a_table_shows_every_number_whole(room: int, monkeypatch: Patch, capsys: Shown) -> None:
    monkeypatch.setenv("COLUMNS", str(room))
    numbers = {f"figure_{i}_ms": 1234.5 + i for i in range(12)}
    rows: list[dict[str, Any]] = [{"name": f"minilm-banking77-row-{i}", **numbers, "none": None} for i in range(3)]
    show_table("title", rows)
    shown = capsys.readouterr().out
    assert all(shown.split().count(cell(number)) >= 3 for number in numbers.values())
    assert shown.startswith("title\n")
    if room == 200:  # wide enough: nothing is folded
        assert max(map(len, shown.splitlines())) <= room and "minilm-banking77-row-2" in shown.split()


def test_a_column_has_one_number_of_decimals_and_a_heading_few_lines(capsys: Shown) -> None:
    rows = [{"way": way, "share_of_changed_answers_median": share} for way, share in (("a", 0.0061), ("b", 0.07))]
    show_table("title", rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[-2:]] == ["0.0061", "0.0700"]
    assert len(lines[1:-3]) == 2
    show_table("title", [{"figure": "a", "value": 0.0061}, {"figure": "b", "value": 120.5}])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[-2:]] == ["0.0061", "120.5"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (1, "1"),
        (1_234_567, "1,234,567"),
        (0.123456, "0.1235"),
        (0.99996, "0.99996"),  # a threshold below 1
        (1.0, "1"),
        (1.00001, "1"),
        (12345.6, "12,346"),
        (True, "True"),
        (["a", 2], "a, 2"),
    ],
)
def test_cells(value: Any, shown: str) -> None:
    assert cell(value) == shown


@given(st.floats(0, 1, exclude_max=True))
def test_nothing_below_1_is_shown_as_1(value: float) -> None:
    assert float(cell(value)) < 1


def test_without_a_terminal_long_phases_tell_how_far_they_are(monkeypatch: Patch, capsys: Shown) -> None:
    clock = itertools.count()  # each reading adds a second
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    assert list(tracked(range(1000), "Round 1 of 5")) == list(range(1000))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "Round 1 of 5: 9 of 1,000" and len(told) == 100
    monkeypatch.setattr(progress, "monotonic", lambda: 0.0)
    list(tracked(range(1000), "Quick"))
    assert capsys.readouterr().err == ""
