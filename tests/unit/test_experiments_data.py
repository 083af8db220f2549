"""Labelled requests: files joined in order, sampled with a seed, and refused in one clear line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.labelled import Data, Labelled, read_requests
from experiments.data.made import N_CHOICES, N_LINES, N_PASSAGES, make_choices, make_lines, make_questions
from experiments.streams.support_desk import support_desk
from experiments.tasks.split import split
from llmcache.errors import ConfigError


def data(*path: str, **more: Any) -> Data:
    return Data.make({"path": path, **more})


def test_files_are_joined_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,kind\n"one, more",x\n"two\nlines",y\n', encoding="utf-8-sig")
    lines = [{"q": "three", "kind": 3, "more": None}, {"q": "", "kind": "y"}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert read_requests(data("a.csv", "b.jsonl", text="q", label="kind"), tmp_path) == [
        Labelled(0, "one, more", "x"),
        Labelled(1, "two\nlines", "y"),
        Labelled(2, "three", "3"),
        Labelled(3, "", "y"),
    ]


def test_a_limit_is_a_seeded_sample_in_data_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t{i},x\n" for i in range(50)), encoding="utf-8")
    ids = [[x.id for x in read_requests(data("a.csv", limit=10), tmp_path, seed)] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] == sorted(ids[0]) != ids[2]
    assert len(set(ids[0])) == 10 and ids[0] != list(range(10))
    assert len(read_requests(data("a.csv", limit=99), tmp_path)) == 50


def test_a_made_stream_needs_no_file() -> None:
    few = data("support_desk", limit=30)
    assert len(read_requests(few, None)) == 30
    assert read_requests(few, None, seed=1) == read_requests(few, None, seed=1) != read_requests(few, None, seed=2)


@given(seed=st.integers(0, 10_000))
def test_made_answers_stand_where_they_say(seed: int) -> None:
    questions = make_questions(seed)
    for question in questions:
        assert all(question.context[start:].startswith(text) for text, start in question.answers)
    absent = [question for question in questions if not question.answers]
    assert N_PASSAGES <= len(absent) <= 2 * N_PASSAGES  # one fact a passage, which may be the one asked twice
    assert len({question.id for question in questions}) == len(questions)


def test_made_choices_hold_the_right_one_once() -> None:
    labels = [request.label.replace("_", " ") for request in support_desk(N_CHOICES, 3)]
    questions = make_choices(3)
    assert [question.choices[question.right] for question in questions] == labels
    assert {len(set(question.choices)) for question in questions} == {4}
    assert len({question.right for question in questions}) == 4
    assert len({question.stem for question in questions}) == len({(q.stem, q.choices) for q in questions}) < N_CHOICES


def test_made_records_follow_the_seed() -> None:
    for make in (make_questions, make_choices, make_lines):
        assert make(1) == make(1) != make(2)
    assert len(make_lines(0)) == N_LINES


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "a.csv",
            "txt,label,other\nhello,x,1\n",
            "data.text: .*a.csv, line 2 has no column 'text'; .*txt, label, other",
        ),
        ("a.csv", "text,label\nhello\n", r"data.label: .*line 2: column 'label' holds no single value \(got None\)"),
        ("a.csv", "text,label\n", "no records, so there is nothing to stream"),
        ("a.csv", "", "no records"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text"', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected one JSON object a line"),
        ("a.jsonl", '{"text": ["a"], "label": "x"}\n', "line 1: column 'text' holds no single value"),
        (
            "a.txt",
            "hello",
            "'a.txt' is of no known kind; give a file ending in .csv or .jsonl or .json or .in, or a name",
        ),
    ],
)
def test_bad_files(name: str, content: str, error: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=error):
        read_requests(data(name), tmp_path)


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xff\xfe,x\n")
    with pytest.raises(ConfigError, match=r"a\.csv: not UTF-8"):
        read_requests(data("a.csv"), tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*none.csv; say where the data is with --data-dir"):
        read_requests(data("none.csv"), tmp_path)


def test_split_is_seeded_disjoint_and_in_order() -> None:
    everything = [Labelled(i, f"t{i}", "x") for i in range(40)]
    fit, stream = split(everything, 0.25, seed=3)
    assert len(fit) == 10
    assert sorted([*fit, *stream], key=lambda x: x.id) == everything
    assert [x.id for x in stream] == sorted(x.id for x in stream)
    assert split(everything, 0.25, 3) == (fit, stream) != split(everything, 0.25, 4)


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_split_leaves_something_on_both_sides(share: float) -> None:
    with pytest.raises(ConfigError, match=r"head.fit_share: .* of 10 records leaves nothing"):
        split([Labelled(i, "t", "x") for i in range(10)], share, 0)
