"""`llmcache report`: tables, pictures and verdicts from the files of results."""

import typer

from experiments.cli.options import RESULTS, Changes, Configs, ResultsDir, all_configs, told_apart
from llmcache import ConfigError


def command(configs: Configs = None, results_dir: ResultsDir = RESULTS, changes: Changes = None) -> None:
    """Write REPORT.md and its pictures again from what was measured: each claim of the paper and what became of it.

    Only runs with the settings of the files count, as changed by --set; claims that other files test are left out.
    """
    from experiments.report.pictures import draw_all
    from experiments.report.write import write_report
    from experiments.runs.read import folders_of, others_beside, read_runs

    files, changes = told_apart(configs or (), changes)
    folders = folders_of(files or all_configs(), results_dir, changes)
    if not read_runs(folders) and (others := others_beside(folders)):
        raise ConfigError(
            f"{results_dir}: no results with the settings of these files, but {len(others)} with others "
            f"(of --set, or of the files before a change), {others[0].name} for instance; give the same --set, or "
            "measure first: llmcache sweep"
        )
    path = write_report(results_dir, folders)
    typer.echo(f"{path} and {len(draw_all(folders))} pictures")
