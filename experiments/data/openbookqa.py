"""OpenBookQA (Mihaylov et al. 2018): school science questions with four choices. The facts are not given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.data.source import build, find_file, from_hub, read_jsonl

HUB = "allenai/openbookqa"
FILES = {
    "train": "openbookqa/train.jsonl",
    "validation": "openbookqa/dev.jsonl",
    "test": "openbookqa/test.jsonl",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A question with its choices.

    Attributes:
        id: The data set's own.
        stem: The question, often the beginning of a sentence.
        choices: Four ways to go on.
        right: Number of the right one, from 0.
    """

    id: str
    stem: str
    choices: tuple[str, ...]
    right: int


def read_openbookqa(split: Literal["train", "validation", "test"], folder: Path | None) -> list[Choice]:
    """All questions of a split, in the order of the data.

    Args:
        split: Which.
        folder: Data folder with the official JSONL files under `openbookqa/`; None for the hub.

    Raises:
        ConfigError: A record is malformed, or the hub cannot be reached.
        FileNotFoundError: The file is missing.
    """
    if folder is None:
        return [_from_row(row) for row in from_hub(HUB, "main", split)]
    lines = read_jsonl(find_file(folder, FILES[split]))
    return [build(where, lambda row=row: _from_line(row)) for where, row in lines]


def _from_row(row: Any) -> Choice:
    choices = row["choices"]
    return Choice(row["id"], row["question_stem"], tuple(choices["text"]), choices["label"].index(row["answerKey"]))


def _from_line(row: Any) -> Choice:
    question = row["question"]
    labels = [choice["label"] for choice in question["choices"]]
    texts = tuple(choice["text"] for choice in question["choices"])
    return Choice(row["id"], question["stem"], texts, labels.index(row["answerKey"]))
