"""`llmcache calibrate`: learn from a log in a process of its own, and save the calibrated cache for serving."""

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from llmcache.cli import options
from llmcache.cli.log_file import Column, Log, read_log


def command(
    *,
    model: Annotated[str, typer.Option(help="A folder, or a name on the hub, as for `llmcache serve`.")],
    log: Log,
    out: Annotated[Path, typer.Option(metavar="SAVE", file_okay=False, help="Folder to save the calibrated cache to.")],
    column: Column = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Largest share of answers that may change. Default: as in --config, or 0.005.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="YAML file with the cache's settings.")
    ] = None,
    engine: options.Engine = None,
    draft: options.Draft = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; default: all cores.")] = None,
    models_dir: options.ModelsDir = None,
) -> None:
    """Calibrate on a log, print the bound, and save: serve it with `llmcache serve --save SAVE`, or `LLMCache.load`.

    Nothing is saved, and the exit status is 1, if no reuse keeps within --max-drop.
    """
    requests = read_log(log, column)
    import torch

    from llmcache import CacheConfig, LLMCache
    from llmcache.serving.loading import load_served

    given = {"max_drop": max_drop, "engine": engine, "draft": draft}
    asked = {name: one for name, one in given.items() if one is not None}
    settings = CacheConfig.make(config, **asked)  # refused before the model is loaded
    if threads is not None:
        torch.set_num_threads(threads)
    served = load_served(model, models_dir)
    if settings.answer == "auto":
        settings = CacheConfig.make(settings, answer=served.answer)
    cache = LLMCache.wrap(served.model, config=settings, tokenizer=served.tokenizer, answer_of=served.answer_of)
    typer.echo(f"computing {len(requests):,} requests, then calibrating", err=True)
    started = perf_counter()
    made = cache.calibrate(requests)
    typer.echo(f"{made}\n{perf_counter() - started:.0f} s in all")
    if made.chosen is None:
        raise typer.Exit(1)
    cache.save(out)
    typer.echo(f"saved: llmcache serve --model {model} --save {out}")
