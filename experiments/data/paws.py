"""PAWS-Wiki (Zhang et al. 2019): pairs of sentences of the same words, which say the same or not."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.data.source import build, find_file, from_hub, some
from llmcache import ConfigError

HUB = ("google-research-datasets/paws", "labeled_final")
FILE = "paws/paws_wiki_val.csv"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sentences, and whether they say the same."""

    first: str
    second: str
    is_same: bool


def read_paws(folder: Path | None) -> list[Pair]:
    """The pairs of the validation set, in the order of the data: from the data folder, or without one from the hub."""
    if folder is None:
        return [build(where, _pair, row) for where, row in from_hub(*HUB, "validation")]
    path = find_file(folder, FILE)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            pairs = [build(f"{path}, line {reader.line_num}", _pair, row) for row in reader]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    return some(pairs, path)


def apart(pairs: list[Pair]) -> list[Pair]:
    """Pairs, taken in order, none of which has a sentence of an earlier one: no other pair then answers for it."""
    seen: set[str] = set()
    kept = []
    for pair in pairs:
        sentences = {pair.first, pair.second}
        if len(sentences) == 2 and not sentences & seen:
            kept.append(pair)
            seen |= sentences
    return kept


def _pair(row: Mapping[str, Any]) -> Pair:
    label = {"0": False, "1": True}[str(row["label"])]
    return Pair(str(row["sentence1"]), str(row["sentence2"]), label)
