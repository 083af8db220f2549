"""Tables of calibrated reuse: what was chosen in advance, hindsight, the bound, speed, and what it does not do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.frontier import best, curves
from experiments.report.markdown import number, percent, points, table
from experiments.report.markdown import speed as times
from experiments.report.readme.files import by_task, each, row_of, runs_of
from experiments.runs import Figures, Run

TRUST = ("trust_banking77", "trust_hwu64", "trust_snips")
SOURCES = ("frozen", "growing")
AUDIT = 0.05  # the library's default
ASKED = 0.02  # of the experiments that look for trouble

#: Curves in the order of the columns, and their headings; others follow under their own names.
WAYS = {
    ("llmcache", "frozen"): "llmcache, frozen",
    ("llmcache", "growing"): "llmcache, growing",
    ("semantic_response", None): "semantic response cache",
    ("doccache", None): "DocCache",
    ("paper", None): "the paper's way",
}
LOSSES = {"changed_answers": "0.5 % of answers changed", "accuracy_drop": "half a point of accuracy lost"}


def _trust(results_dir: Path) -> dict[str, list[Run]]:
    return by_task(run for group in TRUST for run in runs_of(results_dir, group))


def calibrated(results_dir: Path) -> str:
    """What was chosen in advance: every stream, claim and seed, with frozen sources and with growing ones."""
    asked = ("hits", "changed", "points lost")
    rows = []
    for task, runs in _trust(results_dir).items():
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
    return table(("stream", "asked: changed", *heads), rows)


def _chosen(run: Run, sources: str, drop: float) -> Figures:
    return next(row for row in run.metrics["calibrated"] if row["sources"] == sources and row["max_drop"] == drop)


def hindsight(results_dir: Path) -> str:
    """The best threshold on the very requests it is counted on, of every way."""
    trust = _trust(results_dir)
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
    hits = each([None if point is None else point["hit_rate"] for point in found])
    if loss != "accuracy_drop":
        return hits
    return f"{hits}; changed {each([None if point is None else point['changed_answers'] for point in found])}"


def bound(results_dir: Path) -> str:
    """How often a calibration was worse than its bound, of as many as were tried."""
    return table(
        ("stream", "asked: changed", "worse than asked", "allowed for", "hits, median", "10th to 90th percentile"),
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
    if not any((results_dir / "trust_speed_default").glob("*/metrics.json")):
        rows: list[tuple[str, ...]] = [(task, default, "not measured", *[""] * 8) for task in _trust(results_dir)]
    else:
        rows = [
            _speed(run, label, default) for run in runs_of(results_dir, "trust_speed_default") for label in _labels(run)
        ]
    rows += [
        _speed(run, label, _claim(run, label)) for run in runs_of(results_dir, "trust_speed") for label in _labels(run)
    ]
    return table((*heads, *costs), rows)


def service(results_dir: Path) -> str:
    """Whole passes of a service: every stream and number of threads that was run."""
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
    rows = [
        (
            run.task,
            "repeats alone" if row["max_drop"] is None else f"calibrated, {percent(row['max_drop'])}",
            str(row["threads"]),
            percent(row["hit_rate"]),
            percent(row["changed_answers"], 2),
            points(row["accuracy_drop"]),
            times(row),
            number(row["plain_ms"], 2),
            number(row["hit_ms"], 2),
            number(row["miss_ms"], 2),
        )
        for group in ("service_small", "service_exact")
        for run in sorted(runs_of(results_dir, group), key=lambda run: run.task)
        for row in run.metrics["summary"]
    ]
    return table(heads, rows)


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
    if not any((results_dir / "service_second_pass").glob("*/metrics.json")):
        return table(heads, [("banking77", "not measured", *[""] * 5)])
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
        for run in runs_of(results_dir, "service_second_pass")
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


def limits(results_dir: Path) -> str:
    """What misleads it, by stream: edits, planted entries, streams that change, embeddings."""
    columns = {
        name: by_task(runs_of(results_dir, f"trust_{name}"))
        for name in ("adversaries", "poisoning", "drift", "embeddings")
    }
    tasks = list(columns["adversaries"])
    units = ["" if told.endswith("points") else " %" for told, *_ in _LIMITS]
    rows = [
        (told, *(each([value(run.metrics["summary"]) for run in columns[name][task]], digits, unit) for task in tasks))
        for (told, name, digits, value), unit in zip(_LIMITS, units, strict=True)
    ]
    return table(("of 2 % asked, but for the last rows", *tasks), rows)


def _edited(gate: str, what: str) -> Callable[[Any], float]:
    return lambda rows: float(row_of(rows, gate=gate, edit="all", **{"asked: changed": ASKED})[what])


def _captured(sources: str, gate: str, audit: float) -> Callable[[Any], float]:
    wanted = {"sources": sources, "gate": gate, "audit": audit}
    return lambda rows: float(row_of(rows, **wanted)["targets captured"])


def _drifted(audit: float) -> Callable[[Any], float]:
    return lambda rows: float(row_of(rows, sources="frozen", audit=audit)["after"])


def _calibrated_hits(rows: Any) -> float:
    return max(float(row["hit rate"]) for row in rows if row["asked: changed"] is not None)


def _lost_at_30(rows: Any) -> float:
    curve = [row for row in rows if row["asked: changed"] is None]
    return float(min(curve, key=lambda row: abs(row["hit rate"] - 0.3))["lost"])


_LIMITS: Sequence[tuple[str, str, int, Callable[[Any], float]]] = (
    (
        "requests [edited to mislead](configs/trust_adversaries.yaml): another answer",
        "adversaries",
        1,
        _edited("off", "with another answer"),
    ),
    ("the same with the content gate", "adversaries", 1, _edited("on", "with another answer")),
    ("hits of the stream without the gate", "adversaries", 1, _edited("off", "hit rate")),
    ("with it", "adversaries", 1, _edited("on", "hit rate")),
    (
        "requests captured by [planted near-duplicates](configs/trust_poisoning.yaml), growing, no audit",
        "poisoning",
        0,
        _captured("growing", "off", 0.0),
    ),
    ("the same with the content gate", "poisoning", 0, _captured("growing", "on", 0.0)),
    ("growing, default audit", "poisoning", 0, _captured("growing", "off", AUDIT)),
    ("frozen, no audit", "poisoning", 0, _captured("frozen", "off", 0.0)),
    (
        "changed answers after a stream [moved on](configs/trust_drift.yaml), frozen, no audit",
        "drift",
        1,
        _drifted(0.0),
    ),
    ("default audit", "drift", 1, _drifted(AUDIT)),
    (
        "[embeddings](configs/trust_embeddings.yaml): hits of the best calibration, up to 10 % asked",
        "embeddings",
        1,
        _calibrated_hits,
    ),
    ("embeddings: nDCG@10 lost at 30 % hits, points", "embeddings", 2, _lost_at_30),
)


def paws(results_dir: Path) -> str:
    """Pairs that share words: how many of each kind are served by one another."""
    runs = runs_of(results_dir, "trust_paws")
    ways = {
        "llmcache, 2 % asked": {"way": "llmcache", "gate": "off", "asked: changed": ASKED},
        "the paper's tau of 0.85": {"way": "paper", "gate": "off", "limit": 0.85},
        "semantic response cache at 0.8": {"way": "semantic_response", "gate": "off", "limit": 0.8},
        "semantic response cache at 0.95": {"way": "semantic_response", "gate": "off", "limit": 0.95},
    }
    heads = {
        "same meaning": "same meaning, served",
        "other meaning": "another, served",
        "and another answer": "and another answer",
    }
    rows = [
        (
            told,
            *(each([float(row_of(run.metrics["summary"], **wanted)[name]) for run in runs]) for name in heads.values()),
        )
        for told, wanted in ways.items()
    ]
    return table(("served by one another", *heads), rows)
