"""`llmcache keys`: manage the API keys of a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from llmcache.cli.output import naming
from llmcache.cli.table import show_table
from llmcache.errors import ConfigError

if TYPE_CHECKING:
    from llmcache.serving.keys import Scope

_File: TypeAlias = Annotated[Path, typer.Argument(metavar="FILE", help="Key file, in YAML.")]
_Name: TypeAlias = Annotated[str, typer.Option(help="Name of the key in logs and metrics.")]


def add(
    file: _File,
    name: _Name,
    namespace: Annotated[
        str, typer.Option(help="Where its requests are stored and looked up. `public` is read by all; needs --admin.")
    ],
    admin: Annotated[
        bool, typer.Option("--admin", help="May also see metrics and the page, purge, disable and drain.")
    ] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="May see metrics and the page, and nothing else.")] = False,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Maximum concurrent requests.")] = None,
) -> None:
    """Make a key and print it once: the file holds only its hash. A running server accepts it within a second.

    The file is rewritten: comments in it are lost. Only its owner may read it.
    """
    from llmcache.serving.keys import add_key

    if admin and metrics:
        raise ConfigError("give --admin or --metrics: an admin may see metrics as well")
    scopes: list[Scope] = ["metrics"] if metrics else ["infer", "admin"] if admin else ["infer"]
    with naming(file):
        key = add_key(file, name, namespace, scopes, max_concurrent)
    typer.echo(key)


def remove(file: _File, name: _Name) -> None:
    """Remove a key. A running server refuses it within a second, and ends its generations at their next token."""
    from llmcache.serving.keys import remove_key

    with naming(file):
        remove_key(file, name)


def show(file: _File) -> None:
    """List the keys with their namespaces, scopes and limits."""
    from llmcache.serving.keys import read_keys

    show_table(str(file), [one.model_dump(exclude={"hash"}) for one in read_keys(file)], n_names=3)
