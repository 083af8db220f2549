"""Progress display that does not disturb timing: no thread, shown between steps, at most a few times a second."""

import math
import sys
from collections.abc import Collection, Iterator
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_T = TypeVar("_T")
_EVERY_S = 0.25  # between updates of a bar
_LINE_EVERY_S = 10.0  # between lines, without a terminal: few lines in a log, and none for quick phases


class Progress:
    """One bar per phase, on stderr; without a terminal, a line now and then."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(file=sys.stderr)
        self._bars = Bars(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._shown = monotonic() if self._bars.disable else -math.inf

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def advance(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a phase are done, unless the display was just updated."""
        if self._bars.disable:
            self._write(f"{phase}: {done:,} of {total:,}")
            return
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        if monotonic() - self._shown >= _EVERY_S or done == total:
            self._bars.update(self._tasks[phase], completed=done, refresh=True)
            self._shown = monotonic()

    def _write(self, line: str) -> None:
        if monotonic() - self._shown >= _LINE_EVERY_S:
            sys.stderr.write(f"{line}\n")
            self._shown = monotonic()


def tracked(items: Collection[_T], what: str) -> Iterator[_T]:
    """Yield the items, showing progress labelled `what`."""
    total = len(items)
    with Progress() as progress:
        for done, item in enumerate(items):
            progress.advance(what, done, total)
            yield item
        progress.advance(what, total, total)
