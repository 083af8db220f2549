"""`llmcache generate`: one prompt, one answer."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llmcache.cli import options
from llmcache.cli.output import check_writable, write_json


@options.taking(options.SAMPLING)
def command(
    *,
    model: options.Model,
    prompt: Annotated[str, typer.Option(help="Question, or text to continue.")],
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    truncate: options.TruncateOption = "error",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print timings.")] = False,
    models_dir: options.ModelsDir = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write answer and figures here.")
    ] = None,
    **drawn: Any,
) -> None:
    """Answer one prompt, token by token."""
    check_writable(json_file)
    sampling = options.make_sampling(**drawn)
    from llmcache.generation import Chat
    from llmcache.models.loading import load_causal

    loaded = load_causal(model, models_dir)
    chat = Chat(loaded.model, loaded.tokenizer, sampling, system=system, truncate=truncate)
    for piece in chat.ask(prompt):
        typer.echo(piece, nl=False)
    typer.echo()
    turn = chat.turn()
    options.show_turn(turn, verbose)
    made, times = turn.generation, turn.generation.times
    assert times is not None
    figures = {name: getattr(made, name) for name in ("tokens", "logprobs", "stopped_by", "n_prompt", "kv_nbytes")}
    figures |= {name: getattr(times, name) for name in ("ttft_s", "tpot_s", "itl_s", "e2el_s")}
    write_json(json_file, {"text": turn.text, **figures})
