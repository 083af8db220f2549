"""The known data sets: the same rows from the hub and from a folder, and one clear line for whatever is wrong."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from experiments.data.openbookqa import Choice, read_openbookqa
from experiments.data.squad import Question, read_squad
from experiments.data.wikitext import read_wikitext, unk_rate
from llmcache.errors import ConfigError

PASSAGE = "Zoë  moved to São Paulo 🙂 in 1999."
QUESTIONS = [
    Question("a", "Zoë", "Where to?", PASSAGE, (("São Paulo", 14), ("Paulo", 18))),
    Question("b", "Zoë", "Who stayed?", PASSAGE, ()),
    Question("c", "Rain", "What falls?", "Rain falls.", (("Rain", 0),)),
]
CHOICES = [
    Choice("7-1", "Ice is", ("hot", "solid water", "a gas", "Stein"), 1),
    Choice("7-2", "The sun é", ("wakes", "eats", "shines", "swims"), 2),
]
LINES = ["= Title =", "First line of it .", "= = Part = =", "Second <unk> line , été ."]


def squad_file() -> dict[str, Any]:
    def record(question: Question) -> dict[str, Any]:
        answers = [{"text": text, "answer_start": start} for text, start in question.answers]
        no_answer = {"plausible_answers": [{"text": "Zoë", "answer_start": 0}], "is_impossible": True}
        return {"id": question.id, "question": question.text, "answers": answers} | ({} if answers else no_answer)

    articles = []
    for title in ("Zoë", "Rain"):
        asked = [question for question in QUESTIONS if question.title == title]
        paragraph = {"context": asked[0].context, "qas": [record(question) for question in asked]}
        articles.append({"title": title, "paragraphs": [paragraph]})
    return {"version": "v2.0", "data": articles}


def squad_rows() -> list[dict[str, Any]]:
    def answers(question: Question) -> dict[str, list[Any]]:
        found = question.answers
        return {"text": [text for text, _ in found], "answer_start": [start for _, start in found]}

    return [
        {"id": x.id, "title": x.title, "context": x.context, "question": x.text, "answers": answers(x)}
        for x in QUESTIONS
    ]


def openbookqa_lines() -> list[dict[str, Any]]:
    return [
        {
            "id": x.id,
            "question": {
                "stem": x.stem,
                "choices": [{"text": t, "label": "ABCD"[i]} for i, t in enumerate(x.choices)],
            },
            "answerKey": "ABCD"[x.right],
        }
        for x in CHOICES
    ]


def openbookqa_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": x.id,
            "question_stem": x.stem,
            "choices": {"text": list(x.choices), "label": list("ABCD")},
            "answerKey": "ABCD"[x.right],
        }
        for x in CHOICES
    ]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> "Hub":
    return Hub(monkeypatch)


class Hub:
    """Stands for the hub: gives its rows, and remembers what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str | None, str]] = []
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, name: str, config: str | None, split: str) -> datasets.Dataset:
        self.asked.append((name, config, split))
        return datasets.Dataset.from_list(self.rows)


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(("split", "file"), [("train", "train-subset.json"), ("validation", "eval.json")])
def test_squad_is_the_same_from_both_sources(split: Any, file: str, tmp_path: Path, hub: Hub) -> None:
    put(tmp_path, f"squad_v2/{file}", json.dumps(squad_file()))
    hub.rows = squad_rows()
    assert read_squad(split, tmp_path) == QUESTIONS == read_squad(split, None)
    assert hub.asked == [("rajpurkar/squad_v2", None, split)]


@pytest.mark.parametrize(("split", "file"), [("train", "train"), ("validation", "dev"), ("test", "test")])
def test_openbookqa_is_the_same_from_both_sources(split: Any, file: str, tmp_path: Path, hub: Hub) -> None:
    put(tmp_path, f"openbookqa/{file}.jsonl", "\n".join(map(json.dumps, openbookqa_lines())))
    hub.rows = openbookqa_rows()
    assert read_openbookqa(split, tmp_path) == CHOICES == read_openbookqa(split, None)
    assert hub.asked == [("allenai/openbookqa", "main", split)]


@pytest.mark.parametrize(
    ("split", "file", "config"),
    [
        ("train", "wikitext-2_train.tokens.txt", "wikitext-2-v1"),
        ("validation", "wikitext-103_valid.txt", "wikitext-103-raw-v1"),
        ("test", "wikitext-103_test.txt", "wikitext-103-raw-v1"),
    ],
)
def test_wikitext_is_the_same_from_both_sources(split: Any, file: str, config: str, tmp_path: Path, hub: Hub) -> None:
    put(tmp_path, f"wikitext/{file}", " \n" + "".join(f" {line} \n \n" for line in LINES))
    hub.rows = [{"text": text} for line in LINES for text in ("", f" {line} \n")]
    assert read_wikitext(split, tmp_path) == LINES == read_wikitext(split, None)
    assert hub.asked == [("Salesforce/wikitext", config, split)]


def test_unk_rate() -> None:
    assert unk_rate(LINES) == pytest.approx(1 / 19)
    assert unk_rate([]) == 0


READERS: dict[str, Callable[[Any, Path | None], Sequence[Any]]] = {
    "squad_v2/eval.json": read_squad,
    "openbookqa/dev.jsonl": read_openbookqa,
    "wikitext/wikitext-103_valid.txt": read_wikitext,
}
GOOD = {
    "squad_v2/eval.json": json.dumps(squad_file(), ensure_ascii=False, indent=1),
    "openbookqa/dev.jsonl": "\n".join(json.dumps(x, ensure_ascii=False) for x in openbookqa_lines()) + "\n",
    "wikitext/wikitext-103_valid.txt": "\n".join(LINES),
}
EXPECTED: Mapping[str, Sequence[Any]] = dict(zip(READERS, (QUESTIONS, CHOICES, LINES), strict=True))


@pytest.fixture(params=READERS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_hub_that_cannot_be_reached(reader: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"could not be loaded from the hub .*--data-dir or LLMCACHE_DATA$") as error:
        reader("validation", None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("message", "told"),
    [("", "OSError"), ("no route\n\nSee the manual", "no route"), ("Not there. Log in at hub.co!", "Not there")],
)
def test_of_what_the_hub_says_the_first_sentence_is_told(
    message: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(message)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ConfigError, match=rf"the hub \({told}\); give a folder"):
        read_squad("train", None)


def test_the_hub_is_asked_in_silence_and_once_for_what_it_cannot_give(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def fail(name: str, config: str | None, split: str) -> None:
        asked.append(name)
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for split in ("train", "validation"):
        with pytest.raises(ConfigError, match=r"the hub \(no route\); give a folder"):
            read_squad(split, None)
    assert asked == ["rajpurkar/squad_v2"]
    with pytest.raises(ConfigError, match="no route"):
        read_wikitext("train", None)
    assert len(asked) == 2
    assert caplog.text == ""


def test_lines_may_end_as_on_windows_and_begin_with_a_mark(name: str, tmp_path: Path) -> None:
    put(tmp_path, name, b"\xef\xbb\xbf" + GOOD[name].replace("\n", "\r\n").encode())
    assert READERS[name]("validation", tmp_path) == EXPECTED[name]


def test_a_missing_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no file .*{name}; say where the data is with --data-dir"):
        READERS[name]("validation", tmp_path)


def refused(name: str, content: str | bytes, tmp_path: Path) -> str:
    """The one line, after the path that it begins with, that a file is refused with."""
    path = put(tmp_path, name, content)
    with pytest.raises(ConfigError) as error:
        READERS[name]("validation", tmp_path)
    line = str(error.value)
    assert line.startswith(str(path)) and "\n" not in line
    return line.removeprefix(str(path))


def test_not_utf8(name: str, tmp_path: Path) -> None:
    assert refused(name, "été".encode("latin-1"), tmp_path).startswith(": not UTF-8 text (")


def test_an_empty_file(name: str, tmp_path: Path) -> None:
    line = refused(name, "", tmp_path)
    assert line in (": holds no records; is the file complete?", ", line 1: not valid JSON: Expecting value")


def test_malformed_json(tmp_path: Path) -> None:
    assert refused("squad_v2/eval.json", '{\n"data": [}', tmp_path) == ", line 2: not valid JSON: Expecting value"
    content = GOOD["openbookqa/dev.jsonl"] + "\n{'a'}"
    assert refused("openbookqa/dev.jsonl", content, tmp_path).startswith(", line 4: not valid JSON: ")


def change(values: Any, path: Sequence[Any], value: Any) -> Any:
    """Set, or with Ellipsis remove, what lies at a path."""
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return values


PARAGRAPH = ("data", 0, "paragraphs", 0)


@pytest.mark.parametrize(
    ("path", "value", "where", "what"),
    [
        (["data"], ..., "", "KeyError: 'data'"),
        (["data"], 3, "", "TypeError: "),
        (["data", 1, "title"], ..., "", "KeyError: 'title'"),
        ([*PARAGRAPH, "qas"], None, "", "TypeError: "),
        ([*PARAGRAPH, "qas", 1], "who?", "", "TypeError: "),
        ([*PARAGRAPH, "context"], 7, ", article 0, paragraph 0, question 0", "TypeError: expected str, got 7"),
        ([*PARAGRAPH, "qas", 1, "id"], 7, ", article 0, paragraph 0, question 1", "TypeError: expected str, got 7"),
        ([*PARAGRAPH, "qas", 0, "question"], ..., ", article 0, paragraph 0, question 0", "KeyError: 'question'"),
        ([*PARAGRAPH, "qas", 0, "answers"], ..., ", article 0, paragraph 0, question 0", "KeyError: 'answers'"),
        (
            [*PARAGRAPH, "qas", 0, "answers", 0, "answer_start"],
            "14",
            ", article 0, paragraph 0, question 0",
            "TypeError: expected int, got '14'",
        ),
    ],
)
def test_squad_records_that_are_none(path: list[Any], value: Any, where: str, what: str, tmp_path: Path) -> None:
    line = refused("squad_v2/eval.json", json.dumps(change(squad_file(), path, value)), tmp_path)
    assert line.startswith(f"{where}: not a record of this data set ({what}")


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ([1, "answerKey"], "E", "ValueError: "),
        ([1, "answerKey"], ..., "KeyError: 'answerKey'"),
        ([1, "question"], "stem", "TypeError: "),
        ([1, "question", "stem"], None, "TypeError: expected str, got None"),
        ([1, "question", "choices"], [], "ValueError: "),
        ([1, "question", "choices", 2, "text"], ["shines"], "TypeError: expected str, got ['shines']"),
        ([1], [1, 2], "TypeError: "),
    ],
)
def test_openbookqa_records_that_are_none(path: list[Any], value: Any, what: str, tmp_path: Path) -> None:
    lines = change(openbookqa_lines(), path, value)
    line = refused("openbookqa/dev.jsonl", "\n".join(map(json.dumps, lines)), tmp_path)
    assert line.startswith(f", line 2: not a record of this data set ({what}")


@pytest.mark.parametrize(
    ("reader", "rows", "where"),
    [
        (read_squad, [{**squad_rows()[0], "answers": {"text": ["a"], "answer_start": []}}], "squad_v2, train, row 0"),
        (read_openbookqa, [*openbookqa_rows(), {**openbookqa_rows()[0], "answerKey": "E"}], "openbookqa, train, row 2"),
        (read_wikitext, [{"text": "a"}, {"text": None}], "wikitext, train, row 1"),
    ],
)
def test_rows_of_the_hub_are_checked(reader: Any, rows: list[dict[str, Any]], where: str, hub: Hub) -> None:
    hub.rows = rows
    with pytest.raises(ConfigError, match=f"{where}: not a record of this data set"):
        reader("train", None)
