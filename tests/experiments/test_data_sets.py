"""The known data sets: hub and folder give the same rows; errors are one clear line."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest

from experiments.data.openbookqa import Choice, read_openbookqa
from experiments.data.squad import Question, read_squad
from experiments.data.wikitext import read_wikitext
from llmcache.errors import ConfigError

PASSAGE = "Zoë  moved to São Paulo 🙂 in 1999."
QUESTIONS = [
    Question("a", "Zoë", "Where to?", PASSAGE, (("São Paulo", 14), ("Paulo", 18))),
    Question("b", "Zoë", "Who stayed?", PASSAGE, ()),
    Question("c", "Rain", "What falls?", "Rain falls.", (("Rain", 0),)),
]
SQUAD_FILE = """{"version": "v2.0", "data": [
 {"title": "Zoë", "paragraphs": [{"context": "Zoë  moved to São Paulo 🙂 in 1999.", "qas": [
  {"id": "a", "question": "Where to?", "is_impossible": false,
   "answers": [{"text": "São Paulo", "answer_start": 14}, {"text": "Paulo", "answer_start": 18}]},
  {"id": "b", "question": "Who stayed?", "is_impossible": true,
   "answers": [], "plausible_answers": [{"text": "Zoë", "answer_start": 0}]}]}]},
 {"title": "Rain", "paragraphs": [{"context": "Rain falls.", "qas": [
  {"id": "c", "question": "What falls?", "answers": [{"text": "Rain", "answer_start": 0}]}]}]}]}
"""
SQUAD_ROWS = [
    {"id": "a", "answers": {"text": ["São Paulo", "Paulo"], "answer_start": [14, 18]}},
    {"id": "b", "answers": {"text": [], "answer_start": []}},
    {"id": "c", "answers": {"text": ["Rain"], "answer_start": [0]}},
]
for row, known in zip(SQUAD_ROWS, QUESTIONS, strict=True):
    row |= {"title": known.title, "context": known.context, "question": known.text}

CHOICES = [
    Choice("7-1", "Ice is", ("hot", "solid water", "a gas", "Stein"), 1),
    Choice("7-2", "The sun é", ("wakes", "eats", "shines", "swims"), 2),
]
OPENBOOKQA_ROWS: list[dict[str, Any]] = [
    {"id": x.id, "question_stem": x.stem, "choices": {"text": [*x.choices], "label": [*"ABCD"]}, "answerKey": key}
    for x, key in zip(CHOICES, "BC", strict=True)
]
LINES = ["= Title =", "First line of it .", "= = Part = =", "Second <unk> line , été ."]


def openbookqa_lines() -> list[dict[str, Any]]:
    lines = []
    for x, key in zip(CHOICES, "BC", strict=True):
        choices = [{"text": text, "label": label} for text, label in zip(x.choices, "ABCD", strict=True)]
        lines.append({"id": x.id, "question": {"stem": x.stem, "choices": choices}, "answerKey": key})
    return lines


@dataclass(frozen=True)
class Known:
    """One data set: its validation file and text, its rows on the hub, and the records expected from both."""

    read: Callable[[Any, Path | None], Sequence[Any]]
    file: str
    text: str
    rows: list[dict[str, Any]]
    expected: Sequence[Any]


OPENBOOKQA_FILE = "\n".join(json.dumps(line, ensure_ascii=False) for line in openbookqa_lines()) + "\n"
WIKITEXT_FILE = " \n" + "".join(f" {line} \n \n" for line in LINES)
WIKITEXT_ROWS = [{"text": text} for line in LINES for text in ("", f" {line} \n")]
SQUAD = Known(read_squad, "squad_v2/eval.json", SQUAD_FILE, SQUAD_ROWS, QUESTIONS)
OPENBOOKQA = Known(read_openbookqa, "openbookqa/dev.jsonl", OPENBOOKQA_FILE, OPENBOOKQA_ROWS, CHOICES)
WIKITEXT = Known(read_wikitext, "wikitext/wikitext-103_valid.txt", WIKITEXT_FILE, WIKITEXT_ROWS, LINES)


@pytest.fixture(params=[SQUAD, OPENBOOKQA, WIKITEXT], ids=["squad_v2", "openbookqa", "wikitext"])
def each(request: pytest.FixtureRequest) -> Known:
    return request.param  # type: ignore[no-any-return]


class Hub:
    """Fakes the hub: returns rows, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str | None, str]] = []
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, name: str, config: str | None, split: str) -> datasets.Dataset:
        self.asked.append((name, config, split))
        return datasets.Dataset.from_list(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("known", "file", "asked"),
    [
        (SQUAD, "squad_v2/train-subset.json", ("rajpurkar/squad_v2", None, "train")),
        (SQUAD, "squad_v2/eval.json", ("rajpurkar/squad_v2", None, "validation")),
        (OPENBOOKQA, "openbookqa/train.jsonl", ("allenai/openbookqa", "main", "train")),
        (OPENBOOKQA, "openbookqa/dev.jsonl", ("allenai/openbookqa", "main", "validation")),
        (OPENBOOKQA, "openbookqa/test.jsonl", ("allenai/openbookqa", "main", "test")),
        (WIKITEXT, "wikitext/wikitext-2_train.tokens.txt", ("Salesforce/wikitext", "wikitext-2-v1", "train")),
        (WIKITEXT, "wikitext/wikitext-103_valid.txt", ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation")),
        (WIKITEXT, "wikitext/wikitext-103_test.txt", ("Salesforce/wikitext", "wikitext-103-raw-v1", "test")),
    ],
)
def test_a_set_is_the_same_from_both_sources(
    known: Known, file: str, asked: tuple[str, str | None, str], tmp_path: Path, hub: Hub
) -> None:
    put(tmp_path, file, known.text)
    hub.rows = known.rows
    assert known.read(asked[2], tmp_path) == known.expected == known.read(asked[2], None)
    assert hub.asked == [asked]


def test_a_hub_that_cannot_be_reached(each: Known) -> None:
    with pytest.raises(ConfigError, match=r"could not be loaded from the hub .*--data-dir or LLMCACHE_DATA$") as error:
        each.read("validation", None)
    assert "\n" not in str(error.value)


def refused(known: Known, content: str | bytes, tmp_path: Path) -> str:
    """Read a bad file; return its one-line error without the path at its start."""
    path = put(tmp_path, known.file, content)
    with pytest.raises(ConfigError) as error:
        known.read("validation", tmp_path)
    line = str(error.value)
    assert line.startswith(str(path)) and "\n" not in line
    return line.removeprefix(str(path))


def test_a_file_that_holds_nothing_to_read(each: Known, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no file .*{each.file}; say where the data is with --data-dir"):
        each.read("validation", tmp_path)
    assert refused(each, "été".encode("latin-1"), tmp_path).startswith(": not UTF-8 text (")
    empty = (
        ", line 1: not valid JSON: Expecting value" if each is SQUAD else ": holds no records; is the file complete?"
    )
    assert refused(each, "", tmp_path) == empty


@pytest.mark.parametrize(
    ("known", "rows", "where"),
    [
        (SQUAD, [{**SQUAD_ROWS[0], "answers": {"text": ["a"], "answer_start": []}}], "squad_v2, train, row 0"),
        (OPENBOOKQA, [*OPENBOOKQA_ROWS, {**OPENBOOKQA_ROWS[0], "answerKey": "E"}], "openbookqa, train, row 2"),
        (WIKITEXT, [{"text": "a"}, {"text": None}], "wikitext, train, row 1"),
    ],
)
def test_rows_of_the_hub_are_checked(known: Known, rows: list[dict[str, Any]], where: str, hub: Hub) -> None:
    hub.rows = rows
    with pytest.raises(ConfigError, match=f"{where}: not a record of this data set"):
        known.read("train", None)
