"""The `llmcache` command: every command that is installed, made one application.

Other packages add commands through the entry point group `llmcache.commands`, each entry a mapping like `OWN`; the
experiments of a checkout do.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from llmcache import __version__
from llmcache.cli import generate, info, keys, repl, serve
from llmcache.errors import LLMCacheError

Commands: TypeAlias = Mapping[str, Callable[..., None]]

#: Where the experiments are, if anywhere.
CHECKOUT: Final = Path(__file__).parents[2]

#: Groups of commands and what they are for.
GROUPS: Final[Mapping[str, str]] = {
    "bench": "Measure speed and memory on this machine.",
    "keys": "Keys of a server: who may use it.",
}

#: Commands of the library; two words are a group and its command.
OWN: Final[Commands] = {
    "generate": generate.command,
    "repl": repl.command,
    "serve": serve.command,
    "keys add": keys.add,
    "keys remove": keys.remove,
    "keys list": keys.show,
    "info": info.command,
}


def find_commands() -> Commands:
    """Every command that is installed, in the order of `llmcache --help`: ours last."""
    found: dict[str, Callable[..., None]] = {}
    for entry in entry_points(group="llmcache.commands"):
        # The wheel holds the library alone, but names the experiments of the checkout that it was built from. Another
        # package called `experiments` is none of ours.
        is_ours = entry.dist is not None and entry.dist.name == "llmcache-torch"
        if not is_ours or (CHECKOUT / "pyproject.toml").is_file():
            found |= entry.load()
    return {**found, **OWN}


COMMANDS: Final[Commands] = find_commands()

#: What a user can put right: shown as one line, without a traceback.
USER_ERRORS: Final = (LLMCacheError, OSError)


def build_app(commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
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
                groups[part] = typer.Typer(help=GROUPS.get(part), no_args_is_help=True, rich_markup_mode=None)
                app.add_typer(groups[part], name=part)
        (groups[group[0]] if group else app).command(word)(function)
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: with 0 when done, 2 for what the user can put right."""
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
