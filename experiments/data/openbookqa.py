"""OpenBookQA (Mihaylov et al. 2018): school science questions with four choices. The facts are not given."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.data.source import build, find_file, from_hub, read_jsonl, some, typed

HUB = "allenai/openbookqa"
FILES = {
    "train": "openbookqa/train.jsonl",
    "validation": "openbookqa/dev.jsonl",
    "test": "openbookqa/test.jsonl",
}


@dataclass(frozen=True, slots=True)
class Choice:
    id: str
    stem: str  # the question, often the beginning of a sentence
    choices: tuple[str, ...]  # ways to continue: four, in the published sets
    right: int  # index of the right choice, from 0


def read_openbookqa(split: Literal["train", "validation", "test"], folder: Path | None) -> list[Choice]:
    """Return all questions of a split, in data order: from the data folder if given, else from the hub."""
    if folder is None:
        return [build(where, _from_row, row) for where, row in from_hub(HUB, "main", split)]
    path = find_file(folder, FILES[split])
    return some([build(where, _from_line, row) for where, row in read_jsonl(path)], path)


def _from_row(row: Mapping[str, Any]) -> Choice:
    choices = row["choices"]
    return _choice(row, row["question_stem"], zip(choices["label"], choices["text"], strict=True))


def _from_line(row: Mapping[str, Any]) -> Choice:
    question = row["question"]
    return _choice(row, question["stem"], [(choice["label"], choice["text"]) for choice in question["choices"]])


def _choice(row: Mapping[str, Any], stem: Any, choices: Iterable[tuple[Any, Any]]) -> Choice:
    labels, texts = zip(*choices, strict=True)
    right = labels.index(row["answerKey"])
    return Choice(typed(row["id"], str), typed(stem, str), tuple(typed(text, str) for text in texts), right)
