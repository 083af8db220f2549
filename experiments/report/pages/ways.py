"""Tables of calibrated reuse and other methods with the same bound: by hit, by intent, and in time order."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.report.markdown import percent, table
from experiments.report.pages.files import MISSING, by_task, each, row_of, runs_if_any
from experiments.report.pages.reuse import chosen, trust_runs
from experiments.runs.read import Figures, Run

#: Methods calibrated by the same tests on the same requests, in row order, with their titles.
NAMES = {
    "llmcache": "llmcache: neighbours and forecast",
    "student": "the forecast alone",
    "semantic_response": "semantic response cache",
    "doccache": "DocCache",
    "paper": "the paper's method",
}
#: Methods whose errors are shown by hit and by intent.
OWN = ("llmcache", "student")
#: Orders of requests, and the experiment that serves such a stream live.
ORDERS = {"shuffled": None, "bursts": "trust_bursts", "repeats": "trust_repeats"}
#: Streams of `configs/trust_bound_time.yaml`, and those served live in time order.
STREAMS, LIVE = ("banking77", "hwu64", "snips"), ("banking77", "hwu64")
WORTH_TELLING = 0.01  # share of all requests from which exact repeats are shown apart from all hits


def ways(results_dir: Path) -> str:
    """Return the table of hits and changed answers: every method and seed, frozen sources, limits chosen in advance."""
    trust = trust_runs(results_dir)
    drops = _drops(next(iter(trust.values())))
    heads = [f"target {percent(drop)}: {what}" for drop in drops for what in ("hits", "changed")]
    rows = [
        (task, told, *(cell for drop in drops for cell in _hits_and_changed(_found(runs, way, drop))))
        for task, runs in trust.items()
        for way, told in NAMES.items()
    ]
    return table(("stream", "way", *heads), rows)


def errors(results_dir: Path) -> str:
    """Return the table of changed answers by hit, by intent and overall: every seed, frozen sources."""
    trust = trust_runs(results_dir)
    heads = ("stream", "way", "target", "changed", "of hits", "worst intent", "median intent")
    rows = [
        (task, NAMES[way], percent(drop), *_errors(_found(runs, way, drop)))
        for task, runs in trust.items()
        for way in OWN
        for drop in _drops(runs)
    ]
    return table(heads, rows)


def time_order(results_dir: Path) -> str:
    """Return the table of broken bounds by order of requests, and the live results for streams in that order."""
    bounds = runs_if_any(results_dir, "trust_bound_time")
    trust = trust_runs(results_dir)
    drops = _drops(next(iter(trust.values())))
    heads = [f"target {percent(drop)}: {what}" for drop in drops for what in ("over it", "hits", "changed")]
    served = by_task(run for group in ORDERS.values() if group for run in runs_if_any(results_dir, group))
    rows = []
    for task in STREAMS:
        for order, group in ORDERS.items():
            live = trust.get(task, []) if group is None else served.get(f"{task}-{order}", [])
            is_asked = group is None or task in LIVE
            cells = []
            for drop in drops:
                told = _hits_and_changed(_found(live, "llmcache", drop)) if is_asked else ("", "")
                cells += [_worse(bounds, task, order, drop), *told]
            rows.append((task, order, *cells))
    return table(("stream", "requests come", *heads), rows)


def _drops(runs: Sequence[Run]) -> list[float]:
    return list(dict.fromkeys(row["max_drop"] for row in runs[0].metrics["calibrated"]))


def _found(runs: Sequence[Run], way: str, drop: float) -> list[Figures] | None:
    """Return a method's figures in every run; None if any run lacks them."""
    rows = [chosen(run, way, "frozen", drop) for run in runs]
    found = [row for row in rows if row is not None]
    return found if rows and len(found) == len(rows) else None


def _hits_and_changed(found: Sequence[Figures] | None) -> tuple[str, str]:
    if found is None:
        return MISSING, ""
    hits, exact = (each(values) for values in ([row["hit_rate"] for row in found], [_exact(row) for row in found]))
    if max(map(_exact, found)) >= WORTH_TELLING:
        hits += f", of these exact {exact}"
    return hits, each([row["changed_answers"] for row in found], 2)


def _exact(row: Figures) -> float:
    """Return the hits on a request's own repeat, as a share of all requests."""
    return float(row["hits_by_rung"].get("exact", 0.0))


def _errors(found: Sequence[Figures] | None) -> tuple[str, ...]:
    if found is None:
        return MISSING, "", "", ""
    intents: list[Mapping[str, Mapping[str, float]] | None] = [row.get("by_intent") for row in found]
    of_all, of_hits = (each([row[name] for row in found], 2) for name in ("changed_answers", "changed_per_hit"))
    if any(row is None for row in intents):
        return of_all, of_hits, MISSING, MISSING
    worst = each([row["worst"]["changed"] for row in intents if row is not None])
    return of_all, of_hits, worst, each([row["by_intent"]["median"] for row in found], 2)


def _worse(runs: Sequence[Run], task: str, order: str, drop: float) -> str:
    """Format how many orders changed more answers than the target, and how many of them beyond chance."""
    for run in runs:
        if (run.task, run.metrics["arrival"]) == (task, order):
            row = row_of(run.metrics["claims"], max_drop=drop)
            return f"{row['n_violated']} of {row['n_calibrations']}, {row['n_beyond_chance']} beyond chance"
    return MISSING
