"""The tables of calibrated reuse: hindsight and what was chosen in advance, each in a table of its own."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from experiments.metrics.frontier import best, curves
from experiments.metrics.metrics import share_interval
from experiments.report.markdown import (
    Cell,
    bounded,
    columns,
    count,
    named_model,
    number,
    of,
    paid_back,
    percent,
    points,
    share,
    speed,
    table,
)
from experiments.report.plots import CURVES, pictured
from experiments.report.told import told
from experiments.runs.read import Figures, Run

LOSSES = ("accuracy_drop", "changed_answers")


def trust(runs: Sequence[Run]) -> Iterator[str]:
    """Every run: its curves in hindsight, what was calibrated, and the picture."""
    yield "Most hits in hindsight, by what may be lost, of the requests after those that were learned from:"
    yield table(
        ("stream", "seed", "way", "drop <= 0.5 points: hits", "changed answers <= 0.5 %: hits"),
        [_frontier(run, curve) for run in runs for curve in curves(run.metrics["points"])],
    )
    yield "Chosen in advance, from the first requests alone, and counted on the later ones, in order:"
    yield columns(CALIBRATED, _rows(runs, "calibrated"))
    yield (
        "Of hits: share of hits whose answer changed. Worst and median intent: share of an intent's later requests; "
        "the worst of many is bad by chance, too, so its own interval stands beside it. `llmcache` is served live, "
        "other ways are replayed. Lookup: what each request pays before it is known whether it hits; the semantic "
        "response cache embeds it with all-MiniLM-L6-v2 whole, which here costs as much as the model that it spares."
    )
    yield from (
        f"![Precision and hit rate of {run.task}, seed {run.config['seed']}]({run.group}/{run.path.name}/{CURVES})"
        for run in pictured(runs)
    )


def chosen(run: Run, method: str, sources: str, drop: float) -> Figures | None:
    """What a way got with a limit that was chosen in advance; None where that was not measured."""
    for row in run.metrics["calibrated"]:
        if (row.get("method", "llmcache"), row["sources"], row["max_drop"]) == (method, sources, drop):
            found: Figures = row
            return found
    return None


def bound(runs: Sequence[Run]) -> Iterator[str]:
    """How often calibrations were worse than they said."""
    yield columns(CLAIMS, _rows(runs, "claims"))
    yield "Violated: of the rest of the stream, more is answered otherwise at the chosen limit than was asked."
    if any(run.metrics.get("arrival") for run in runs):
        yield (
            "With an arrival the rest is what comes after the first requests: a sample itself, of which some exceed "
            "what was asked by chance. Beyond chance: its exact interval lies above. `shuffled` is the control."
        )


def _rows(runs: Sequence[Run], key: str) -> list[dict[str, Any]]:
    """Rows of all runs, each with its run."""
    return [{"run": run, **row} for run in runs for row in run.metrics[key]]


CLAIMS: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "arrival": lambda row: row["run"].metrics.get("arrival") or "drawn",
    "asked: changed <=": of(percent, "max_drop"),
    "calibrations": itemgetter("n_calibrations"),
    "violated": itemgetter("n_violated"),
    "beyond chance": lambda row: row["n_beyond_chance"] if row["run"].metrics.get("arrival") else "",
    "turned on": of(percent, "turned_on"),
    "median hit rate": of(percent, "hit_rate_median"),
    "10th to 90th percentile": lambda row: f"{percent(row['hit_rate_p10'])} to {percent(row['hit_rate_p90'])}",
    "median of changed answers": of(percent, "changed_answers_median", 2),
    "most": of(percent, "changed_answers_most", 2),
    "A and B / C / all": lambda row: " / ".join(map(count, _sizes(row["run"].metrics, row))),
}


def _sizes(metrics: Figures, row: Figures) -> tuple[int, int, int]:
    return metrics["n_sources"], row["n_tested"], metrics["n"]


def drift(runs: Sequence[Run]) -> Iterator[str]:
    """What becomes of streams that change, and how many that do not are told to have changed."""
    yield from told(runs)
    found = [(run, row) for run in runs for row in run.metrics.get("unchanged", ())]
    if not found:
        yield "Streams that do not change: not measured."
        return
    yield "Streams that do not change, and how many of them end approximate reuse all the same:"
    rows: list[tuple[Any, ...]] = [
        (run.task, run.config["seed"], *_asked(row), f"{row['n_different']:,}", *_suspended([row]))
        for run, row in found
    ]
    kinds = dict.fromkeys(_asked(row) for _, row in found)
    rows += [("all", "", *kind, "", *_suspended([row for _, row in found if _asked(row) == kind])) for kind in kinds]
    told_of = ("asked: changed <=", "requests", "different texts", "streams", "length", "told to have changed")
    yield table(("stream", "seed", *told_of), rows)


def _asked(row: Figures) -> tuple[str, str]:
    return percent(row["max_drop"]), "drawn alike" if row["repeats"] == "alike" else "some come often"


def _suspended(rows: Sequence[Figures]) -> tuple[Any, ...]:
    n, n_suspended = (sum(row[name] for row in rows) for name in ("n_streams", "n_suspended"))
    lengths = "; ".join(sorted({f"{row['length']:,}" for row in rows}))
    return n, lengths, share(n_suspended / n, share_interval(n_suspended, n)) if n else ""


def payback(runs: Sequence[Run]) -> Iterator[str]:
    """Speed after the learning phase, what that phase cost, and the same hits on a larger model."""
    paid = [{"run": run, "label": label, **row} for run in runs for label, row in run.metrics["methods"].items()]
    yield columns(PAID, paid)
    if replayed := [{"run": run, **row} for run in runs for row in run.metrics["replayed"].values()]:
        yield "The same pattern of hits and misses on another model:"
        yield columns(REPLAYED, replayed)
        yield "Asked: nine tenths of 1 / ((1 - h) 1.03 + 0.02 h)."


SPEEDS: Mapping[str, Cell] = {
    "speed-up": speed,
    "o": of(percent, "miss_overhead"),
    "c": of(percent, "hit_cost"),
    "of h, o, c": of(number, "speedup_expected", 2),
}
PAID: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "setting": lambda row: f"{row['label']}, {row['calibration']['metric']}, {row['calibration']['sources']}",
    "hit rate h": bounded(share, "hit_rate"),
    **SPEEDS,
    "drop, points": bounded(points, "accuracy_drop"),
    "changed answers": bounded(share, "changed_answers", 2),
    "learning: extra s": of(number, "learning_extra_s"),
    "paid back after": of(paid_back, "paid_back_after"),
    "speed-up with learning": of(number, "speedup_with_learning", 2),
    "later requests": lambda row: f"{row['run'].metrics['n_counted']:,} x {row['run'].metrics['rounds']}",
}
REPLAYED: Mapping[str, Cell] = {
    "pattern of": lambda row: row["run"].task,
    "model": named_model,
    "tokens": itemgetter("seq_len"),
    "hit rate h": of(percent, "hit_rate"),
    **SPEEDS,
    "asked": of(number, "speedup_asked", 2),
    "n": lambda row: f"{row['n']:,} x {row['run'].metrics['rounds']}",
}


def _frontier(run: Run, curve: tuple[str, str | None]) -> tuple[Any, ...]:
    found = [best(run.metrics["points"], curve, loss) for loss in LOSSES]
    hits = ("" if point is None else share(point["hit_rate"], point["hit_rate_ci"]) for point in found)
    return (run.task, run.config["seed"], " ".join(name for name in curve if name), *hits)


CALIBRATED: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "seed": lambda row: row["run"].config["seed"],
    "way": lambda row: row.get("method", "llmcache"),
    "sources": itemgetter("sources"),
    "asked: changed <=": of(percent, "max_drop"),
    "bound": lambda row: _bound(row),
    "hit rate": bounded(share, "hit_rate"),
    "changed answers": bounded(share, "changed_answers", 2),
    "of hits": of(percent, "changed_per_hit", 2),
    "worst intent": lambda row: _of_intents(row.get("by_intent"))[0],
    "median intent": lambda row: _of_intents(row.get("by_intent"))[1],
    "drop, points": bounded(points, "accuracy_drop"),
    "lookup, ms": lambda row: number(row.get("lookup_ms") if row["run"].is_timed else None, 2),
    "n": lambda row: count(row["run"].metrics["n_counted"]),
}


def _bound(row: Figures) -> str:
    if row["bound"] is None:
        return "none"
    return f"{percent(row['bound'], 2)}{'' if row['is_certified'] else ' at the start'}"


def _of_intents(found: Figures | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    worst = found["worst"]
    return f"{share(worst['changed'], worst['changed_ci'])}, n = {worst['n']}", percent(found["median"], 2)
