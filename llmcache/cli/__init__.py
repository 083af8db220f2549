"""The `llmcache` command.

One command a file, each with a function `command` that parses, calls the library and prints. It imports torch,
transformers and FAISS inside that function, so that `llmcache --help` answers at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import typer

from llmcache import __version__
from llmcache.cli import (
    bench_latency,
    bench_memory,
    calibrate,
    demo,
    generate,
    info,
    prepare,
    repl,
    report,
    run,
    sweep,
)
from llmcache.errors import LLMCacheError

#: Groups of commands and what they are for.
GROUPS: Final[Mapping[str, str]] = {"bench": "Measure speed and memory on this machine."}

#: Every command, in the order of `llmcache --help`; two words are a group and its command.
COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "demo": demo.command,
    "prepare": prepare.command,
    "calibrate": calibrate.command,
    "run": run.command,
    "sweep": sweep.command,
    "report": report.command,
    "generate": generate.command,
    "repl": repl.command,
    "bench latency": bench_latency.command,
    "bench memory": bench_memory.command,
    "info": info.command,
}

#: What a user can put right: shown as one line, without a traceback.
USER_ERRORS: Final = (LLMCacheError, OSError)


def build_app(commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """Make the command line of a table of commands."""
    app = typer.Typer(
        callback=_global_options,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # plain text: the same on every terminal and in docs/cli.md, and nothing to load
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    groups: dict[str, typer.Typer] = {}
    for name, function in commands.items():
        *group, word = name.split()
        for part in group:
            if part not in groups:
                groups[part] = typer.Typer(help=GROUPS[part], no_args_is_help=True, rich_markup_mode=None)
                app.add_typer(groups[part], name=part)
        (groups[group[0]] if group else app).command(word)(function)
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        args: Arguments after the program's name. None takes the process's own.

    Raises:
        SystemExit: Always: 0 when done, 2 for what the user can put right.
    """
    try:
        app(args=args, prog_name="llmcache")
    except USER_ERRORS as error:
        typer.echo(f"llmcache: {_one_line(error)}", err=True)
        raise SystemExit(2) from None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    else:
        message = str(error)
    return " ".join(message.split()) or type(error).__name__


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"llmcache {__version__}")
        raise typer.Exit


def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reuse the hidden states of Hugging Face transformers across requests."""


app = build_app(COMMANDS)
