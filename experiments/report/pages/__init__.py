"""Tables of README.md and the pages in docs/results/, made from result files only.

A table of figures is preceded by a mark, `<!-- table: NAME -->`; no page has figures in a table without one.
`tests/test_readme.py` compares the pages with the files. After a measurement, write the tables again:

    python -m experiments.report.pages
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.report import columns as show
from experiments.report import tables
from experiments.report.claims import judge, verdicts
from experiments.report.pages import card, costs, jobs, modes, streams
from experiments.report.pages.files import all_of, any_of, claims_runs, runs_of
from experiments.report.pictures import PICTURES, save
from llmcache import ConfigError

by_row, TRUST = tables.by_row, streams.TRUST


def claims(results_dir: Path) -> str:
    runs = claims_runs(results_dir)
    return verdicts(judge(runs, {}), runs)


#: Functions from the results folder to a table's lines, by the name in its mark.
TABLES: Mapping[str, Callable[[Path], str]] = {
    "first_screen": streams.first_screen,
    "jobs": jobs.jobs,
    "advice": any_of(by_row(show.ADVICES), "advise", is_timed=True),
    "beside": any_of(by_row(show.BESIDE), "beside", is_timed=True),
    "overhead": any_of(by_row(show.OVERHEADS), "overhead", is_timed=True),
    "modes": modes.modes,
    "demo": costs.demo,
    "latency": costs.latency,
    "compiled": any_of(tables.compiled, "compiled", is_timed=True),
    "calibrated": all_of(tables.calibrated, *TRUST),
    "ways": all_of(tables.ways, *TRUST),
    "errors": all_of(tables.errors, *TRUST),
    "hindsight": all_of(tables.hindsight, *TRUST),
    "bound": all_of(by_row(show.BOUND, tables.figure("claims")), "trust_bound"),
    "time_order": streams.time_order,
    "bound_draft": any_of(tables.TABLES["bound"], "trust_bound_draft"),
    "audit": all_of(tables.TABLES["audit"], "audit"),
    "audit_ratios": all_of(by_row(show.DRAWING_RATIOS, tables.compared), "audit"),
    "service": streams.service,
    "rates": streams.rates,
    "second_pass": any_of(by_row(show.SECOND_PASS), "service_second_pass"),
    "known": any_of(by_row(show.KNOWN), "service_known", "service_nightly"),
    "first_token": costs.first_token,
    "prefix_limit": any_of(tables.limits, "prefix_limit"),
    "parity": all_of(
        tables.TABLES["parity"], "prefix_parity", "prefix_parity_bfloat16", "prefix_parity_states", "prefix_soak"
    ),
    "parity_of_batches": all_of(by_row(show.PARITY_OF_BATCHES, lambda run: [run.metrics]), "prefix_parity_batches"),
    "generation": all_of(tables.TABLES["decode"], "prefix_decode"),
    "prefix_tree": all_of(tables.TABLES["tree"], "prefix_tree"),
    "prefix_turns": any_of(tables.TABLES["turns"], "prefix_turns", is_timed=True),
    "lm_eval": all_of(tables.TABLES["lm_eval"], "lm_eval"),
    "policies": all_of(tables.policies, "policies"),
    "serve_load": any_of(by_row(show.LOADED), "serve_load", is_timed=True),
    "serve_load_engines": any_of(by_row(show.LOADED), "serve_load_engines", is_timed=True),
    "serve_streams": any_of(by_row(show.STREAMED), "serve_streams", is_timed=True),
    "serve_soak": any_of(by_row(show.SOAKED), "serve_soak", is_timed=True),
    "ray_replicas": any_of(by_row(show.REPLICAS), "ray_replicas"),
    "hostile": costs.hostile,
    "store_faults": any_of(by_row(show.FAULTS), "store_faults"),
    "engines": any_of(by_row(show.ENGINES), "engines", is_timed=True),
    "engines_xeon": any_of(by_row(show.ENGINES), "engines_xeon", is_timed=True),
    "engines_bert": any_of(by_row(show.ENGINES_BERT), "engines_bert", "engines_bert_short", is_timed=True),
    "engines_batch": any_of(by_row(show.ENGINES), "engines_batch", is_timed=True),
    "engines_parity": any_of(by_row(show.ENGINE_PARITY), "engines_parity"),
    "claims": claims,
    "thresholds": all_of(tables.swept, "fig5_tau"),
    "ablation_fingerprint": all_of(tables.swept, "ablation_fingerprint"),
    "ablation_layers": all_of(by_row(show.SERVED, tables.methods), "ablation_layers"),
    "ablation_eviction": all_of(tables.observed, "ablation_eviction"),
    "costs": costs.costs,
    "first_hit": all_of(by_row(show.COMMANDS), "first_hit"),
    **card.TABLES,
}
#: Experiments in the picture of each page.
SHOWN: Mapping[str, Sequence[str]] = {
    "speed": ("engines",),
    "quality": TRUST,
    "bound": ("trust_bound", "trust_bound_draft"),
    "prefixes": ("prefix_limit",),
    "serving": ("serve_load", "serve_load_engines"),
    "stores": ("policies",),
    "paper": ("fig5_tau",),
}
#: Pictures of times, which leave out runs on a busy machine; without others, the old picture stays.
TIMED = ("speed", "serving")
#: Pages with tables, by path in the checkout, and the relative path from the page to the root.
PAGES: Mapping[str, str] = {
    "README.md": "",
    "docs/inside/calibration.md": "../../",
    **{f"docs/results/{name}.md": "../../" for name in ("index", "gpu", *SHOWN)},
}
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


def draw(results_dir: Path, folder: Path) -> None:
    for name, groups in SHOWN.items():
        runs = [run for run in runs_of(results_dir, *groups) if run.is_timed or name not in TIMED]
        if runs:
            save(PICTURES[runs[0].measure](runs), folder / f"{name}.svg")
