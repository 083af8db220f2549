"""The `llmcache` command: one application of all installed commands.

Other packages add commands through the entry point group `llmcache.commands`, each entry a mapping like `OWN`, as the
experiments of a checkout do.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from llmcache import __version__
from llmcache.cli import advise, calibrate, generate, info, keys, repl, serve
from llmcache.errors import LLMCacheError

Commands: TypeAlias = Mapping[str, Callable[..., None]]

#: Root of the checkout, which has the experiments; without meaning in an installed wheel.
CHECKOUT: Final = Path(__file__).parents[2]

#: Help texts of command groups.
GROUPS: Final[Mapping[str, str]] = {
    "bench": "Measure speed and memory on this machine.",
    "keys": "Manage the API keys of a server.",
}

#: Commands of the library; a name of two words is a group and its command.
OWN: Final[Commands] = {
    "advise": advise.command,
    "calibrate": calibrate.command,
    "generate": generate.command,
    "repl": repl.command,
    "serve": serve.command,
    "keys add": keys.add,
    "keys remove": keys.remove,
    "keys list": keys.show,
    "info": info.command,
}


def find_commands() -> Commands:
    """Return all installed commands in the order of `llmcache --help`: the library's own last."""
    found: dict[str, Callable[..., None]] = {}
    for entry in entry_points(group="llmcache.commands"):
        # The wheel contains only the library, but its entry point names the checkout's `experiments`. Skip it outside a
        # checkout: another package may have that name.
        is_ours = entry.dist is not None and entry.dist.name == "llmcache-torch"
        if not is_ours or (CHECKOUT / "pyproject.toml").is_file():
            found |= entry.load()
    return {**found, **OWN}


COMMANDS: Final[Commands] = find_commands()

#: Errors that a user can fix, printed as one line without a traceback.
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
    """Run the command line and exit: with 0 on success, 2 for an error that the user can fix."""
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
