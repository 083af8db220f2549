"""`llmcache demo`: what the cache saves and what it costs, on a small real model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.options import FiguresDir
from experiments.cli.output import make_results_folder, write_results
from llmcache.cli.output import check_writable, write_json
from llmcache.cli.table import show_table


def command(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="Picture of speed-up against changed answers to write.")
    ] = Path("llmcache-demo.png"),
    n: Annotated[
        int, typer.Option("--n", min=600, help="Requests; the first 30 % fit the classifier, the rest are served.")
    ] = 2000,
    results_dir: FiguresDir = None,
) -> None:
    """Serve a support desk's requests with and without the cache: speed, hits, and what became of the answers."""
    for path in (json_file, plot):
        check_writable(path)
    if results_dir is not None:
        make_results_folder(results_dir)
    from experiments.measures.demo import run_demo
    from experiments.models.loading import MINILM, load
    from experiments.report.plots import plot_speed_against_changes, require_matplotlib

    require_matplotlib()
    report = run_demo(load(MINILM), n)
    plot_speed_against_changes(report, plot)
    title = f"{report['n']:,} requests, one at a time; times over {report['rounds']} round(s); empty: not run live"
    show_table(title, [_cells(row) for row in report["settings"]])
    for sentence in report["conclusion"]:
        typer.echo(sentence)
    write_json(json_file, report)
    figures = {key: value for key, value in report.items() if key != "environment"}
    write_results(results_dir, "demo", {"model": MINILM, "n": n}, report["environment"], figures)
    typer.echo(f"Plot: {plot}")


def _cells(row: Mapping[str, Any]) -> Mapping[str, str]:
    """A row of the table by its headings."""
    times = row["latency_ms"] or {}
    return {
        "setting": row["name"],
        "hits": _show(row.get("hit_rate"), "{:.1%}"),
        **{f"{name} ms": _show(times.get(name), "{:.2f}") for name in ("median", "p90", "p99")},
        "speed-up": _show(row.get("speedup"), "{:.2f}"),
        "accuracy": _show(row["accuracy"], "{:.1%}"),
        "drop, points": _show(None if (drop := row.get("accuracy_drop")) is None else 100 * drop, "{:.2f}"),
        "changed answers": _show(row.get("changed_answers"), "{:.2%}"),
        "MB": _show(None if (nbytes := row.get("bytes")) is None else nbytes / 1e6, "{:.2f}"),
    }


def _show(value: float | None, form: str) -> str:
    """A figure as text; missing is empty, never 0."""
    return "" if value is None else form.format(value)
