"""The tables of calibrated reuse: hindsight and what was chosen in advance, each in a table of its own."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.metrics.frontier import best, curves
from experiments.metrics.metrics import share_interval
from experiments.report.markdown import number, percent, points, share, speed, table
from experiments.report.plots import CURVES
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
    yield table(
        (
            *("stream", "seed", "way", "sources", "asked: changed <=", "bound", "hit rate", "changed answers"),
            *("of hits", "worst intent", "median intent", "drop, points", "lookup, ms", "n"),
        ),
        [_calibrated(run, row) for run in runs for row in run.metrics["calibrated"]],
    )
    yield (
        "Of hits: share of hits whose answer changed. Worst and median intent: share of an intent's later requests; "
        "the worst of many is bad by chance, too, so its own interval stands beside it. `llmcache` is served live, "
        "other ways are replayed. Lookup: what each request pays before it is known whether it hits; the semantic "
        "response cache embeds it with all-MiniLM-L6-v2 whole, which here costs as much as the model that it spares."
    )
    yield from (
        f"![Precision and hit rate of {run.task}, seed {run.config['seed']}]({run.group}/{run.path.name}/{CURVES})"
        for run in runs
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
    yield table(
        (
            *("stream", "arrival", "asked: changed <=", "calibrations", "violated", "beyond chance", "turned on"),
            *("median hit rate", "10th to 90th percentile", "median of changed answers", "most", "A and B / C / all"),
        ),
        [_claim(run, row) for run in runs for row in run.metrics["claims"]],
    )
    yield "Violated: of the rest of the stream, more is answered otherwise at the chosen limit than was asked."
    if any(run.metrics.get("arrival") for run in runs):
        yield (
            "With an arrival the rest is what comes after the first requests: a sample itself, of which some exceed "
            "what was asked by chance. Beyond chance: its exact interval lies above. `shuffled` is the control."
        )


def _claim(run: Run, row: Figures) -> tuple[Any, ...]:
    sizes = (run.metrics["n_sources"], row["n_tested"], run.metrics["n"])
    return (
        run.task,
        run.metrics.get("arrival") or "drawn",
        percent(row["max_drop"]),
        row["n_calibrations"],
        row["n_violated"],
        row.get("n_beyond_chance", "") if run.metrics.get("arrival") else "",
        percent(row["turned_on"]),
        percent(row["hit_rate_median"]),
        f"{percent(row['hit_rate_p10'])} to {percent(row['hit_rate_p90'])}",
        percent(row["changed_answers_median"], 2),
        percent(row["changed_answers_most"], 2),
        " / ".join(f"{size:,}" for size in sizes),
    )


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
    yield table(
        (
            "stream",
            "seed",
            "asked: changed <=",
            "requests",
            "different texts",
            "streams",
            "length",
            "told to have changed",
        ),
        rows,
    )


def _asked(row: Figures) -> tuple[str, str]:
    return percent(row["max_drop"]), "drawn alike" if row["repeats"] == "alike" else "some come often"


def _suspended(rows: Sequence[Figures]) -> tuple[Any, ...]:
    n, n_suspended = (sum(row[name] for row in rows) for name in ("n_streams", "n_suspended"))
    lengths = "; ".join(sorted({f"{row['length']:,}" for row in rows}))
    return n, lengths, share(n_suspended / n, share_interval(n_suspended, n)) if n else ""


def payback(runs: Sequence[Run]) -> Iterator[str]:
    """Speed after the learning phase, what that phase cost, and the same hits on a larger model."""
    yield table(
        (
            *("stream", "setting", "hit rate h", "speed-up", "o", "c", "of h, o, c", "drop, points", "changed answers"),
            *("learning: extra s", "paid back after", "speed-up with learning", "later requests"),
        ),
        [_paid(run, label, row) for run in runs for label, row in run.metrics["methods"].items()],
    )
    if replayed := [(run, row) for run in runs for row in run.metrics["replayed"].values()]:
        yield "The same pattern of hits and misses on another model:"
        yield table(
            ("pattern of", "model", "tokens", "hit rate h", "speed-up", "o", "c", "of h, o, c", "asked", "n"),
            [_replayed(run, row) for run, row in replayed],
        )
        yield "Asked: nine tenths of 1 / ((1 - h) 1.03 + 0.02 h)."


def _paid(run: Run, label: str, row: Figures) -> tuple[Any, ...]:
    paid = row["paid_back_after"]
    return (
        run.task,
        f"{label}, {row['calibration']['metric']}, {row['calibration']['sources']}",
        share(row["hit_rate"], row["hit_rate_ci"]),
        *_speeds(row),
        points(row["accuracy_drop"], row["accuracy_drop_ci"]),
        share(row["changed_answers"], row["changed_answers_ci"], 2),
        number(row["learning_extra_s"]),
        "never" if paid is None else f"{paid:,.0f} requests",
        number(row["speedup_with_learning"], 2),
        f"{run.metrics['n_counted']:,} x {run.metrics['rounds']}",
    )


def _replayed(run: Run, row: Figures) -> tuple[Any, ...]:
    name = f"{row['model']} ({'random weights' if row['weights'] == 'random' else 'trained'})"
    asked, n = number(row["speedup_asked"], 2), f"{row['n']:,} x {run.metrics['rounds']}"
    return (run.task, name, row["seq_len"], percent(row["hit_rate"]), *_speeds(row), asked, n)


def _speeds(row: Figures) -> tuple[str, ...]:
    costs = (percent(row[key]) for key in ("miss_overhead", "hit_cost"))
    return (speed(row), *costs, number(row["speedup_expected"], 2))


def _frontier(run: Run, curve: tuple[str, str | None]) -> tuple[Any, ...]:
    found = [best(run.metrics["points"], curve, loss) for loss in LOSSES]
    hits = ("" if point is None else share(point["hit_rate"], point["hit_rate_ci"]) for point in found)
    return (run.task, run.config["seed"], " ".join(name for name in curve if name), *hits)


def _calibrated(run: Run, row: Figures) -> tuple[Any, ...]:
    return (
        run.task,
        run.config["seed"],
        row.get("method", "llmcache"),
        row["sources"],
        percent(row["max_drop"]),
        "none"
        if row["bound"] is None
        else f"{percent(row['bound'], 2)}{'' if row['is_certified'] else ' at the start'}",
        share(row["hit_rate"], row["hit_rate_ci"]),
        share(row["changed_answers"], row["changed_answers_ci"], 2),
        percent(row["changed_per_hit"], 2),
        *_of_intents(row.get("by_intent")),
        points(row["accuracy_drop"], row["accuracy_drop_ci"]),
        number(row.get("lookup_ms") if run.is_timed else None, 2),
        f"{run.metrics['n_counted']:,}",
    )


def _of_intents(found: Figures | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    worst = found["worst"]
    return f"{share(worst['changed'], worst['changed_ci'])}, n = {worst['n']}", percent(found["median"], 2)
