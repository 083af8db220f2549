"""Tables on the console: no number is ever broken or cut."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import typer

_WIDTH = 80  # characters, where there is no terminal to ask
_NAME_WIDTH = 17  # characters that a name is not folded below
_WHOLE_FROM = 10_000  # figures from here on are shown without decimals


def show_table(title: str, rows: Sequence[Mapping[str, Any]], n_names: int = 1) -> None:
    """Print rows with the same keys, the headings; the first `n_names` columns say what a row is.

    Numbers are rounded for reading. Names fold where room is short; where that is not enough, the table is wider.
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
            min_width=min(widest, _NAME_WIDTH) if is_name else widest,
        )
    for row in cells:
        table.add_row(*map(Text, row))
    room = shutil.get_terminal_size((_WIDTH, 0)).columns
    boundless = Console(width=10_000)
    least = Measurement.get(boundless, boundless.options, table).minimum
    Console(width=max(room, least), highlight=False).print(table)


def cell(value: Any) -> str:
    """Return a value as text; None is empty, never 0."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {int: "{:,}".format, float: _round}.get(type(value), str)(value)


def _round(value: float) -> str:
    """Write four digits; of a value just below 1, a threshold for instance, as many as tell it from 1."""
    if abs(value) >= _WHOLE_FROM:
        return f"{value:,.0f}"
    digits = 4
    while value < 1 and float(f"{value:.{digits}g}") == 1:
        digits += 1
    return f"{value:.{digits}g}"
