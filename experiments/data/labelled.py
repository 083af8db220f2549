"""Labelled requests: a known set by name, files with columns, or a generated stream."""

import csv
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from experiments.data.source import build, read_json, read_jsonl, read_text
from experiments.data.streams.support_desk import support_desk
from experiments.support.section import ONE_OR_MORE, Section
from llmcache import ConfigError

logger = logging.getLogger("llmcache")

STREAM = "support_desk"  # name of the generated stream
DEFAULT_N = 2000

#: Known sets by name, as published: files in the data folder, column of the text, column of the label.
SETS: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "banking77": (("banking77/train.csv", "banking77/test.csv"), "text", "category"),
    "snips": (("snips/train.seq.in", "snips/valid.seq.in", "snips/test.seq.in"), "text", "label"),
    "hwu64": (("hwu64/train.json",), "text", "intent"),
}


class Data(Section):
    # One of: a known set (`banking77`, `snips`, `hwu64`) whose files lie in the data folder; one or several files,
    # joined in this order, relative to the data folder: CSV or TSV with a header, JSONL, or JSON with a list of
    # objects; a folder with a file `train` of a known kind and optionally a file `test`; or the generated stream
    # `support_desk`. Records without text or label are left out.
    path: Annotated[tuple[str, ...], ONE_OR_MORE] = Field(min_length=1)
    text: str = "text"  # column of the request's text; known sets define their own
    label: str = "label"  # column of the label; known sets define their own
    # Number of records to use: a seeded sample in data order; of a generated stream, its beginning.
    limit: int | None = Field(default=None, ge=1)
    # `file` order, or `shuffled` with the seed: some files are sorted by label, unlike traffic.
    order: Literal["file", "shuffled"] = "file"


@dataclass(frozen=True, slots=True)
class Labelled:
    id: int  # number in the data, files joined, from 0
    text: str
    label: str
    part: int = 0  # number of its file, 0 for the first


def read_requests(data: Data, folder: Path | None, seed: int = 0) -> list[Labelled]:
    """Read all labelled requests in the configured order; relative paths are relative to `folder`."""
    name = data.path[0] if len(data.path) == 1 else ""
    if name == STREAM:
        records = made_requests(data.limit or DEFAULT_N, seed)
    else:
        records = _read_all(data, SETS.get(name, (data.path, data.text, data.label)), folder)
    if data.limit is not None and data.limit < len(records):
        records = [records[i] for i in sorted(random.Random(seed).sample(range(len(records)), data.limit))]
    if data.order == "shuffled":
        random.Random(seed).shuffle(records)
    return records


def made_requests(n: int, seed: int) -> list[Labelled]:
    return [Labelled(i, one.text, one.label) for i, one in enumerate(support_desk(n, seed))]


def split(data: Sequence[Labelled], share: float, seed: int) -> tuple[list[Labelled], list[Labelled]]:
    """Split the data; both parts keep data order. A record's part depends only on its id, not on the order."""
    n_fit = round(len(data) * share)
    if not 0 < n_fit < len(data):
        raise ConfigError(
            f"head.fit_share: {share} of {len(data)} records leaves nothing to fit on or nothing to stream; "
            "give more records or another share"
        )
    chosen = set(random.Random(seed).sample(sorted(record.id for record in data), n_fit))
    return [record for record in data if record.id in chosen], [record for record in data if record.id not in chosen]


def _read_all(data: Data, source: tuple[tuple[str, ...], str, str], folder: Path | None) -> list[Labelled]:
    paths, text, label = source
    files = [file for path in paths for file in _locate(path, folder)]
    found = [(*pair, part) for part, file in enumerate(files) for pair in _filled(_read_file(file, text, label))]
    if not found:
        raise ConfigError(f"data.path: {', '.join(data.path)}: no records, so there is nothing to stream")
    return [Labelled(i, *record) for i, record in enumerate(found)]


def _locate(name: str, folder: Path | None) -> list[Path]:
    """Return the file of this name, or the files of a folder: `train`, and `test` if present."""
    path = Path(name).expanduser()
    if folder is not None and not path.is_absolute():
        path = folder / path
    if path.is_dir():
        return _inside(path)
    if path.suffix not in _READERS:
        made = ", ".join([*SETS, STREAM])
        known = f"a file ending in {' or '.join(_READERS)}, a folder that is there, or a name ({made})"
        raise ConfigError(f"data.path: {name!r} is of no known kind; give {known}")
    if not path.is_file():
        raise FileNotFoundError(f"data.path: no file {path}; say where the data is with --data-dir or LLMCACHE_DATA")
    return [path]


def _inside(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix in _READERS)
    train, test = ([path for path in files if path.name.partition(".")[0] == name] for name in ("train", "test"))
    if len(train) != 1 or len(test) > 1:
        kinds = " or ".join(_READERS)
        raise ConfigError(
            f"data.path: {folder} holds {len(train)} files train and {len(test)} files test ending in {kinds}; one "
            "train and at most one test are needed: name the files themselves"
        )
    return train + test


def _filled(records: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """Yield text and label of records that have both. Logs how many do not, and names the first."""
    blank = []
    for where, text, label in records:
        if text.strip() and label.strip():
            yield text, label
        else:
            blank.append(where)
    if blank:
        logger.warning("data: %d records without text or label are left out; the first is %s", len(blank), blank[0])


def _read_file(path: Path, text: str, label: str) -> Iterator[tuple[str, str, str]]:
    """Yield each record's position in the file, its text and its label."""
    try:
        for where, record in _READERS[path.suffix](path):
            if not isinstance(record, dict):
                raise ConfigError(f"{where}: expected an object with its columns (got {record!r})")
            yield where, _field(record, "text", text, where), _field(record, "label", label, where)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise ConfigError(f"{path}: not a CSV file ({error})") from error


def _field(record: Mapping[str, Any], key: str, name: str, where: str) -> str:
    if name not in record:
        raise ConfigError(f"data.{key}: {where} has no column {name!r}; columns found: {', '.join(map(repr, record))}")
    value = record[name]
    if value is None:
        return ""
    if isinstance(value, dict | list):
        raise ConfigError(f"data.{key}: {where}: column {name!r} holds no single value (got {value!r})")
    return str(value)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)  # else an unbalanced quote would swallow lines
        for record in reader:
            yield f"{path}, line {reader.line_num}", {k: v for k, v in record.items() if k is not None}


def _read_json(path: Path) -> list[tuple[str, Any]]:
    """Read a list of objects, or Rasa's `rasa_nlu_data.common_examples`, each with `text` and `intent`."""
    values = read_json(path)
    if not isinstance(values, list):
        values = build(str(path), lambda values: list(values["rasa_nlu_data"]["common_examples"]), values)
    return [(f"{path}, example {number}", record) for number, record in enumerate(values)]


def _read_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Read one request per line (`*.seq.in`), with its label on the same line of the file beside it (`*.label`)."""
    beside = path.with_name(path.name.removesuffix(".seq.in") + ".label")
    if not beside.is_file():
        raise FileNotFoundError(f"data.path: no file {beside}, which holds the labels of {path.name}")
    texts, labels = (read_text(file).split("\n") for file in (path, beside))
    for number, (text, label) in enumerate(zip_longest(texts, labels, fillvalue=""), start=1):
        where = f"{path}, line {number}"
        if bool(text.strip()) != bool(label.strip()):
            raise ConfigError(f"{where}: {beside.name} does not match (text {text!r}, label {label!r})")
        if text.strip():
            yield where, {"text": text.strip(), "label": label.strip()}


#: Readers by file type. Each yields a record's position and the record, a mapping in a well-formed file.
_READERS: Mapping[str, Callable[[Path], Iterable[tuple[str, Any]]]] = {
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".jsonl": read_jsonl,
    ".json": _read_json,
    ".in": _read_lines,
}
