"""Published sets, one record type each: questions on passages, multiple choice, and text.

squad_v2     (Rajpurkar, Jia and Liang 2018) questions on Wikipedia passages, about half of them unanswerable
openbookqa   (Mihaylov et al. 2018) school science questions with four choices; the facts are not given
wikitext     (Merity et al. 2016) Wikipedia articles in tokenised lines. The hub's `raw` configuration of WikiText-103
             has every word. WikiText-2 and files in the data folder are used as they are, and may have rare words
             replaced by `<unk>`: `unk_rate` returns the share
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.data.source import build, find_file, from_hub, read_json, read_jsonl, read_text, some, typed

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


HUB = "Salesforce/wikitext"
UNK = "<unk>"
#: By split: configuration on the hub, its split, file in the data folder.
SPLITS = {
    "train": ("wikitext-2-v1", "train", "wikitext/wikitext-2_train.tokens.txt"),
    "validation": ("wikitext-103-raw-v1", "validation", "wikitext/wikitext-103_valid.txt"),
    "test": ("wikitext-103-raw-v1", "test", "wikitext/wikitext-103_test.txt"),
}


def read_wikitext(split: Literal["train", "validation", "test"], folder: Path | None) -> list[str]:
    """Return the stripped non-empty lines of a split: from the data folder if given, else from the hub."""
    config, there, file = SPLITS[split]
    if folder is None:
        lines = [build(where, _text, row) for where, row in from_hub(HUB, config, there)]
    else:
        lines = read_text(find_file(folder, file)).split("\n")
    return some([line.strip() for line in lines if line.strip()], HUB if folder is None else folder / file)


def unk_rate(lines: list[str]) -> float:
    """Return the share of white-space separated words that are `<unk>`, 0 to 1."""
    words = [word for line in lines for word in line.split()]
    return sum(word == UNK for word in words) / max(1, len(words))


def _text(row: Mapping[str, Any]) -> str:
    return typed(row["text"], str)
