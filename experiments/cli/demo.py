"""`llmcache demo`: what the cache saves and what it costs, on small real models: three jobs in a minute."""

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli.options import FiguresDir, interruptible, make_results_folder, write_results
from llmcache.cli.options import MODELS_VARIABLE
from llmcache.cli.output import check_writable, write_json
from llmcache.cli.table import show_table

if TYPE_CHECKING:
    from llmcache import Advice


def command(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="Picture of speed and of changed answers to write.")
    ] = Path("llmcache-demo.png"),
    is_long: Annotated[bool, typer.Option("--long", help="More requests and bounds: some ten minutes.")] = False,
    models_dir: Annotated[
        Path, typer.Option(envvar=MODELS_VARIABLE, help="Where `llmcache prepare smollm2` put the decoder.")
    ] = Path("models"),
    results_dir: FiguresDir = None,
) -> None:
    """Show three jobs with and without the cache: a support desk, a corpus embedded again, prompts that begin alike.

    Ctrl-C shows what is known by then.
    """
    for path in (json_file, plot):
        check_writable(path)
    make_results_folder(results_dir)
    from experiments.measures import demo
    from experiments.models.loading import FIGURES, MINILM, SMOLLM2, load
    from experiments.report.pictures import plot_ways, require_matplotlib
    from experiments.runs.read import was_idle
    from experiments.support.environment import describe
    from llmcache.lab import packaged_minilm

    require_matplotlib()
    environment = describe(0)  # before any work, which would count as load
    size = demo.LONG if is_long else demo.SHORT
    known: list[Advice] = []
    report: dict[str, Any] = {}
    loaded, started = load(MINILM), perf_counter()
    typer.echo(f"1 of 3: {size.n:,} requests to a support desk, all-MiniLM-L6-v2, by each way to answer them")
    try:
        with interruptible("interrupted: the rest is left out"):
            try:
                known.append(demo.desk(loaded, size, known.append))
            finally:  # also when interrupted
                if known:
                    report |= {"n": size.n, **known[-1].to_dict()}
                    typer.echo(f"{known[-1]}\n")
            if not was_idle(environment):
                typer.echo("The machine was busy with other work: times are no measurement.")
            plot_ways(report, plot, was_idle(environment))
            typer.echo(f"Plot: {plot}\n")
            typer.echo(
                f"2 of 3: {size.n_texts:,} texts embedded by sentence-transformers: alone, with the cache, again"
            )
            report["corpus"] = demo.corpus(packaged_minilm(), size)
            typer.echo(_of_corpus(report["corpus"]))
            is_prepared = (models_dir / SMOLLM2 / FIGURES).is_file()
            name = "SmolLM2-135M-Instruct" if is_prepared else "a decoder with GPT-2's shape and random weights"
            typer.echo(f"\n3 of 3: {name}, {len(demo.QUESTIONS)} users behind one system prompt")
            report["prompts"] = demo.prompts(
                load(SMOLLM2, "token", models_dir) if is_prepared else demo.untrained(loaded.tokenizer)
            )
            _show_prompts(report["prompts"])
    finally:
        if report:
            report |= {"is_partial": "prompts" not in report, "seconds": perf_counter() - started}
            write_json(json_file, report | {"environment": environment})
    write_results(results_dir, "demo", {"model": MINILM, "n": size.n, "is_long": is_long}, environment, report)


def _of_corpus(took: dict[str, Any]) -> str:
    return (
        f"the model alone {took['plain_s']:.1f} s; with the cache {took['first_s']:.1f} s, and the second time "
        f"{took['second_s']:.1f} s: {took['speedup']:.1f} times as fast; vectors differ by at most "
        f"{took['largest_difference']:.0e}"
    )


def _show_prompts(report: dict[str, Any]) -> None:
    rows = [
        {
            "question": user["question"],
            "prompt tokens": user["n_prompt"],
            "from memory": user["n_prefix"],
            "first token, no cache, ms": f"{user['plain_ms']:.0f}",
            "with the cache, ms": f"{user['cache_ms']:.0f}",
            "same answer": "yes" if user["is_same"] else "no",
        }
        for user in report["users"]
    ]
    show_table("Time to the first token", rows)
    typer.echo(
        f"After the first user the first token came {report['speedup']:.1f} times as fast; {report['n_same']} of "
        f"{len(rows)} answers are the same, token for token."
    )
