"""Published sets, from the data folder if given, else from the hub: the same records, in data order.

squad_v2     (Rajpurkar, Jia and Liang 2018) questions on Wikipedia passages, about half of them unanswerable
openbookqa   (Mihaylov et al. 2018) school science questions with four choices; the facts are not given
wikitext     (Merity et al. 2016) Wikipedia articles in tokenised lines. The hub's `raw` configuration of WikiText-103
             has every word. WikiText-2 and files in the data folder are used as they are, and may have rare words
             replaced by `<unk>`: `unk_rate` returns the share
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.data.source import build, find_file, from_hub, read_json, read_jsonl, read_text, some, typed

UNK = "<unk>"
SQUAD = {"train": "squad_v2/train-subset.json", "validation": "squad_v2/eval.json"}
OPENBOOKQA = {
    "train": "openbookqa/train.jsonl",
    "validation": "openbookqa/dev.jsonl",
    "test": "openbookqa/test.jsonl",
}
#: By split: configuration on the hub, its split, file in the data folder.
WIKITEXT = {
    "train": ("wikitext-2-v1", "train", "wikitext/wikitext-2_train.tokens.txt"),
    "validation": ("wikitext-103-raw-v1", "validation", "wikitext/wikitext-103_valid.txt"),
    "test": ("wikitext-103-raw-v1", "test", "wikitext/wikitext-103_test.txt"),
}


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    title: str  # article of the passage
    text: str
    context: str
    # Accepted answers, each with its first character in the passage; empty if there is none
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    id: str
    stem: str  # the question, often the beginning of a sentence
    choices: tuple[str, ...]  # ways to continue: four, in the published sets
    right: int  # index of the right choice, from 0


def read_squad(split: Literal["train", "validation"], folder: Path | None) -> list[Question]:
    if folder is None:
        return [build(where, _question, row) for where, row in from_hub("rajpurkar/squad_v2", None, split)]
    path = find_file(folder, SQUAD[split])
    records = build(str(path), _flatten, read_json(path))
    return some([build(f"{path}, {where}", _question, row) for where, row in records], path)


def _flatten(values: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each question of the official format, with its article's title and its passage."""
    return [
        (f"article {i}, paragraph {j}, question {k}", {**asked, "title": article["title"], "context": part["context"]})
        for i, article in enumerate(values["data"])
        for j, part in enumerate(article["paragraphs"])
        for k, asked in enumerate(part["qas"])
    ]


def _question(row: Mapping[str, Any]) -> Question:
    pairs = zip(*_columns(row["answers"], "text", "answer_start"), strict=True)
    found = tuple((typed(text, str), typed(start, int)) for text, start in pairs)
    name, title, text, context = (typed(row[key], str) for key in ("id", "title", "question", "context"))
    return Question(name, title, text, context, found)


def read_openbookqa(split: Literal["train", "validation", "test"], folder: Path | None) -> list[Choice]:
    if folder is None:
        return [build(where, _choice, row) for where, row in from_hub("allenai/openbookqa", "main", split)]
    path = find_file(folder, OPENBOOKQA[split])
    return some([build(where, _choice, row) for where, row in read_jsonl(path)], path)


def _choice(row: Mapping[str, Any]) -> Choice:
    asked = row.get("question", row)  # a file's questions are nested
    stem = asked["question_stem"] if asked is row else asked["stem"]
    labels, texts = _columns(asked["choices"], "label", "text")
    choices = tuple(typed(text, str) for _, text in zip(labels, texts, strict=True))
    return Choice(typed(row["id"], str), typed(stem, str), choices, labels.index(row["answerKey"]))


def _columns(table: Any, *names: str) -> list[list[Any]]:
    """Return columns of a mapping by column, as on the hub, or of a list of rows, as in files."""
    return [[row[name] for row in table] if isinstance(table, list) else table[name] for name in names]


def read_wikitext(split: Literal["train", "validation", "test"], folder: Path | None) -> list[str]:
    """Return the stripped non-empty lines of a split."""
    config, there, file = WIKITEXT[split]
    hub = "Salesforce/wikitext"
    if folder is None:
        lines = [build(where, lambda row: typed(row["text"], str), row) for where, row in from_hub(hub, config, there)]
    else:
        lines = read_text(find_file(folder, file)).split("\n")
    return some([line.strip() for line in lines if line.strip()], hub if folder is None else folder / file)


def unk_rate(lines: list[str]) -> float:
    """Return the share of white-space separated words that are `<unk>`, 0 to 1."""
    words = [word for line in lines for word in line.split()]
    return sum(word == UNK for word in words) / max(1, len(words))
