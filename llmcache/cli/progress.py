"""A progress bar on standard error, for whatever may take longer than two seconds."""

from types import TracebackType
from typing import Self


class Progress:
    """One bar a phase; silent where standard error is not a terminal."""

    def __init__(self) -> None:
        """Nothing is drawn before the first `advance`."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Self:
        """Begin drawing."""
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take the bars away."""
        self._bars.stop()

    def advance(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a phase are done."""
        from rich.progress import TaskID

        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(TaskID(self._tasks[phase]), completed=done, total=total)
