"""Tables of calibrated reuse: what was chosen in advance, hindsight, the bound, and speed."""

from collections.abc import Sequence
from pathlib import Path

from experiments.metrics.frontier import best, curves
from experiments.report.markdown import number, percent, points, table
from experiments.report.markdown import speed as times
from experiments.report.pages.files import MISSING, by_task, each, runs_if_any, runs_of
from experiments.report.trust import chosen
from experiments.runs.read import Figures, Run
from llmcache.errors import ConfigError

TRUST = ("trust_banking77", "trust_hwu64", "trust_snips")
SOURCES = ("frozen", "growing")

#: Curves in the order of the columns, and their headings; others follow under their own names.
WAYS = {
    ("llmcache", "frozen"): "llmcache, frozen",
    ("llmcache", "growing"): "llmcache, growing",
    ("semantic_response", None): "semantic response cache",
    ("doccache", None): "DocCache",
    ("paper", None): "the paper's method",
    ("student", "frozen"): "student: the forecast alone",
    ("neighbours", "frozen"): "neighbours alone",
    ("combined", "frozen"): "combined",
}
#: What the configurations of whole passes ask for: streams by experiment.
SERVICES = {
    "service_small": ("banking77", "hwu64", "snips"),
    "service_exact": ("banking77", "hwu64", "snips", "banking77-repeats", "support_desk"),
}
LOSSES = {"changed_answers": "0.5 % of answers changed", "accuracy_drop": "half a point of accuracy lost"}


def trust_runs(results_dir: Path) -> dict[str, list[Run]]:
    """Runs of every seed on the shuffled streams, by stream."""
    return by_task(run for group in TRUST for run in runs_of(results_dir, group))


def calibrated(results_dir: Path) -> str:
    """What was chosen in advance: every stream, claim and seed, with frozen sources and with growing ones."""
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


def hindsight(results_dir: Path) -> str:
    """The best threshold on the very requests it is counted on, of every way."""
    trust = trust_runs(results_dir)
    found = dict.fromkeys(curve for runs in trust.values() for curve in curves(runs[0].metrics["points"]))
    ways = [*WAYS, *(curve for curve in found if curve not in WAYS and curve[0] != "exact_response")]
    rows = [
        (task, told, *(_frontier(runs, way, loss) for way in ways))
        for loss, told in LOSSES.items()
        for task, runs in trust.items()
    ]
    heads = [WAYS.get(way, " ".join(name for name in way if name)) for way in ways]
    return table(("stream", "at most", *heads), rows)


def _frontier(runs: Sequence[Run], way: tuple[str, str | None], loss: str) -> str:
    """Hits of every seed; where accuracy is the limit, also how many answers changed."""
    found = [best(run.metrics["points"], way, loss) for run in runs]
    if all(point is None for point in found):
        return MISSING
    hits = each([None if point is None else point["hit_rate"] for point in found])
    if loss != "accuracy_drop":
        return hits
    return f"{hits}; changed {each([None if point is None else point['changed_answers'] for point in found])}"


def bound(results_dir: Path) -> str:
    """How often a calibration was worse than its bound, of as many as were tried."""
    return table(
        ("stream", "target", "over the target", "allowed", "hits, median", "10th to 90th percentile"),
        [
            (
                run.task,
                percent(row["max_drop"]),
                f"{row['n_violated']} of {row['n_calibrations']}",
                f"{run.metrics['delta'] * row['n_calibrations']:.0f}",
                percent(row["hit_rate_median"]),
                f"{percent(row['hit_rate_p10'])} to {percent(row['hit_rate_p90'])}",
            )
            for run in runs_of(results_dir, "trust_bound")
            for row in run.metrics["claims"]
        ],
    )


def speed(results_dir: Path) -> str:
    """Live speed, the default claim first; a claim that was not measured has a row without figures."""
    heads = ("stream", "claim", "hits", "changed", "points lost", "speed-up after learning", "learning included")
    costs = ("a miss costs more", "a hit costs", "paid back after", "same hits, BERT-base")
    default = "0.5 % of answers, frozen, audit 5 % (default)"
    found = by_task(runs_if_any(results_dir, "trust_speed_default"))
    rows: list[tuple[str, ...]] = []
    for task in trust_runs(results_dir):
        if task not in found:
            rows.append((task, default, MISSING, *[""] * 8))
        rows += [_speed(run, label, default) for run in found.get(task, ()) for label in _labels(run)]
    rows += [
        _speed(run, label, _claim(run, label)) for run in runs_of(results_dir, "trust_speed") for label in _labels(run)
    ]
    return table((*heads, *costs), rows)


def service(results_dir: Path) -> str:
    """Whole passes of a service: every stream and number of threads; a stream that was not measured says so."""
    heads = (
        "stream",
        "reuse",
        "threads",
        "hits",
        "changed",
        "points lost",
        "speed-up",
        "plain, ms",
        "hit, ms",
        "miss, ms",
    )
    rows: list[tuple[str, ...]] = []
    for group, tasks in SERVICES.items():
        found = by_task(runs_if_any(results_dir, group))
        kind = "calibrated" if group == "service_small" else "exact repeats"
        for task in (*tasks, *(other for other in found if other not in tasks)):
            if task not in found:
                rows.append((task, kind, "", MISSING, *[""] * 6))
            rows += [_passes(task, row) for run in found.get(task, ()) for row in run.metrics["summary"]]
    return table(heads, rows)


def _passes(task: str, row: Figures) -> tuple[str, ...]:
    return (
        task,
        "exact repeats" if row["max_drop"] is None else f"calibrated, {percent(row['max_drop'])}",
        str(row["threads"]),
        percent(row["hit_rate"]),
        percent(row["changed_answers"], 2),
        points(row["accuracy_drop"]),
        times(row),
        *(number(row[name], 2) for name in ("plain_ms", "hit_ms", "miss_ms")),
    )


def second_pass(results_dir: Path) -> str:
    """Texts that are embedded again; a row without figures where that was not measured."""
    heads = (
        "stream",
        "texts",
        "a batch",
        "hits of the second pass",
        "its speed-up",
        "the first costs more",
        "plain, ms",
    )
    if not (found := runs_if_any(results_dir, "service_second_pass")):
        return table(heads, [("banking77", MISSING, *[""] * 5)])
    rows = [
        (
            run.task,
            number(row["n"], 0),
            str(row["batch"]),
            percent(row["hit_rate"]),
            times(row),
            percent(row["first_costs"], 0),
            number(row["plain_ms"], 2),
        )
        for run in found
        for row in run.metrics["summary"]
    ]
    return table(heads, rows)


def _labels(run: Run) -> list[str]:
    return list(run.metrics["methods"])


def _claim(run: Run, label: str) -> str:
    calibration = run.metrics["methods"][label]["calibration"]
    what = "right answers" if calibration["metric"] == "accuracy" else "answers"
    return (
        f"{percent(calibration['max_drop'])} of {what}, {calibration['sources']}, "
        f"audit {percent(run.config['cache']['audit'], 0)}"
    )


def _speed(run: Run, label: str, claim: str) -> tuple[str, ...]:
    row, replayed = run.metrics["methods"][label], run.metrics["replayed"].get(label)
    paid = row["paid_back_after"]
    return (
        run.task,
        claim,
        percent(row["hit_rate"]),
        percent(row["changed_answers"], 2),
        points(row["accuracy_drop"], row["accuracy_drop_ci"]),
        times(row),
        number(row["speedup_with_learning"], 2),
        percent(row["miss_overhead"], 0),
        percent(row["hit_cost"], 0),
        "never" if paid is None else f"{paid:,.0f} requests",
        "" if replayed is None else times(replayed),
    )
