"""Write `docs/cli.md` from the commands' own `--help`, or tell whether it is up to date.

Run it as `python -m llmcache.cli.reference [--check] docs/cli.md`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from llmcache.cli.main import COMMANDS, app

HEADER = """\
# Command line

Made by `make docs` from the commands' own `--help`; do not edit.
"""


def render() -> str:
    """Return the whole reference as Markdown: `llmcache` itself, then each command in the order of the table."""
    return "\n".join([HEADER, *(_section(path) for path in [(), *(tuple(name.split()) for name in COMMANDS)])])


def _section(path: tuple[str, ...]) -> str:
    title = " ".join(("llmcache", *path))
    # The runner fixes the width at 80 columns and strips colours, whatever the terminal is.
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="llmcache", catch_exceptions=False)
    text = "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
    return f"## {title}\n\n```text\n$ {title} --help\n{text}\n```\n"


def main(args: Sequence[str] | None = None) -> int:
    """Write or check the file; return the exit code: 1 when `--check` finds it stale."""
    parser = argparse.ArgumentParser(prog="python -m llmcache.cli.reference", description="Write docs/cli.md.")
    parser.add_argument("path", type=Path, help="the Markdown file")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the file is stale")
    options = parser.parse_args(args)

    expected = render()
    if not options.check:
        options.path.parent.mkdir(parents=True, exist_ok=True)
        options.path.write_text(expected, encoding="utf-8")
    elif not options.path.is_file() or options.path.read_text(encoding="utf-8") != expected:
        sys.stderr.write(f"{options.path} is stale: run `make docs`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
