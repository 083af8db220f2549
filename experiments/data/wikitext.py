"""WikiText (Merity et al. 2016): Wikipedia articles in tokenised lines.

The hub's `raw` configuration of WikiText-103 has every word. WikiText-2 and files in the data folder are used as they
are, and may have rare words replaced by `<unk>`: `unk_rate` returns the share.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from experiments.data.source import build, find_file, from_hub, read_text, some, typed

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
