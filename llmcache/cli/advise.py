"""`llmcache advise`: which way to answer pays on one's own log."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcache.cli.log_file import Column, Log, read_log
from llmcache.cli.options import ModelsDir
from llmcache.cli.output import INTERRUPTED, check_writable, write_json
from llmcache.errors import ConfigError

if TYPE_CHECKING:
    from llmcache import Advice, LLMCache


def command(
    *,
    model: Annotated[str, typer.Option(help="A classifier, reranker or decoder: a folder, or a name on the hub.")],
    log: Log,
    column: Column = None,
    onnx: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Your own ONNX file; --model then has its tokenizer."),
    ] = None,
    max_drop: Annotated[
        float, typer.Option(help="Largest share of answers that the recommended way may change, over 0, under 1.")
    ] = 0.005,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1, help="Time of the model alone, which says how many requests are served: at least 100, prompts 24."
        ),
    ] = 20.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; default: all cores.")] = None,
    models_dir: ModelsDir = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Replay a log by each way to answer it, print a table, and recommend one: maybe one without llmcache.

    Half of the log, or as much as the bound needs, is learned from, and later requests are served. It takes a minute or
    two for a small model. Ctrl-C prints what is known by then.
    """
    check_writable(json_file)
    requests = read_log(log, column)
    import torch

    from llmcache.config import CacheConfig

    CacheConfig.make(None, max_drop=max_drop)  # refused before the model is loaded
    if threads is not None:
        torch.set_num_threads(threads)
    known: list[Advice] = []
    is_whole = False
    try:
        cache = _wrap(model, onnx, models_dir)
        known.append(cache.advise(requests, max_drop=max_drop, seconds=seconds, on_way=known.append))
        is_whole = True
    except KeyboardInterrupt:
        typer.echo("llmcache: interrupted", err=True)
    if known:
        typer.echo(str(known[-1]))
        if onnx is not None and any(Path(model).glob("*.safetensors")):
            typer.echo(
                f"\n{model} holds the PyTorch model: without --onnx, an int8 draft within the bound is tried as well."
            )
        write_json(json_file, known[-1].to_dict())
    if not is_whole:
        raise typer.Exit(INTERRUPTED)


def _wrap(model: str, onnx: Path | None, models_dir: Path | None) -> "LLMCache":
    """Wrap a model, or the session of a user's own file."""
    from llmcache import LLMCache

    if onnx is None:
        from llmcache.serving.loading import load_served

        served = load_served(model, models_dir)
        about: Any = {"tokenizer": served.tokenizer, "answer_of": served.answer_of, "answer": served.answer}
        return LLMCache.wrap(served.model, **about)
    from llmcache.engines.onnx import find_missing, open_session
    from llmcache.models.loading import load_tokenizer

    if missing := find_missing():
        raise ConfigError(f"--onnx needs {missing}: pip install 'llmcache-torch[onnx]'")
    try:
        session: Any = open_session(onnx)
    except Exception as error:  # ONNX Runtime's own classes
        raise ConfigError(f"--onnx {onnx}: {error}") from error
    return LLMCache.wrap(session, tokenizer=load_tokenizer(model, models_dir))
