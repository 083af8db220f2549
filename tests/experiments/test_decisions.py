"""Recorded decisions: which records are equal, which differ, and which cannot be compared."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import decisions
from experiments.decisions import main, read, record, write
from experiments.support.files import Folders
from experiments.tasks import make_task

Change = Callable[[dict[str, Any]], None]


def made() -> dict[str, Any]:
    """Return a record of four requests; the third risk equals the limit up to rounding."""
    one = {"max_drop": 0.01, "sources": "frozen", "limit": 0.2}
    return {
        "stream": "some",
        "git": "abc",
        "cpu": "this one",
        "versions": {"torch": "2"},
        "seed": 0,
        "learn": 10,
        "n": 4,
        "outputs": "0a",
        "decided": [
            one | {"served": "s-sE", "risks": [1_000_000, 3_000_000, 2_000_009, None]},
            one | {"sources": "growing", "served": "s-s-", "risks": [1_000_000, 3_000_000, 2_000_009, 2_500_000]},
        ],
    }


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Change], tuple[int, str]]:
    """`compared(change)`: compare with a changed record; return exit status and output."""

    def run(change: Change) -> tuple[int, str]:
        new = copy.deepcopy(made())
        change(new)
        write(made(), tmp_path / "old")
        write(new, tmp_path / "new")
        status = main(["compare", str(tmp_path / "old"), str(tmp_path / "new")])
        return status, "".join(capsys.readouterr())

    return run


def changing(place: int, **changes: Any) -> Change:
    """Return a change of one calibration's fields."""
    return lambda new: new["decided"][place].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda new: None,
        lambda new: new.update(git="def", started="later"),
        changing(0, limit=0.2 + 9e-7),
        changing(0, risks=[1_000_500, 3_000_000, 2_000_009, None]),
        changing(0, served="s--E"),  # its risk is at the limit
        changing(1, served="s--s"),  # growing sources may differ after that
    ],
)
def test_the_same_decisions(change: Change, compared: Callable[[Change], tuple[int, str]]) -> None:
    status, told = compared(change)
    assert status == 0 and told.count(": equal\n") == 2 and "DIFFERENT" not in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (changing(0, limit=0.2 + 2e-6), "some 0.01 frozen: limit 0.2000000, 0.2000020; hits 3, 3, 0 differ"),
        (changing(0, served="--sE"), "hits 3, 2, 1 differ, 1 of them far"),
        (changing(0, served="s-se"), "hits 3, 3, 1 differ, 1 of them far"),  # another answer
        (changing(0, served="s---"), "hits 3, 1, 2 differ, 1 of them far"),  # an exact repeat has no risk
        (changing(1, served="sss-"), "some 0.01 growing: limit 0.2000000, 0.2000000; hits 2, 3, 1 differ, 1 of"),
        (changing(1, served="s-ss"), "hits 2, 3, 1 differ, 1 of them far"),
    ],
)
def test_other_decisions(change: Change, told: str, compared: Callable[[Change], tuple[int, str]]) -> None:
    status, text = compared(change)
    assert status == 1 and told in text and text.count(": DIFFERENT\n") == 1 and text.count(": equal\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda new: new.update(cpu="another one"),
        lambda new: new.update(versions={"torch": "3"}),
        lambda new: new.update(outputs="0b"),
    ],
)
def test_on_another_processor_it_says_how_to_record_the_old_commit(
    change: Change, compared: Callable[[Change], tuple[int, str]]
) -> None:
    status, told = compared(change)
    assert status == 2 and "another processor or with other versions (this one, torch 2)" in told
    assert "git worktree add build/old abc\n" in told and "-m experiments.decisions record" in told


@pytest.mark.parametrize("name", ["n", "seed", "learn"])
def test_records_of_other_requests_are_refused(name: str, compared: Callable[[Change], tuple[int, str]]) -> None:
    status, told = compared(lambda new: new.update({name: 7}))
    assert status == 2 and f"some: {name} is {made()[name]} in one record and 7 in the other" in told


def test_what_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(made(), tmp_path / "old")
    write(made() | {"stream": "other"}, tmp_path / "new")
    for words, told in (
        (["compare", tmp_path / "old", tmp_path / "new"], "not recorded anew: some"),
        (["compare", tmp_path / "none", tmp_path / "new"], "none: no records of decisions"),
        (["record", "nothing"], "nothing: no such stream; known: banking77, hwu64, snips"),
    ):
        assert main([*map(str, words)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_stream_is_recorded_alike_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ({"max_drop": 0.2, "sources": "frozen"}, {"max_drop": 0.2, "sources": "growing"})
    monkeypatch.setattr(decisions, "CALIBRATIONS", asked)
    data = {"path": "support_desk", "limit": 500}
    settings = make_task({"name": "held_out", "model": "untrained", "limit": 220, "data": data})
    for name in ("one", "other"):
        write(record("support_desk", settings, Folders(), learn=150), tmp_path / name)
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    for one in read(tmp_path / "one")["support_desk"]["decided"]:
        assert len(one["served"]) == len(one["risks"]) == 70 and {"-", "s"} <= set(one["served"].lower())
        served = [by.lower() == "s" for by in one["served"]]
        assert served == [risk is not None and risk * 1e-7 <= one["limit"] for risk in one["risks"]]


def test_the_committed_records_are_whole() -> None:
    records = read(Path(__file__).parents[2] / decisions.FOLDER)
    assert set(records) == set(decisions.STREAMS)
    for name, one in records.items():
        assert not one["git_dirty"] and one["learn"] == decisions.LEARN and one["stream"] == name
        assert [(made["max_drop"], made["sources"]) for made in one["decided"]] == [
            (asked["max_drop"], asked["sources"]) for asked in decisions.CALIBRATIONS
        ]
        assert all(len(made["served"]) == len(made["risks"]) == one["n"] for made in one["decided"])
