"""Labelled requests: files are joined in order, sampled by seed, and refused with a clear error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.data.labelled import Data, Labelled, read_requests, split
from experiments.data.made import N_LINES, make_choices, make_lines, make_questions
from llmcache.errors import ConfigError

MANY = "text,label\n" + "".join(f"t{i},x\n" for i in range(50))


def rasa(*examples: Any) -> str:
    return json.dumps({"rasa_nlu_data": {"common_examples": examples}})


def data(*path: str, **more: Any) -> Data:
    return Data.make({"path": path, **more})


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())


def test_files_are_joined_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,kind\n"one, more",x\n"two\nlines",y\n', encoding="utf-8-sig")
    lines = [{"q": "three", "kind": 3, "more": None}, {"q": "four", "kind": "y"}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert read_requests(data("a.csv", "b.jsonl", text="q", label="kind"), tmp_path) == [
        Labelled(0, "one, more", "x"),
        Labelled(1, "two\nlines", "y"),
        Labelled(2, "three", "3", part=1),
        Labelled(3, "four", "y", part=1),
    ]


def test_a_limit_is_a_seeded_sample_in_data_order(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": MANY})
    ids = [[x.id for x in read_requests(data("a.csv", limit=10), tmp_path, seed)] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] == sorted(ids[0]) != ids[2]
    assert len(set(ids[0])) == 10 and ids[0] != list(range(10))
    assert len(read_requests(data("a.csv", limit=99), tmp_path)) == 50


def test_made_records_follow_the_seed() -> None:
    for make in (make_questions, make_choices, make_lines):
        assert make(1) == make(1) != make(2)
    assert len(make_lines(0)) == N_LINES
    few = data("support_desk", limit=30)
    assert len(read_requests(few, None)) == 30
    assert read_requests(few, None, seed=1) == read_requests(few, None, seed=1) != read_requests(few, None, seed=2)


KNOWN = {
    "banking77": {
        "banking77/train.csv": 'text,category\n"Lost, my card",lost\n',
        "banking77/test.csv": "text,category\nété,other\n",
    },
    "snips": {
        "snips/train.seq.in": "Lost, my card \n\n",
        "snips/train.label": "lost\n",  # no empty line
        "snips/valid.seq.in": "",
        "snips/valid.label": "",
        "snips/test.seq.in": "été\r\n",
        "snips/test.label": "other",
    },
    "hwu64": {
        "hwu64/train.json": rasa(
            {"text": "Lost, my card", "intent": "lost", "entities": [{"start": 0}]}, {"text": "été", "intent": "other"}
        )
    },
}


@pytest.mark.parametrize(("name", "last"), [("banking77", 1), ("snips", 2), ("hwu64", 0)])
def test_known_sets_by_name(name: str, last: int, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no file .*{name}.*; say where the data is with --data-dir"):
        read_requests(data(name), tmp_path)
    write(tmp_path, KNOWN[name])
    expected = [Labelled(0, "Lost, my card", "lost"), Labelled(1, "été", "other", part=last)]
    assert read_requests(data(name, text="ignored", label="too"), tmp_path) == expected


@pytest.mark.parametrize("name", ["a.csv", "support_desk"])
def test_shuffled_is_seeded_and_keeps_ids(name: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": MANY})

    def read(order: Any, seed: int) -> list[Labelled]:
        return read_requests(Data(path=(name,), order=order, limit=40), tmp_path, seed)

    for seed in (0, 1):
        assert read("shuffled", seed) == read("shuffled", seed) != read("file", seed)
        assert sorted(read("shuffled", seed), key=lambda x: x.id) == read("file", seed)
    assert [x.id for x in read("shuffled", 0)] != [x.id for x in read("shuffled", 1)]


RECORDS = [
    {"text": "a", "label": "x"},
    {"text": "  ", "label": "x"},
    {"text": "b", "label": ""},
    {"text": None, "label": "y"},
    {"text": "c", "label": None},
    {"text": "b", "label": "y"},
]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "a.csv",
            "txt,label,other\na,x,1\n",
            "data.text: .*a.csv, line 2 has no column 'text'; .*'txt', 'label', 'other'",
        ),
        ("a.csv", "text,label\n", "no records, so there is nothing to stream"),
        ("a.csv", "", "no records"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text"', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", r"line 1: expected an object with its columns \(got \[1\]\)"),
        ("a.jsonl", '{"text": ["a"], "label": "x"}\n', "line 1: column 'text' holds no single value"),
        ("a.jsonl", "", "a.jsonl: no records"),
        ("a.csv", "text,label\n" + "a" * 200_000 + ",x\n", r"a.csv: not a CSV file \(field larger"),
        ("a.json", "", "a.json, line 1: not valid JSON"),
        ("a.json", '{"rasa_nlu_data": {}}', "a.json: not a record of this data set .*'common_examples'"),
        ("a.json", "1", "a.json: not a record of this data set"),
        ("a.json", "[1]", r"a.json, example 0: expected an object with its columns \(got 1\)"),
        ("a.csv", 'text,label\na,x\n"to be or,x\nb,y\n', r"a.csv: not a CSV file \(unexpected end of data"),
        ("a.tsv", 'text\tlabel\n"a" b\tx\n', "a.tsv: not a CSV file"),
        ("a.tsv", "text,label\na,x\n", r"a.tsv, line 2 has no column 'text'; columns found: 'text,label'"),
        ("a.json", rasa({"text": "a", "label": "x"}, "b"), "example 1: expected an object with its columns"),
        ("a.json", rasa({"text": "a", "intent": "x"}), "data.label: .*example 0 has no column 'label'"),
        (
            "a.txt",
            "",
            "'a.txt' is of no known kind; give a file ending in .csv or .tsv or .jsonl or .json or .in, a folder",
        ),
    ],
)
def test_bad_files(name: str, content: str, error: str, tmp_path: Path) -> None:
    write(tmp_path, {name: content})
    with pytest.raises(ConfigError, match=error):
        read_requests(data(name), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "first"),
    [
        ("a.csv", 'text,label\na,x\n  ,x\nb, \n"",y\nc\nb,y\n', "line 3"),
        ("a.tsv", "text\tlabel\na\tx\n  \tx\nb\t \n\ty\nc\nb\ty\n", "line 3"),
        ("a.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS), "line 2"),
        ("a.json", json.dumps(RECORDS), "example 1"),
        ("a.json", rasa(*RECORDS), "example 1"),
    ],
)
def test_records_without_text_or_label_are_left_out_and_counted(
    name: str, content: str, first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {name: content})
    assert read_requests(data(name), tmp_path) == [Labelled(0, "a", "x"), Labelled(1, "b", "y")]
    (told,) = caplog.messages
    assert told == f"data: 4 records without text or label are left out; the first is {tmp_path / name}, {first}"


def test_split_is_seeded_disjoint_and_in_order() -> None:
    everything = [Labelled(3 * i, f"t{i}", "x") for i in range(40)]
    fit, stream = split(everything, 0.25, seed=3)
    assert len(fit) == 10
    assert sorted([*fit, *stream], key=lambda x: x.id) == everything
    assert [x.id for x in stream] == sorted(x.id for x in stream)
    assert split(everything, 0.25, 3) == (fit, stream) != split(everything, 0.25, 4)
    # A record's part depends only on its id.
    other = split([Labelled(x.id, "other", "y") for x in reversed(everything)], 0.25, 3)
    assert [[x.id for x in reversed(part)] for part in other] == [[x.id for x in part] for part in (fit, stream)]
