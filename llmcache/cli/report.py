"""`llmcache report`: pictures and verdicts from the files of results."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    results_dir: Annotated[Path, typer.Option(help="Folder that results were written under.")] = Path("results"),
) -> None:
    """Write REPORT.md and its pictures again from what was measured: each claim of the paper and what became of it."""
    from experiments.plots import draw_all
    from experiments.report import write_report

    pictures = draw_all(results_dir)
    path = write_report(results_dir)
    typer.echo(f"{path} and {len(pictures)} pictures")
