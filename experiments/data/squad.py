"""SQuAD v2 (Rajpurkar, Jia and Liang 2018): questions on Wikipedia passages, about half of them unanswerable."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.data.source import build, find_file, from_hub, read_json, some, typed

HUB = "rajpurkar/squad_v2"
FILES = {"train": "squad_v2/train-subset.json", "validation": "squad_v2/eval.json"}


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    title: str  # article of the passage
    text: str
    context: str
    # Accepted answers, each with its first character in the passage; empty if there is none
    answers: tuple[tuple[str, int], ...]


def read_squad(split: Literal["train", "validation"], folder: Path | None) -> list[Question]:
    """Return all questions of a split, in data order: from the data folder if given, else from the hub."""
    if folder is None:
        return [build(where, _from_row, row) for where, row in from_hub(HUB, None, split)]
    path = find_file(folder, FILES[split])
    records = build(str(path), _flatten, read_json(path))
    return some([build(f"{path}, {where}", _from_record, row) for where, row in records], path)


def _flatten(values: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each question of the official format, with its article's title and its passage."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for number, article in enumerate(values["data"]):
        for place, paragraph in enumerate(article["paragraphs"]):
            for turn, asked in enumerate(paragraph["qas"]):
                where = f"article {number}, paragraph {place}, question {turn}"
                found.append((where, {**asked, "title": article["title"], "context": paragraph["context"]}))
    return found


def _from_record(record: Mapping[str, Any]) -> Question:
    return _question(record, [(answer["text"], answer["answer_start"]) for answer in record["answers"]])


def _from_row(row: Mapping[str, Any]) -> Question:
    answers = row["answers"]
    return _question(row, zip(answers["text"], answers["answer_start"], strict=True))


def _question(row: Mapping[str, Any], answers: Iterable[tuple[Any, Any]]) -> Question:
    found = tuple((typed(text, str), typed(start, int)) for text, start in answers)
    name, title, text, context = (typed(row[key], str) for key in ("id", "title", "question", "context"))
    return Question(name, title, text, context, found)
