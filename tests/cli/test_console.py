"""What the console shows: tables that fit and break no number, and progress where there is no terminal."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.support import progress
from experiments.support.progress import tracked
from llmcache.cli.table import cell, show_table


@pytest.fixture(params=[40, 80, 200])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def test_a_table_fits_and_shows_every_number(room: int, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {f"figure_{i}_ms": 1234.5 + i for i in range(12)}
    rows: list[dict[str, Any]] = [{"name": f"minilm-banking77-row-{i}", **numbers} for i in range(3)]
    show_table("title", rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= room
    words = " ".join(lines).split()
    assert all(words.count(cell(number)) >= 3 for number in numbers.values())
    tables = [line for line in lines if line.startswith("---")]
    assert (len(tables) == 1) == (room == 200)
    if room == 200:  # with room for all nothing is folded
        assert "minilm-banking77-row-2" in words


def test_names_come_again_in_each_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    show_table(
        "title", [{"model": "bert", "kept": "all", "first": 1234567, "second": 7654321, "third": None}], n_names=2
    )
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "",
        "model kept     first",
        "----- ---- ---------",
        "bert  all  1,234,567",
        "",
        "model kept    second",
        "----- ---- ---------",
        "bert  all  7,654,321",
        "",
        "model kept third",
        "----- ---- -----",
        "bert  all",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (1, "1"),
        (1_234_567, "1,234,567"),
        (0.123456, "0.1235"),
        (0.99996, "0.99996"),  # a threshold that is not 1
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


def test_without_a_terminal_long_phases_tell_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count()  # a second passes with each look
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    assert list(tracked(range(1000), 1000, "Round 1 of 5")) == list(range(1000))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "Round 1 of 5: 9 of 1,000" and len(told) == 100
    monkeypatch.setattr(progress, "monotonic", lambda: 0.0)
    list(tracked(range(1000), 1000, "Quick"))
    assert capsys.readouterr().err == ""
