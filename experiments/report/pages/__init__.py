"""The tables of README.md and docs/results.md, from files of results alone.

A table of figures has a mark before it, `<!-- table: NAME -->`, and no page has figures in a table without one:
`tests/test_readme.py` holds the pages against the files. After a measurement write the tables again:

    python -m experiments.report.pages
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.report.pages import claims, costs, modes, policies, prompts, reuse, serving, ways
from llmcache import ConfigError

#: Folder of results -> lines of a table, by the name in its mark.
TABLES: Mapping[str, Callable[[Path], str]] = {
    "modes": modes.modes,
    "demo": costs.demo,
    "latency": costs.latency,
    "compiled": costs.compiled,
    "calibrated": reuse.calibrated,
    "ways": ways.ways,
    "errors": ways.errors,
    "hindsight": reuse.hindsight,
    "bound": reuse.bound,
    "time_order": ways.time_order,
    "service": reuse.service,
    "rates": reuse.rates,
    "second_pass": reuse.second_pass,
    "first_token": prompts.first_token,
    "prefix_limit": prompts.prefix_limit,
    "parity": prompts.parity,
    "generation": prompts.generation,
    "policies": policies.policies,
    "serve_load": serving.serve_load,
    "serve_soak": serving.serve_soak,
    "ray_replicas": serving.ray_replicas,
    "hostile": serving.hostile,
    "store_faults": serving.store_faults,
    "claims": claims.verdicts,
    "costs": costs.costs,
}
#: Pages that have them, by the path in the checkout; and the way from the page to the root.
PAGES: Mapping[str, str] = {"README.md": "", "docs/results.md": "../"}
MARK = re.compile(r"<!-- table: (\w+) -->\n((?:\|.*\n)*)")


def lines_of(name: str, results_dir: Path, root: str = "") -> str:
    """The lines of a table, as the files have them; links begin with `root`, the way to the root of the checkout."""
    if name not in TABLES:
        raise ConfigError(f"no table {name!r}; known: {', '.join(TABLES)}")
    return TABLES[name](results_dir).replace("](configs/", f"]({root}configs/")


def fill(text: str, results_dir: Path, root: str = "") -> str:
    """The text with the lines of every marked table as the files have them; see `lines_of`."""

    def renew(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{lines_of(found[1], results_dir, root)}\n"

    return MARK.sub(renew, text)
