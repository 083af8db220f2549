"""`REPORT.md`: verdicts, tables and pictures of the runs in a results folder."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.report.claims import judge, verdicts
from experiments.report.pictures import PICTURES
from experiments.report.tables import of_runs
from experiments.runs.read import Run, grouped, read_runs, unfinished
from experiments.support.files import write_whole
from llmcache import ConfigError

REPORT = "REPORT.md"


def write_report(results_dir: Path, folders: Sequence[Path]) -> Path:
    """Write the report on these runs, finished or not, into the results folder."""
    runs = read_runs(folders)
    if not runs:
        raise ConfigError(f"{results_dir}: no results of these experiments; measure first: llmcache sweep")
    try:
        text = "\n\n".join(_parts(runs, unfinished(folders))) + "\n"
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{results_dir}: written by another version ({error!r}); measure again with --force"
        ) from error
    path = results_dir / REPORT
    write_whole(path, text.replace("](configs/", "](../configs/"))
    return path


def _parts(runs: Sequence[Run], missing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    by_group = grouped(runs, "group")
    yield "# What was measured, and what holds"
    yield (
        "Written by `llmcache report` from the files in this folder. Terms are those of "
        "[the results](../docs/results/index.md#how-to-read-the-tables). Brackets after shares and drops: 95 %; after "
        "speed-ups: slowest and fastest round."
    )
    yield "\n".join(f"- {line}" for line in _surroundings(runs))
    judged = [pair for pair in judge(by_group, missing) if pair[0].config in {*by_group, *missing}]
    if judged:
        yield "## Verdicts"
        yield "The rules are in [docs/claims.md](../docs/claims.md). Every verdict on latency is about this hardware."
        yield verdicts(judged, by_group)
    for group, members in sorted(by_group.items()):
        minutes = sum(run.metrics["seconds"] for run in members) / 60
        yield f"## {group}"
        yield f"`llmcache run configs/{group}.yaml`, {minutes:.1f} minutes."
        if members[0].measure in PICTURES:
            yield f"![{group}]({group}/{group}.svg)"
        yield of_runs(members)


def _surroundings(runs: Sequence[Run]) -> Iterator[str]:
    minutes = sum(run.metrics["seconds"] for run in runs) / 60
    yield f"{len(runs)} runs, {minutes:.0f} minutes together."
    yield f"CPU: {_all(runs, 'cpu')}, {_all(runs, 'n_cpus')} cores; GPU: {_all(runs, 'gpu') or 'none'}."
    versions = {f"{name} {version}" for run in runs for name, version in run.env["versions"].items() if version}
    yield f"Python {_all(runs, 'python')}, {', '.join(sorted(versions))}. Seeds: {_all(runs, 'seed')}."
    commits = {f"{run.env['git'] or 'unknown'}{' with changes' if run.env['git_dirty'] else ''}" for run in runs}
    yield f"Code: {', '.join(sorted(commits))}."
    cut = {f"{run.group}: {run.task} {run.metrics['n']:,}" for run in runs if run.metrics.get("limit") is not None}
    yield f"Only the first requests of these were used: {'; '.join(sorted(cut)) or 'none'}."


def _all(runs: Sequence[Run], key: str) -> str:
    return ", ".join(sorted({str(run.env[key]) for run in runs if run.env.get(key) is not None}))
