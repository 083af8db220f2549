"""Write `docs/cli.md` from the commands' own `--help` and `docs/settings.md` from `CacheConfig`, or check both.

Run it as `python -m tests.reference [--check] docs`.
"""

import argparse
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from typer.testing import CliRunner

from llmcache.cli.main import COMMANDS, app
from llmcache.config import CacheConfig
from llmcache.memory.index import INDEXES
from llmcache.memory.policies import POLICIES
from llmcache.memory.stores import STORES
from llmcache.paper.codecs import CODECS
from llmcache.paper.fingerprints import FINGERPRINTS
from llmcache.support.registry import Component, Registry

HEADER = """\
# Command line

Made by `make docs` from the commands' own `--help`; do not edit.
"""
SETTINGS_HEADER = """\
# Settings

Made by `make docs` from `llmcache.CacheConfig`; do not edit.

Settings are keyword arguments of `LLMCache.wrap`, or keys of a YAML file or mapping given as `config`. An exchangeable
part is given by its name, or as `{name: ..., option: value}`. An unknown key or name raises an error that lists the
known ones.
"""


def render() -> str:
    """Return the whole reference as Markdown: `llmcache` itself, then each command in the order of `COMMANDS`."""
    return "\n".join([HEADER, *(_section(path) for path in [(), *(tuple(name.split()) for name in COMMANDS)])])


def _section(path: tuple[str, ...]) -> str:
    title = " ".join(("llmcache", *path))
    # The runner fixes the width at 80 columns and strips colours, whatever the terminal is.
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="llmcache", catch_exceptions=False)
    text = "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
    return f"## {title}\n\n```text\n$ {title} --help\n{text}\n```\n"


def render_settings() -> str:
    """Return every setting as Markdown: type, default, description, and the parts it can select."""
    descriptions = _attributes(inspect.getdoc(CacheConfig) or "")
    parts = {registry.kind: registry for registry in (FINGERPRINTS, INDEXES, POLICIES, STORES, CODECS)}
    sections = []
    for name, field in CacheConfig.model_fields.items():
        default = field.default.name if isinstance(field.default, Component) else field.default
        default = default.model_dump() if isinstance(default, BaseModel) else default
        lines = [f"## `{name}`", f"Type `{_kind(field.annotation)}`, default `{_literal(default)}`."]
        lines.append(descriptions[name])
        if name in parts:
            lines.append("\n".join(_table(parts[name])))
        sections.append("\n\n".join(lines) + "\n")
    return "\n".join([SETTINGS_HEADER, *sections])


def _attributes(docstring: str) -> dict[str, str]:
    """Return the descriptions of a docstring's attributes, by name."""
    found: dict[str, list[str]] = {}
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        if head := re.match(r"    (\w+): (.*)", line):
            found[head[1]] = [head[2]]
        elif line.strip():
            found[next(reversed(found))].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def _kind(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return "name | {name, options}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    if get_origin(annotation) is Literal:
        return " | ".join(map(_literal, get_args(annotation)))
    if get_origin(annotation) is types.UnionType or "Union" in str(get_origin(annotation)):
        return " | ".join(map(_kind, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"list[{_kind(get_args(annotation)[0])}]"
    return "None" if annotation is type(None) else inspect.formatannotation(annotation).replace("typing.", "")


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(list(value) if isinstance(value, tuple) else value)


def _table(registry: Registry[Any]) -> Iterator[str]:
    """Yield a row for each part: its name, its options with their defaults, the first sentence of its docstring."""
    yield "| name | options | what it is |"
    yield "|---|---|---|"
    for name, made in registry.items():
        summary = (inspect.getdoc(made) or "").partition("\n\n")[0].replace("\n", " ").removeprefix(f"`{name}`: ")
        sentence = re.split(r"(?<=\.)\s", summary)[0]
        yield f"| `{name}` | {', '.join(_options(made, len(registry.given)))} | {sentence} |"


def _options(made: Callable[..., Any], n_given: int) -> Iterator[str]:
    """Yield the options of a part that a setting can give; callables, such as clocks, are left out."""
    for parameter in list(inspect.signature(made).parameters.values())[n_given:]:
        if "Callable" in str(parameter.annotation):
            continue
        has_default = parameter.default is not parameter.empty
        yield f"`{parameter.name}={_literal(parameter.default)}`" if has_default else f"`{parameter.name}`"


#: Generated pages, by file name.
PAGES: Mapping[str, Callable[[], str]] = {"cli.md": render, "settings.md": render_settings}


def main(args: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit code: 1 when `--check` finds one stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description="Write the generated pages.")
    parser.add_argument("folder", type=Path, help="where the Markdown files are")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is stale")
    options = parser.parse_args(args)

    stale = 0
    for name, make in PAGES.items():
        path, expected = options.folder / name, make()
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(expected, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != expected:
            sys.stderr.write(f"{path} is stale: run `make docs`\n")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
