"""Tables on the console: no wider than the terminal, and no number ever broken or cut."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

_WIDTH = 80  # characters, where there is no terminal to ask
_NAME_WIDTH = 17  # characters that a text is not folded below
_WHOLE_FROM = 10_000  # figures from here on are shown without decimals


@dataclass(slots=True)
class _Column:
    """A column: its heading folds at its words, a text where room is short, a number never.

    Attributes:
        heading: What stands above.
        cells: One a row.
        is_name: Holds texts that say what a row is: left-aligned, and may be folded.
        width: Characters; at first those of the longest cell, or of the longest word of the heading.
    """

    heading: str
    cells: Sequence[str]
    is_name: bool
    width: int = 0

    def __post_init__(self) -> None:
        words = textwrap.wrap(self.heading, width=1, break_long_words=False)
        self.width = max(map(len, [*words, *self.cells]))

    def fold(self, text: str) -> list[str]:
        """The heading or a cell as lines, each as wide as the column."""
        lines = textwrap.wrap(text, self.width) or [""]
        return [line.ljust(self.width) if self.is_name else line.rjust(self.width) for line in lines]


def show_table(title: str, rows: Sequence[Mapping[str, Any]], n_names: int = 1) -> None:
    """Print rows under their headings; columns for which there is no room go on in a table below.

    Args:
        title: Printed above.
        rows: All with the same keys, the headings. Numbers are rounded for reading, texts stand as they are.
        n_names: Columns, from the left, that say what a row is; they come again in each table below.
    """
    typer.echo(title)
    if not rows:
        typer.echo("nothing")
        return
    columns = [
        _Column(heading.replace("_", " "), [cell(row[heading]) for row in rows], is_name=number < n_names)
        for number, heading in enumerate(rows[0])
    ]
    for part in _components(columns[:n_names], columns[n_names:], shutil.get_terminal_size((_WIDTH, 0)).columns):
        typer.echo()
        typer.echo("\n".join(_lines(part, [column.heading for column in part])))
        typer.echo(" ".join("-" * column.width for column in part))
        for number in range(len(rows)):
            typer.echo("\n".join(_lines(part, [column.cells[number] for column in part])))


def _components(names: Sequence[_Column], others: Sequence[_Column], room: int) -> Iterator[list[_Column]]:
    """The columns of each table. Before a second one is needed, the widest name gives way."""
    excess = _width([*names, *others]) - room
    if excess > 0:
        widest = max(names, key=lambda column: column.width)
        widest.width -= min(excess, max(0, widest.width - _NAME_WIDTH))
    part = list(names)
    for column in others:
        if len(part) > len(names) and _width([*part, column]) > room:
            yield part
            part = list(names)
        part.append(column)
    yield part


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(columns) - 1


def _lines(columns: Sequence[_Column], texts: Sequence[str]) -> Iterator[str]:
    """One text a column, side by side, as many lines as the longest is folded to."""
    folded = [column.fold(text) for column, text in zip(columns, texts, strict=True)]
    for number in range(max(map(len, folded))):
        cells = [
            lines[number] if number < len(lines) else " " * column.width
            for column, lines in zip(columns, folded, strict=True)
        ]
        yield " ".join(cells).rstrip()


def cell(value: Any) -> str:
    """A value as text; missing is empty, never 0."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {int: "{:,}".format, float: _round}.get(type(value), str)(value)


def _round(value: float) -> str:
    """Four digits; of what is just below 1, a threshold for instance, as many as tell it from 1."""
    if abs(value) >= _WHOLE_FROM:
        return f"{value:,.0f}"
    digits = 4
    while value < 1 and float(f"{value:.{digits}g}") == 1:
        digits += 1
    return f"{value:.{digits}g}"
