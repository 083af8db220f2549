"""SQuAD v2 (Rajpurkar, Jia and Liang 2018): questions on Wikipedia passages, about half without an answer there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.data.source import build, find_file, from_hub, read_json

HUB = "rajpurkar/squad_v2"
FILES = {"train": "squad_v2/train-subset.json", "validation": "squad_v2/eval.json"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question on a passage.

    Attributes:
        id: The data set's own.
        title: Article of the passage.
        text: The question.
        context: The passage.
        answers: Accepted answers, each with the character where it begins in the passage; empty when there is none.
    """

    id: str
    title: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]


def read_squad(split: Literal["train", "validation"], folder: Path | None) -> list[Question]:
    """All questions of a split, in the order of the data.

    Args:
        split: Which.
        folder: Data folder with the official JSON format under `squad_v2/`; None for the hub.

    Raises:
        ConfigError: A record is malformed, or the hub cannot be reached.
        FileNotFoundError: The file is missing.
    """
    if folder is None:
        return [_from_row(row) for row in from_hub(HUB, None, split)]
    path = find_file(folder, FILES[split])
    questions: list[Question] = build(str(path), lambda: list(_from_file(read_json(path))))
    return questions


def _from_row(row: Any) -> Question:
    answers = row["answers"]
    found = tuple(zip(answers["text"], answers["answer_start"], strict=True))
    return Question(row["id"], row["title"], row["question"], row["context"], found)


def _from_file(values: Any) -> Iterator[Question]:
    for article in values["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            for asked in paragraph["qas"]:
                answers = () if asked.get("is_impossible") else asked["answers"]
                found = tuple((answer["text"], answer["answer_start"]) for answer in answers)
                yield Question(asked["id"], article["title"], asked["question"], context, found)
