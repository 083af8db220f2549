"""Tables on the console. Numbers are never wrapped or truncated; a column has one number of decimals."""

import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer

_DEFAULT_WIDTH = 80  # characters, if there is no terminal
_MIN_NAME_WIDTH = 17  # a column of names is not folded below this many characters
_WHOLE_FROM = 10_000  # values from here on are shown without decimals


def show_table(title: str, rows: Sequence[Mapping[str, Any]], n_names: int = 1) -> None:
    """Print rows as a table with their common keys as headings; the first `n_names` columns name a row.

    Numbers are rounded. Headings take two or three lines. Names are folded to fit the terminal; a table that
    still does not fit is wider than it.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    typer.echo(title)
    if not rows:
        typer.echo("nothing")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    columns = [_column(heading, [row[heading] for row in rows]) for heading in rows[0]]
    for number, (heading, cells) in enumerate(zip(rows[0], columns, strict=True)):
        text = heading.replace("_", " ")
        widest = max(map(len, (*text.split(), *cells)))
        lines = textwrap.wrap(text, max(widest, len(text) // 2 + 2))
        is_name, widest = number < n_names, max([widest, *map(len, lines)])
        table.add_column(
            Text("\n".join(lines)),
            justify="left" if is_name else "right",
            overflow="fold",
            min_width=min(widest, _MIN_NAME_WIDTH) if is_name else widest,
        )
    for row in zip(*columns, strict=True):
        table.add_row(*map(Text, row))
    room = shutil.get_terminal_size((_DEFAULT_WIDTH, 0)).columns
    boundless = Console(width=10_000)
    least = Measurement.get(boundless, boundless.options, table).minimum
    Console(width=max(room, least), highlight=False).print(table)


def _column(heading: str, values: Sequence[Any]) -> list[str]:
    """Return the values of a column as text. Values below the heading `value` differ in their units."""
    shown = [cell(value) for value in values]
    is_number = [type(value) is float and math.isfinite(value) for value in values]
    numbers = [text for text, counts in zip(shown, is_number, strict=True) if counts]
    if heading == "value" or any("e" in text for text in numbers):
        return shown
    decimals = max((len(text.partition(".")[2]) for text in numbers), default=0)
    for place, value in enumerate(values):
        if is_number[place]:
            separator = "," if abs(value) >= _WHOLE_FROM else ""
            shown[place] = f"{value:{separator}.{decimals}f}"
    return shown


def cell(value: Any) -> str:
    """Return a value as text; None becomes an empty string."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {int: "{:,}".format, float: _round}.get(type(value), str)(value)


def _round(value: float) -> str:
    """Format with four significant digits; a value just below 1, such as a threshold, with enough not to read as 1."""
    if abs(value) >= _WHOLE_FROM:
        return f"{value:,.0f}"
    digits = 4
    while value < 1 and float(f"{value:.{digits}g}") == 1:
        digits += 1
    return f"{value:.{digits}g}"
