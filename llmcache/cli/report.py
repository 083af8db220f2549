"""`llmcache report`: pictures and verdicts from the files of results."""

import typer

from llmcache.cli.options import RESULTS, Configs, ResultsDir, all_configs


def command(configs: Configs = None, results_dir: ResultsDir = RESULTS) -> None:
    """Write REPORT.md and its pictures again from what was measured: each claim of the paper and what became of it.

    Only runs with the very settings of the files count; what others left in the results folder is no part of it.
    """
    from experiments.plots import draw_all
    from experiments.report import write_report
    from experiments.runs import folders_of

    folders = folders_of(configs or all_configs(), results_dir)
    path = write_report(results_dir, folders)
    typer.echo(f"{path} and {len(draw_all(folders))} pictures")
