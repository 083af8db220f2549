"""`llmcache bench memory`: memory per entry, and rate of storing."""

from pathlib import Path
from typing import Annotated

import typer

from llmcache.cli.output import check_writable, write_json


def command(
    entries: Annotated[int, typer.Option(min=1000, help="Entries to store.")] = 100_000,
    width: Annotated[int, typer.Option(min=8, help="Hidden width, a multiple of 8.")] = 768,
    seq_len: Annotated[int, typer.Option(min=4, help="Tokens a request.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a call.")] = 8,
    payload: Annotated[str, typer.Option(help="What entries keep: cls, last, mean or sequence.")] = "cls",
    compression: Annotated[str, typer.Option(help="Codec: none, fp16, int8, pca or autoencoder.")] = "fp16",
    fingerprint: Annotated[
        str, typer.Option(help="mean, simhash (leaves the fingerprint out of the figure) or pca.")
    ] = "simhash",
    seed: Annotated[int, typer.Option(help="Of random weights and requests.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure the memory of an entry by the growth of the process, and the rate of storing."""
    from experiments.measures.bench.memory import Settings, measure
    from experiments.support.progress import Progress

    settings = Settings(entries, width, seq_len, batch_size, payload, compression, fingerprint, seed)
    check_writable(json_file)
    with Progress() as progress:
        figures = measure(settings, progress.advance)
    for name, value in figures.items():
        typer.echo(f"{name:<26}{value:,.1f}" if isinstance(value, float) else f"{name:<26}{value}")
    write_json(json_file, figures)
