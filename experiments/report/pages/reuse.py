"""Tables of calibrated reuse: limits chosen in advance, hindsight, the bound, and whole passes."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from experiments.measures.service import share_of_bound
from experiments.metrics.frontier import best
from experiments.report.markdown import Cell, columns, number, of, percent, points, row_of, table
from experiments.report.markdown import speed as times
from experiments.report.pages.files import MISSING, by_task, each, runs_if_any, runs_of
from experiments.runs.read import Figures, Run
from llmcache import ConfigError

TRUST = ("trust_banking77", "trust_hwu64", "trust_snips")
SOURCES = ("frozen", "growing")

#: Curves in column order, with their headings.
WAYS = {
    ("llmcache", "frozen"): "llmcache, frozen",
    ("llmcache", "growing"): "llmcache, growing",
    ("semantic_response", None): "semantic response cache",
    ("doccache", None): "DocCache",
    ("paper", None): "the paper's method",
    ("student", "frozen"): "the forecast alone",
}
#: Streams of whole passes in the configurations, by experiment.
SERVICES = {
    "service_small": ("banking77", "hwu64", "snips"),
    "service_exact": ("banking77", "hwu64", "snips", "banking77-repeats", "support_desk"),
}
LOSSES = {"changed_answers": "0.5 % of answers changed", "accuracy_drop": "half a point of accuracy lost"}


def trust_runs(results_dir: Path) -> dict[str, list[Run]]:
    return by_task(run for group in TRUST for run in runs_of(results_dir, group))


def calibrated(results_dir: Path) -> str:
    """Return the table of limits chosen in advance: every stream, claim and seed, with frozen and growing sources."""
    asked = ("hits", "changed", "points lost")
    rows = []
    for task, runs in trust_runs(results_dir).items():
        for drop in dict.fromkeys(row["max_drop"] for row in runs[0].metrics["calibrated"]):
            cells = []
            for sources in SOURCES:
                found = [_chosen(run, sources, drop) for run in runs]
                cells += [
                    each([row["hit_rate"] for row in found]),
                    each([row["changed_answers"] for row in found], 2),
                    each([row["accuracy_drop"] for row in found], 2, unit=""),
                ]
            rows.append((task, percent(drop), *cells))
    heads = [f"{kind}: {name}" for kind in ("frozen", "growing, no bound") for name in asked]
    return table(("stream", "target", *heads), rows)


def _chosen(run: Run, sources: str, drop: float) -> Figures:
    found = chosen(run, "llmcache", sources, drop)
    if found is None:
        raise ConfigError(f"{run.path}: no calibration with {sources} sources at {drop:g}; measure again with --force")
    return found


def chosen(run: Run, method: str, sources: str, drop: float) -> Figures | None:
    """Return a method's figures at a limit chosen in advance; None if not measured."""
    wanted = (method, sources, drop)
    rows = run.metrics["calibrated"]
    return next((r for r in rows if (r.get("method", "llmcache"), r["sources"], r["max_drop"]) == wanted), None)


def hindsight(results_dir: Path) -> str:
    """Return the table of each method's best threshold in hindsight, on the requests it is counted on."""
    trust = trust_runs(results_dir)
    rows = [
        (task, told, *(_frontier(runs, way, loss) for way in WAYS))
        for loss, told in LOSSES.items()
        for task, runs in trust.items()
    ]
    return table(("stream", "at most", *WAYS.values()), rows)


def _frontier(runs: Sequence[Run], way: tuple[str, str | None], loss: str) -> str:
    """Format the hits of every seed; if accuracy is the limit, also the changed answers."""
    found = [best(run.metrics["points"], way, loss) for run in runs]
    if all(point is None for point in found):
        return MISSING
    hits = each([None if point is None else point["hit_rate"] for point in found])
    if loss != "accuracy_drop":
        return hits
    return f"{hits}; changed {each([None if point is None else point['changed_answers'] for point in found])}"


def bound(results_dir: Path) -> str:
    """Return the table of calibrations that exceeded their bound, and of all tried."""
    runs = runs_of(results_dir, "trust_bound")
    return columns(BOUND, [{"run": run, **row} for run in runs for row in run.metrics["claims"]])


def bound_draft(results_dir: Path) -> str:
    """Return the table of calibrations with a draft, and which rungs they chose; a row is empty if not measured."""
    if not (runs := runs_if_any(results_dir, "trust_bound_draft")):
        return table(tuple(BOUND_DRAFT), [("`trust_bound_draft`", MISSING, *[""] * (len(BOUND_DRAFT) - 2))])
    return columns(BOUND_DRAFT, [{"run": run, **row} for run in runs for row in run.metrics["claims"]])


BOUND: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "target": of(percent, "max_drop"),
    "over the target": lambda row: f"{row['n_violated']} of {row['n_calibrations']}",
    "allowed": lambda row: f"{row['run'].metrics['delta'] * row['n_calibrations']:.0f}",
    "hits, median": of(percent, "hit_rate_median"),
    "10th to 90th percentile": lambda row: f"{percent(row['hit_rate_p10'])} to {percent(row['hit_rate_p90'])}",
}
BOUND_DRAFT: Mapping[str, Cell] = {
    **BOUND,
    "changed, median": of(percent, "changed_answers_median", 2),
    "rungs": lambda row: ", ".join(f"{rungs}: {n}" for rungs, n in sorted(row["rungs"].items())),
}


def rates(results_dir: Path) -> str:
    """Return the table of speed-ups against the bound at set hit rates; kinds of reuse not measured are marked."""
    rows: list[Sequence[str]] = []
    for group, kind in RATES.items():
        found = [{"run": run, **row} for run in runs_if_any(results_dir, group) for row in run.metrics["summary"]]
        rows += [row_of(RATED, row) for row in sorted(found, key=itemgetter("hit_rate_set", "threads"))]
        if not found:
            rows.append((f"[{kind}](configs/{group}.yaml)", "", "", MISSING, *[""] * (len(RATED) - 4)))
    return table(tuple(RATED), rows)


RATES = {
    "service_rates": "calibrated",
    "service_rates_unaudited": "calibrated, not audited",
    "service_rates_exact": "exact repeats",
}


def service(results_dir: Path) -> str:
    """Return the table of whole passes by stream and number of threads; streams not measured are marked."""
    rows: list[Sequence[str]] = []
    for group, tasks in SERVICES.items():
        found = by_task(runs_if_any(results_dir, group))
        kind = "calibrated" if group == "service_small" else "exact repeats"
        for task in (*tasks, *(other for other in found if other not in tasks)):
            if task not in found:
                rows.append((task, kind, "", MISSING, *[""] * (len(PASSES) - 4)))
            rows += [
                row_of(PASSES, {"run": run, **row}) for run in found.get(task, ()) for row in run.metrics["summary"]
            ]
    return table(tuple(PASSES), rows)


PASSES: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "reuse": lambda row: "exact repeats" if row["max_drop"] is None else f"calibrated, {percent(row['max_drop'])}",
    "threads": itemgetter("threads"),
    "hits": of(percent, "hit_rate"),
    "changed": of(percent, "changed_answers", 2),
    "points lost": of(points, "accuracy_drop"),
    "speed-up": times,
    "of the bound": lambda row: percent(share_of_bound(row["speedup"], row["hit_rate"]), 0),
    "plain, ms": of(number, "plain_ms", 2),
    "hit, ms": of(number, "hit_ms", 2),
    "miss, ms": of(number, "miss_ms", 2),
}
RATED: Mapping[str, Cell] = {
    "reuse": lambda row: f"[{RATES[row['run'].group]}](configs/{row['run'].group}.yaml)",
    "hits asked for": of(percent, "hit_rate_set", 0),
    **{name: PASSES[name] for name in ("threads", "hits", "changed", "speed-up", "of the bound")},
    **{f"{kind}, ms": PASSES[f"{kind}, ms"] for kind in ("plain", "hit", "miss")},
}


def second_pass(results_dir: Path) -> str:
    """Return the table of texts embedded twice; a row is empty if not measured."""
    found = runs_if_any(results_dir, "service_second_pass")
    if not found:
        return table(tuple(SECOND_PASS), [("banking77", MISSING, *[""] * (len(SECOND_PASS) - 2))])
    return columns(SECOND_PASS, [{"run": run, **row} for run in found for row in run.metrics["summary"]])


def known(results_dir: Path) -> str:
    """Return the table of second passes with new texts among them; empty if not measured."""
    found = [run for group in ("service_known", "service_nightly") for run in runs_if_any(results_dir, group)]
    return columns(KNOWN, [{"run": run, **row} for run in found for row in run.metrics["summary"]])


SECOND_PASS: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "texts": of(number, "n", 0),
    "a batch": itemgetter("batch"),
    "hits of the second pass": of(percent, "hit_rate"),
    "its speed-up": times,
    "the first costs more": of(percent, "first_costs", 0),
    "plain, ms": of(number, "plain_ms", 2),
}
KNOWN: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "texts": of(number, "n", 0),
    "a batch": itemgetter("batch"),
    "embedded before": of(percent, "known", 0),
    "hits": of(percent, "hit_rate", 2),
    "speed-up": times,
    "share of the bound": lambda row: percent(share_of_bound(row["speedup"], row["hit_rate"]), 0),
    "plain, ms": of(number, "plain_ms", 2),
}
