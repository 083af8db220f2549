"""Recorded decisions: which records are equal, which differ, and which cannot be compared."""

import copy
from pathlib import Path
from typing import Any

import pytest

from experiments import decisions
from experiments.decisions import main, read, record, write
from experiments.support.files import Folders
from experiments.tasks import make_task

ONE = {"max_drop": 0.01, "sources": "frozen", "limit": 0.2}
RISKS = [1_000_000, 3_000_000, 2_000_009]  # the third is at the limit, up to rounding
GROWING = ONE | {"sources": "growing", "served": "s-s-", "risks": [*RISKS, 2_500_000]}
RECORD: dict[str, Any] = {
    "stream": "some",
    "git": "abc",
    "cpu": "this one",
    "versions": {"torch": "2"},
    "outputs": "0a",
    "seed": 0,
    "learn": 10,
    "n": 4,
    "decided": [ONE | {"served": "s-sE", "risks": [*RISKS, None]}, GROWING],
}
EQUAL = "0 of them far from the limit"


@pytest.mark.parametrize(
    ("place", "changes", "status", "told"),
    [
        (None, {"git": "def", "started": "later"}, 0, "hits 3, 3, 0 differ"),
        (0, {"limit": 0.2 + 9e-7}, 0, "hits 3, 3, 0 differ"),
        (0, {"risks": [1_000_500, *RISKS[1:], None]}, 0, "risks differ by up to 5.0e-05"),
        (0, {"served": "s--E"}, 0, f"1 differ, {EQUAL}"),  # its risk is at the limit
        (1, {"served": "s--s"}, 0, f"2 differ, {EQUAL}"),  # growing sources may differ after that
        (0, {"limit": 0.2 + 2e-6}, 1, "some 0.01 frozen: limit 0.2000000, 0.2000020; hits 3, 3, 0 differ"),
        (0, {"served": "--sE"}, 1, "hits 3, 2, 1 differ, 1 of them far"),
        (0, {"served": "s-se"}, 1, "hits 3, 3, 1 differ, 1 of them far"),  # another answer
        (0, {"served": "s---"}, 1, "hits 3, 1, 2 differ, 1 of them far"),  # an exact repeat has no risk
        (1, {"served": "s-ss"}, 1, "some 0.01 growing: limit 0.2000000, 0.2000000; hits 2, 3, 1 differ, 1 of them far"),
        (None, {"cpu": "another one"}, 2, "another processor or with other versions (this one, torch 2)"),
        (None, {"versions": {"torch": "3"}}, 2, "another processor or with other versions (this one, torch 2)"),
        (None, {"outputs": "0b"}, 2, "git worktree add build/old abc\n"),
        (None, {"n": 7}, 2, "some: n is 4 in one record and 7 in the other"),
        (None, {"stream": "other"}, 2, "not recorded anew: some"),
    ],
)
def test_records_are_compared(
    place: int | None, changes: Any, status: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = copy.deepcopy(RECORD)
    (new if place is None else new["decided"][place]).update(changes)
    write(RECORD, tmp_path / "old")
    write(new, tmp_path / "new")
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == status
    text = "".join(capsys.readouterr())
    assert told in text and (text.count(": equal\n"), text.count(": DIFFERENT\n")) == [(2, 0), (1, 1), (0, 0)][status]


def test_a_stream_is_recorded_and_the_committed_records_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrations = decisions.CALIBRATIONS
    monkeypatch.setattr(decisions, "CALIBRATIONS", ({"max_drop": 0.2, "sources": "growing"},))
    data = {"path": "support_desk", "limit": 500}
    settings = make_task({"name": "held_out", "model": "untrained", "limit": 200, "data": data})
    write(record("support_desk", settings, Folders(), learn=150), tmp_path)
    (one,) = read(tmp_path)["support_desk"]["decided"]
    assert len(one["served"]) == len(one["risks"]) == 50 and {"-", "s"} <= set(one["served"].lower())
    served = [by.lower() == "s" for by in one["served"]]
    assert served == [risk is not None and risk * 1e-7 <= one["limit"] for risk in one["risks"]]
    records = read(Path(__file__).parents[2] / decisions.FOLDER)
    assert set(records) == set(decisions.STREAMS)
    for name, whole in records.items():
        assert not whole["git_dirty"] and whole["learn"] == decisions.LEARN and whole["stream"] == name
        assert [{key: made[key] for key in ("max_drop", "sources")} for made in whole["decided"]] == [*calibrations]
        assert all(len(made["served"]) == len(made["risks"]) == whole["n"] for made in whole["decided"])
    assert main(["compare", str(tmp_path / "none"), str(tmp_path)]) == 2 == main(["record", "nothing"])
    text = capsys.readouterr().err
    assert "none: no records of decisions" in text and "nothing: no such stream; known: banking77, hwu64" in text
