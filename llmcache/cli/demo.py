"""`llmcache demo`: what the cache saves and what it costs, on a small real model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcache.cli.output import check_writable, write_json


def command(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="Picture of speed-up against changed answers to write.")
    ] = Path("llmcache-demo.png"),
    n: Annotated[
        int, typer.Option("--n", min=600, help="Requests; the first 30 % fit the classifier, the rest are served.")
    ] = 2000,
) -> None:
    """Serve a support desk's requests with and without the cache: speed, hits, and what became of the answers."""
    for path in (json_file, plot):
        check_writable(path)
    from rich.console import Console

    from experiments.demo import run_demo
    from experiments.models import MINILM, load
    from experiments.plots import plot_speed_against_changes, require_matplotlib

    require_matplotlib()
    report = run_demo(load(MINILM), n)
    plot_speed_against_changes(report, plot)
    Console().print(_table(report))
    for sentence in report["conclusion"]:
        typer.echo(sentence)
    write_json(json_file, report)
    typer.echo(f"Plot: {plot}")


def _table(report: Mapping[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    title = f"{report['n']:,} requests, one at a time; times over {report['rounds']} round(s); empty: not run live"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column("setting", no_wrap=True)
    for heading in ("hits", "median\nms", "p90\nms", "p99\nms", "speed-\nup", "accu-\nracy", "drop\npoints"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("changed\nanswers", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for row in report["settings"]:
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    times = row["latency_ms"] or {}
    return [
        row["name"],
        _show(row.get("hit_rate"), "{:.1%}"),
        *(_show(times.get(name), "{:.2f}") for name in ("median", "p90", "p99")),
        _show(row.get("speedup"), "{:.2f}"),
        _show(row["accuracy"], "{:.1%}"),
        _show(None if (drop := row.get("accuracy_drop")) is None else 100 * drop, "{:.2f}"),
        _show(row.get("changed_answers"), "{:.2%}"),
        _show(row.get("bytes"), "{:,}"),
    ]


def _show(value: float | None, form: str) -> str:
    """A figure as text; missing is empty, never 0."""
    return "" if value is None else form.format(value)
