"""Tables of README.md and the pages in docs/results/, made from result files only.

A table of figures is preceded by a mark, `<!-- table: NAME -->`; no page has figures in a table without one.
`tests/test_readme.py` compares the pages with the files. After a measurement, write the tables again:

    python -m experiments.report.pages
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.report.pages import claims, costs, engines, modes, policies, prompts, reuse, serving, ways
from experiments.report.pages.pictures import PICTURES
from llmcache import ConfigError

#: Functions from the results folder to a table's lines, by the name in its mark.
TABLES: Mapping[str, Callable[[Path], str]] = {
    "first_screen": engines.first_screen,
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
    "bound_draft": reuse.bound_draft,
    "service": reuse.service,
    "rates": reuse.rates,
    "second_pass": reuse.second_pass,
    "known": reuse.known,
    "first_token": prompts.first_token,
    "prefix_limit": prompts.prefix_limit,
    "parity": prompts.parity,
    "generation": prompts.generation,
    "policies": policies.policies,
    "serve_load": serving.serve_load,
    "serve_load_engines": serving.serve_load_engines,
    "serve_soak": serving.serve_soak,
    "ray_replicas": serving.ray_replicas,
    "hostile": serving.hostile,
    "store_faults": serving.store_faults,
    "engines": engines.engines,
    "engines_bert": engines.engines_bert,
    "engines_batch": engines.engines_batch,
    "engines_parity": engines.engines_parity,
    "claims": claims.verdicts,
    "costs": costs.costs,
    "first_hit": costs.first_hit,
}
#: Pages with tables, by path in the checkout, and the relative path from the page to the root.
PAGES: Mapping[str, str] = {"README.md": "", **{f"docs/results/{name}.md": "../../" for name in ("index", *PICTURES)}}
MARK = re.compile(r"<!-- table: (\w+) -->\n((?:\|.*\n)*)")


def lines_of(name: str, results_dir: Path, root: str = "") -> str:
    """Return the lines of a table from the files; links begin with `root`, the path to the root of the checkout."""
    if name not in TABLES:
        raise ConfigError(f"no table {name!r}; known: {', '.join(TABLES)}")
    return TABLES[name](results_dir).replace("](configs/", f"]({root}configs/")


def fill(text: str, results_dir: Path, root: str = "") -> str:
    """Return the text with every marked table replaced by its lines from the files; see `lines_of`."""

    def renew(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{lines_of(found[1], results_dir, root)}\n"

    return MARK.sub(renew, text)
