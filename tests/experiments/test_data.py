"""Data: files and the hub give the same records; samples follow their seed; what cannot be read is one clear line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.data.labelled import Data, Labelled, read_requests, split
from experiments.data.made import make_choices, make_lines, make_questions
from experiments.data.published import Choice, Question, read_openbookqa, read_squad, read_wikitext
from llmcache.errors import ConfigError
from llmcache.models import loading

MANY = "text,label\n" + "".join(f"t{i},x\n" for i in range(50))


def rasa(*examples: Any) -> str:
    return json.dumps({"rasa_nlu_data": {"common_examples": examples}})


def read(folder: Path, *path: str, seed: int = 0, **more: Any) -> list[Labelled]:
    return read_requests(Data.make({"path": path, **more}), folder, seed)


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def test_files_are_joined_in_order_without_blank_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"q": "three", "kind": 3, "more": None}, {"q": "four", "kind": "y"}]
    csv = '\ufeffq,kind\n"one, more",x\n  ,x\nb, \n"two\nlines",y\n'
    write(tmp_path, {"a.csv": csv, "b.jsonl": "\n\n".join(json.dumps(line) for line in lines)})
    found = [
        (one.id, one.text, one.label, one.part) for one in read(tmp_path, "a.csv", "b.jsonl", text="q", label="kind")
    ]
    assert found == [(0, "one, more", "x", 0), (1, "two\nlines", "y", 0), (2, "three", "3", 1), (3, "four", "y", 1)]
    told = "data: 2 records without text or label are left out; the first is"
    assert caplog.messages == [f"{told} {tmp_path / 'a.csv'}, line 3"]


def test_samples_orders_and_parts_follow_the_seed(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": MANY})
    sample, shuffled = ({"limit": 10}, {"order": "shuffled", "limit": 40})
    for name in ("a.csv", "support_desk"):
        mixed = [read(tmp_path, name, seed=seed, **shuffled) for seed in (0, 0, 1)]
        assert mixed[0] == mixed[1] != mixed[2] and [one.id for one in mixed[0]] != [one.id for one in mixed[2]]
        assert sorted(mixed[0], key=lambda one: one.id) == read(tmp_path, name, limit=40) != mixed[0]
    ids = [[one.id for one in read(tmp_path, "a.csv", seed=seed, **sample)] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] == sorted(set(ids[0])) != ids[2] and len(ids[0]) == 10 and ids[0] != list(range(10))
    assert all(make(1) == make(1) != make(2) for make in (make_questions, make_choices, make_lines))
    everything = [Labelled(3 * i, f"t{i}", "x") for i in range(40)]
    fit, stream = split(everything, 0.25, seed=3)
    assert len(fit) == 10 and sorted([*fit, *stream], key=lambda one: one.id) == everything
    again = split([Labelled(one.id, "other", "y") for one in reversed(everything)], 0.25, 3)  # by the id alone
    assert [[one.id for one in reversed(part)] for part in again] == [
        [one.id for one in part] for part in (fit, stream)
    ]
    assert split(everything, 0.25, 4) != (fit, stream)


LOST, OTHER = {"text": "Lost, my card", "intent": "lost"}, {"text": "été", "intent": "other"}
BANKING = {"train.csv": 'text,category\n"Lost, my card",lost\n', "test.csv": "text,category\nété,other\n"}
SNIPS = {
    "train.seq.in": "Lost, my card \n\n",
    "train.label": "lost\n",  # no empty line
    **dict.fromkeys(("valid.seq.in", "valid.label"), ""),
    "test.seq.in": "été\r\n",
    "test.label": "other",
}


@pytest.mark.parametrize(
    ("name", "files", "last"),
    [("banking77", BANKING, 1), ("snips", SNIPS, 2), ("hwu64", {"train.json": rasa(LOST, OTHER)}, 0)],
)
def test_known_sets_by_name(name: str, files: Mapping[str, str], last: int, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no file .*{name}.*; say where the data is with --data-dir"):
        read(tmp_path, name)
    write(tmp_path, {f"{name}/{file}": text for file, text in files.items()})
    expected = [Labelled(0, "Lost, my card", "lost"), Labelled(1, "été", "other", part=last)]
    assert read(tmp_path, name, text="ignored", label="too") == expected


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", "txt,label\na,x\n", "data.text: .*a.csv, line 2 has no column 'text'; .*'txt', 'label'"),
        ("a.csv", "text,label\n", "no records, so there is nothing to stream"),
        ("a.tsv", "text,label\na,x\n", r"a.tsv, line 2 has no column 'text'; columns found: 'text,label'"),
        ("a.jsonl", "[1]\n", r"line 1: expected an object with its columns \(got \[1\]\)"),
        ("a.csv", 'text,label\na,x\n"to be or,x\nb,y\n', r"a.csv: not a CSV file \(unexpected end of data"),
        ("a.csv", "été".encode("latin-1"), r"a.csv: not UTF-8 text \("),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text"', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", '{"text": ["a"], "label": "x"}\n', "line 1: column 'text' holds no single value"),
        ("a.json", '{"rasa_nlu_data": {}}', "a.json: not a record of this data set .*'common_examples'"),
        (
            "a.txt",
            "",
            "'a.txt' is of no known kind; give a file ending in .csv or .tsv or .jsonl or .json or .in, a folder",
        ),
    ],
)
def test_bad_files(name: str, content: str | bytes, error: str, tmp_path: Path) -> None:
    write(tmp_path, {name: content})
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, name)


ZOE = "Zoë  moved to São Paulo 🙂 in 1999."
ASKED = {"id": "a", "question": "Where to?"}
PARAGRAPH = {"context": ZOE, "qas": [ASKED | {"answers": [{"text": "São Paulo", "answer_start": 14}]}]}
SQUAD_ROW = ASKED | {"title": "Zoë", "context": ZOE, "answers": {"text": ["São Paulo"], "answer_start": [14]}}
ICE = {"label": [*"ABCD"], "text": ["hot", "solid water", "a gas", "Stein"]}
ICE_LINE = {"stem": "Ice is", "choices": [dict(zip(ICE, one, strict=True)) for one in zip(*ICE.values(), strict=True)]}
ICE_ROW = {"id": "7", "question_stem": "Ice is", "choices": ICE, "answerKey": "B"}
LINES = ["= Title =", "First line of it .", "Second <unk> line , été ."]
#: By set: its reader, a split with its name on the hub and its file, the file's text, its rows, a bad row, the records.
SETS: dict[str, Any] = {
    "rajpurkar/squad_v2": (
        read_squad,
        ("validation", None, "squad_v2/eval.json"),
        json.dumps({"data": [{"title": "Zoë", "paragraphs": [PARAGRAPH]}]}),
        [SQUAD_ROW],
        SQUAD_ROW | {"answers": {"text": ["a"], "answer_start": []}},
        [Question("a", "Zoë", "Where to?", ZOE, (("São Paulo", 14),))],
    ),
    "allenai/openbookqa": (
        read_openbookqa,
        ("validation", "main", "openbookqa/dev.jsonl"),
        json.dumps({"id": "7", "question": ICE_LINE, "answerKey": "B"}),
        [ICE_ROW],
        ICE_ROW | {"answerKey": "E"},
        [Choice("7", "Ice is", tuple(ICE["text"]), 1)],
    ),
    "Salesforce/wikitext": (
        read_wikitext,
        ("train", "wikitext-2-v1", "wikitext/wikitext-2_train.tokens.txt"),
        " \n" + "".join(f" {line} \n \n" for line in LINES),
        [{"text": text} for line in LINES for text in ("", f" {line} \n")],
        {"text": None},
        LINES,
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_the_same_from_its_file_and_from_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    read_set, (part, config, file), text, rows, bad, expected = SETS[name]
    with pytest.raises(FileNotFoundError, match=rf"no file .*{file}; say where the data is with --data-dir"):
        read_set(part, tmp_path)
    with pytest.raises(ConfigError, match=r"could not be loaded from the hub [^\n]*--data-dir or LLMCACHE_DATA$"):
        read_set(part, None)
    monkeypatch.setattr(loading, "FAILED", {})
    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *path, split: asked.append((*path, split)) or rows)
    write(tmp_path, {file: text})
    assert read_set(part, tmp_path) == expected == read_set(part, None) and asked == [(name, config, part)]
    write(tmp_path, {file: ""})
    with pytest.raises(ConfigError, match=f"{file}.*: (holds no records; is the file complete|not valid JSON)"):
        read_set(part, tmp_path)
    rows = [*rows, bad]
    with pytest.raises(ConfigError, match=f"{name}, {part}, row {len(rows) - 1}: not a record of this data set"):
        read_set(part, None)
