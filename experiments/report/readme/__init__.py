"""The tables of README.md, from files of results alone.

A table of figures has a mark before it, `<!-- table: NAME -->`, and the README has no figure in a table without one:
`tests/test_readme.py` holds both against the files. After a measurement write the tables again:

    python -m experiments.report.readme
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from experiments.report.readme import claims, costs, limits, prompts, reuse, ways
from llmcache.errors import ConfigError

#: Folder of results -> lines of a table, by the name in its mark.
TABLES: Mapping[str, Callable[[Path], str]] = {
    "demo": costs.demo,
    "latency": costs.latency,
    "calibrated": reuse.calibrated,
    "ways": ways.ways,
    "errors": ways.errors,
    "hindsight": reuse.hindsight,
    "bound": reuse.bound,
    "time_order": ways.time_order,
    "service": reuse.service,
    "second_pass": reuse.second_pass,
    "speed": reuse.speed,
    "limits": limits.limits,
    "paws": limits.paws,
    "first_token": prompts.first_token,
    "parity": prompts.parity,
    "generation": prompts.generation,
    "claims": claims.verdicts,
    "costs": costs.costs,
}
MARK = re.compile(r"<!-- table: (\w+) -->\n((?:\|.*\n)*)")


def fill(text: str, results_dir: Path) -> str:
    """The text with the lines of every marked table as the files have them.

    Raises:
        ConfigError: A mark names no table, or its files are not there.
    """

    def renew(found: re.Match[str]) -> str:
        name = found[1]
        if name not in TABLES:
            raise ConfigError(f"README: no table {name!r}; known: {', '.join(TABLES)}")
        return f"<!-- table: {name} -->\n{TABLES[name](results_dir)}\n"

    return MARK.sub(renew, text)


def figures_without_a_file(text: str) -> Iterator[str]:
    """Lines of tables without a mark that hold a digit outside code and the targets of links."""
    for line in MARK.sub("", text).splitlines():
        if line.startswith("|") and re.search(r"\d", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
            yield line
