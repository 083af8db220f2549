"""Tables on the console. Numbers are never wrapped or truncated."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import typer

_DEFAULT_WIDTH = 80  # characters, if there is no terminal
_MIN_NAME_WIDTH = 17  # a column of names is not folded below this many characters
_WHOLE_FROM = 10_000  # values from here on are shown without decimals


def show_table(title: str, rows: Sequence[Mapping[str, Any]], n_names: int = 1) -> None:
    """Print rows as a table with their common keys as headings; the first `n_names` columns name a row.

    Numbers are rounded. Names are folded to fit the terminal; a table that still does not fit is wider than it.
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
    cells = [[cell(row[heading]) for heading in rows[0]] for row in rows]
    for number, heading in enumerate(rows[0]):
        words = heading.replace("_", " ").split()
        widest = max(map(len, (*words, *(row[number] for row in cells))))
        is_name = number < n_names
        table.add_column(
            Text("\n".join(words)),
            justify="left" if is_name else "right",
            overflow="fold",
            min_width=min(widest, _MIN_NAME_WIDTH) if is_name else widest,
        )
    for row in cells:
        table.add_row(*map(Text, row))
    room = shutil.get_terminal_size((_DEFAULT_WIDTH, 0)).columns
    boundless = Console(width=10_000)
    least = Measurement.get(boundless, boundless.options, table).minimum
    Console(width=max(room, least), highlight=False).print(table)


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
