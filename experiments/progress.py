"""A progress bar that keeps out of what is timed: no thread, drawn between requests at most a few times a second."""

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_T = TypeVar("_T")
_EVERY_S = 0.25


def tracked(items: Iterable[_T], total: int, what: str) -> Iterator[_T]:
    """Hand on items, drawing how far it is on the error stream of a terminal.

    Args:
        items: What to go through.
        total: How many they are.
        what: Stands before the bar.
    """
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        drawn = -_EVERY_S
        for done, item in enumerate(items):
            if monotonic() - drawn >= _EVERY_S:
                progress.update(task, completed=done, refresh=True)
                drawn = monotonic()
            yield item
        progress.update(task, completed=total, refresh=True)
