"""`llmcache keys`: the keys of a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from llmcache.cli.table import show_table

if TYPE_CHECKING:
    from llmcache.serving.keys import Scope

_File: TypeAlias = Annotated[Path, typer.Argument(metavar="FILE", help="File of keys, as YAML.")]
_Name: TypeAlias = Annotated[str, typer.Option(help="Of the key, in logs and metrics.")]


def add(
    file: _File,
    name: _Name,
    namespace: Annotated[
        str, typer.Option(help="Where its requests are stored and found. `public` is read by all; needs --admin.")
    ],
    admin: Annotated[
        bool, typer.Option("--admin", help="May also see metrics and the page, purge, disable and drain.")
    ] = False,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests under way at once.")] = None,
) -> None:
    """Make a key and print it, this once: the file gets its hash only. A server that runs takes it within a second.

    The file is written anew: comments in it are lost. Only its owner may read it.
    """
    from llmcache.serving.keys import add_key

    scopes: list[Scope] = ["infer", "admin"] if admin else ["infer"]
    typer.echo(add_key(file, name, namespace, scopes, max_concurrent))


def remove(file: _File, name: _Name) -> None:
    """Remove a key. A server that runs refuses it within a second; requests that are under way end."""
    from llmcache.serving.keys import remove_key

    remove_key(file, name)


def show(file: _File) -> None:
    """List keys: what they are called and what they may do."""
    from llmcache.serving.keys import read_keys

    show_table(str(file), [one.model_dump(exclude={"hash"}) for one in read_keys(file)], n_names=3)
