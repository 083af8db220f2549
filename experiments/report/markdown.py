"""Formatting of figures as Markdown. Missing is empty, never 0; shares are in per cent, drops in points."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

#: Returns a row's value for one column.
Cell = Callable[[Any], Any]

#: Cell text for a configured run that is missing.
MISSING = "not measured"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table; the first column is text, the others are figures, aligned right."""
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def columns(cells: Mapping[str, Cell], rows: Iterable[Any]) -> str:
    """Format a table from its columns: headings, and functions from a row to a value."""
    return table(tuple(cells), [row_of(cells, row) for row in rows])


def named(cells: Mapping[str, Cell], row: Any) -> dict[str, Any]:
    return {heading: cell(row) for heading, cell in cells.items()}


def row_of(cells: Mapping[str, Cell], row: Any) -> list[Any]:
    return list(named(cells, row).values())


def missing(headings: Sequence[str], what: str) -> str:
    """Format a table with one row, which says that this was not measured."""
    return table(headings, [(f"`{what}`", MISSING, *[""] * (len(headings) - 2))])


def of(show: Callable[..., str], key: str, *how: Any) -> Cell:
    return lambda row: show(row[key], *how)


def bounded(show: Callable[..., str], key: str, *how: Any) -> Cell:
    """Return a cell that formats a row's figure and its interval with `show`."""
    return lambda row: show(row[key], row[f"{key}_ci"], *how)


def count(value: int) -> str:
    return f"{value:,}"


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:z.{digits}f} %"  # z: no minus before a rounded zero


def points(share: float | None, bounds: Sequence[float] | None = None) -> str:
    """Format a difference of shares in percentage points, with its interval if given."""
    if share is None:
        return ""
    shown = f"{100 * share:.2f}"
    return shown if bounds is None else f"{shown} ({100 * bounds[0]:.2f} to {100 * bounds[1]:.2f})"


def share(value: float | None, bounds: Sequence[float] | None, digits: int = 1) -> str:
    """Format a share of 1 in per cent, with its interval if given."""
    if value is None or bounds is None:
        return percent(value, digits)
    return f"{percent(value, digits)} ({100 * bounds[0]:.{digits}f} to {100 * bounds[1]:.{digits}f})"


def speed(figures: Mapping[str, Any]) -> str:
    """Format a speed-up with its slowest and fastest round; "" without live runs."""
    if figures.get("speedup") is None:
        return ""
    return f"{figures['speedup']:.2f} ({figures['speedup_min']:.2f} to {figures['speedup_max']:.2f})"


def ratio(spread: Mapping[str, float]) -> str:
    """Format a ratio taken in every round: median, 5th and 95th percentile."""
    return f"{spread['median']:.3f} ({spread['p5']:.3f} to {spread['p95']:.3f})"


def named_model(name: str, weights: str) -> str:
    return f"{name} ({'random weights' if weights == 'random' else 'trained'})"


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return ""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def each(values: Sequence[float | None], digits: int = 1, unit: str = " %") -> str:
    """Format a figure of every seed, in order; a missing value is a dash, and no values give an empty cell."""
    if all(value is None for value in values):
        return ""
    return " / ".join("-" if value is None else f"{100 * value:z.{digits}f}" for value in values) + unit
