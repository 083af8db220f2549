"""`llmcache demo`: what the cache saves and what it costs, on small real models; a classifier first, then a decoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.options import FiguresDir, make_results_folder, write_results
from llmcache.cli.options import MODELS_VARIABLE
from llmcache.cli.output import check_writable, write_json
from llmcache.cli.table import show_table


def command(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="Picture of speed-up against changed answers to write.")
    ] = Path("llmcache-demo.png"),
    n: Annotated[
        int, typer.Option("--n", min=1, help="Requests to serve; of the first, 1,200 that differ are learned from.")
    ] = 2700,
    models_dir: Annotated[
        Path, typer.Option(envvar=MODELS_VARIABLE, help="Where `llmcache prepare smollm2` put the decoder.")
    ] = Path("models"),
    results_dir: FiguresDir = None,
) -> None:
    """Serve a support desk's requests with and without the cache: speed, hits, and what became of the answers.

    Then, where SmolLM2-135M-Instruct was prepared: time to first token of five users behind one system prompt.
    """
    for path in (json_file, plot):
        check_writable(path)
    make_results_folder(results_dir)
    from experiments.measures.demo import run_demo
    from experiments.models.loading import MINILM, load
    from experiments.report.pictures import plot_speed_against_changes, require_matplotlib
    from experiments.runs.read import was_idle

    require_matplotlib()
    report = run_demo(load(MINILM), n)
    is_idle = was_idle(report["environment"])
    _show_first(report, is_idle)
    plot_speed_against_changes(report, plot, is_idle)
    typer.echo(f"Plot: {plot}\n")
    report["decoder"] = _decoder(models_dir)
    write_json(json_file, report)
    figures = {key: value for key, value in report.items() if key != "environment"}
    write_results(results_dir, "demo", {"model": MINILM, "n": n}, report["environment"], figures)


def _show_first(report: Mapping[str, Any], is_idle: bool) -> None:
    from experiments.report.columns import DEMO
    from experiments.report.markdown import named

    if not is_idle:
        typer.echo("The machine was busy with other work: times below are no measurement.")
    title = f"{report['n']:,} requests, one at a time; figures of those after learning, from {report['learn'] + 1:,} on"
    show_table(title, [named(DEMO, row) for row in report["settings"]])
    for sentence in report["conclusion"]:
        typer.echo(sentence)


def _decoder(models_dir: Path) -> dict[str, Any] | None:
    """Run the second act; None if its model is not prepared."""
    from experiments.measures.demo import run_shared_prompt
    from experiments.models.loading import FIGURES, SMOLLM2, load

    if not (models_dir / SMOLLM2 / FIGURES).is_file():
        typer.echo(
            f"The second act, five users behind one system prompt, is left out: no {SMOLLM2} in {models_dir}. "
            f"Get it: llmcache prepare {SMOLLM2} --models-dir {models_dir}"
        )
        return None
    report = run_shared_prompt(load(SMOLLM2, "token", models_dir))
    users = report["users"]
    rows = [
        {
            "question": user["question"],
            "prompt tokens": user["n_prompt"],
            "from memory": user["n_prefix"],
            "first token, no cache, ms": f"{user['plain_ms']:.0f}",
            "with the cache, ms": f"{user['cache_ms']:.0f}",
            "same answer": "yes" if user["is_same"] else "no",
        }
        for user in users
    ]
    show_table("SmolLM2-135M-Instruct, one system prompt", rows)
    typer.echo(
        f"After the first user the first token came {report['speedup']:.2f} times as fast; {report['n_same']} of "
        f"{len(users)} answers are the same, token for token."
    )
    return report
