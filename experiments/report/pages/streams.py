"""Tables of streams served in whole passes: the first screen, speed-ups beside their bound, and time order."""

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from experiments.report import columns as show
from experiments.report.markdown import MISSING, columns, missing, percent, row_of, table
from experiments.report.pages.files import runs_if_any, runs_of
from experiments.report.tables import SUMMARY, drops_of, figure, found_of, hits_and_changed, rows_of
from experiments.runs.read import Run, grouped

TRUST = ("trust_banking77", "trust_hwu64", "trust_snips")
#: Orders of requests, and the experiment that serves such a stream live.
ORDERS = {"shuffled": None, "bursts": "trust_bursts", "repeats": "trust_repeats"}
#: Streams of `configs/trust_bound_time.yaml`, and those served live in time order.
STREAMS, LIVE = ("banking77", "hwu64", "snips"), ("banking77", "hwu64")
#: Streams of whole passes in the configurations, by experiment.
SERVICES = {
    "service_small": STREAMS,
    "service_exact": (*STREAMS, "banking77-repeats", "support_desk"),
}
RATES = {
    "service_rates": "calibrated",
    "service_rates_unaudited": "calibrated, not audited",
    "service_rates_exact": "exact repeats",
}


def first_screen(results_dir: Path) -> str:
    """Return the README's table of one stream: what `llmcache advise` printed on it."""
    runs = [run for run in runs_if_any(results_dir, "advise") if run.is_timed and run.task == "banking77"]
    return columns(show.ADVICE, runs[0].metrics["summary"]) if runs else missing(tuple(show.ADVICE), "advise")


def service(results_dir: Path) -> str:
    """Return the table of whole passes by stream and number of threads; streams not measured are marked."""
    rows: list[Sequence[Any]] = []
    for group, tasks in SERVICES.items():
        found = grouped(runs_if_any(results_dir, group), "task")
        kind = "calibrated" if group == "service_small" else "exact repeats"
        for task in dict.fromkeys((*tasks, *found)):
            if task in found:
                rows += [row_of(show.PASSES, row) for row in rows_of(found[task], SUMMARY)]
            else:
                rows.append((task, kind, "", MISSING, *[""] * (len(show.PASSES) - 4)))
    return table(tuple(show.PASSES), rows)


def rates(results_dir: Path) -> str:
    """Return the table of speed-ups against the bound at set hit rates; kinds of reuse not measured are marked."""
    rows: list[Sequence[Any]] = []
    for group, kind in RATES.items():
        found = rows_of(runs_if_any(results_dir, group), SUMMARY)
        reuse = f"[{kind}](configs/{group}.yaml)"
        found.sort(key=itemgetter("hit_rate_set", "threads"))
        rows += [(reuse, *row_of(show.RATED, row)) for row in found]
        if not found:
            rows.append((reuse, "", "", MISSING, *[""] * (len(show.RATED) - 3)))
    return table(("reuse", *show.RATED), rows)


def time_order(results_dir: Path) -> str:
    """Return the table of broken bounds by order of requests, and the live results for streams in that order."""
    bounds = runs_if_any(results_dir, "trust_bound_time")
    shuffled = runs_of(results_dir, *TRUST)
    drops = drops_of(shuffled)
    heads = [f"target {percent(drop)}: {what}" for drop in drops for what in ("over it", "hits", "changed")]
    rows = []
    for task in STREAMS:
        for order, group in ORDERS.items():
            stream = task if group is None else f"{task}-{order}"
            runs = shuffled if group is None else runs_if_any(results_dir, group)
            live = [run for run in runs if run.task == stream]
            cells = []
            for drop in drops:
                is_asked = group is None or task in LIVE
                served = hits_and_changed(found_of(live, "llmcache", drop)) if is_asked else ("", "")
                cells += [_over(bounds, task, order, drop), *served]
            rows.append((task, order, *cells))
    return table(("stream", "requests come", *heads), rows)


def _over(runs: Sequence[Run], task: str, order: str, drop: float) -> str:
    """Format how many orders changed more answers than the target, and how many of them beyond chance."""
    for row in rows_of(runs, figure("claims")):
        if (row["run"].task, row["run"].metrics["arrival"], row["max_drop"]) == (task, order, drop):
            return f"{row['n_violated']} of {row['n_calibrations']}, {row['n_beyond_chance']} beyond chance"
    return MISSING
