"""The tables of one experiment, by kind of run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.metrics.frontier import Curve, best, curves, of_curve
from experiments.report.calls import latency
from experiments.report.claims.harmless import PAPERS_CURVE, harmless_tau
from experiments.report.markdown import number, percent, points, share, size, speed, table
from experiments.report.plots import CURVES, LAYERS
from experiments.report.prompts import decode, parity, prefix, sharing
from experiments.report.told import told
from experiments.report.trust import bound, drift, payback, trust
from experiments.runs.read import Figures, Run, at, by_size, label_of, varied

LOSSES = ("accuracy_drop", "changed_answers")
COSTS = ("drop, points", "changed answers", "of hits")
LIKENESS = ("states alike, nearest by embedding", "nearest by what enters the layer", "median cosine")
SHOWN_TAUS = (None, 0.7, 0.8, 0.82, 0.85, 0.88, 0.9, 0.94, 0.98)


def of_runs(runs: Sequence[Run]) -> str:
    """Tables of all runs of one experiment, which are of one kind."""
    return "\n\n".join(TABLES[runs[0].measure](runs))


def _serve(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        metrics = run.metrics
        yield f"**{run.task}**, {metrics['n']:,} requests{_sample(run)}, {metrics['rounds']} rounds"
        yield table(
            (
                "method",
                "hit rate",
                "exact hits",
                "rows served",
                metrics["metric"],
                *COSTS,
                "speed-up",
                "o",
                "c",
                "cache",
            ),
            [_method(label, figures) for label, figures in metrics["methods"].items()],
        )
        yield from _extras(metrics["methods"])
        yield from _stepped_aside(metrics["methods"])


def _method(label: str, figures: Figures) -> tuple[Any, ...]:
    return (
        label,
        share(figures["hit_rate"], figures["hit_rate_ci"]),
        percent(figures["hits_by_rung"].get("exact", 0.0)) if figures["method"] == "llmcache" else "",
        percent(figures["rows_served"]),
        percent(figures["accuracy"]),
        points(figures["accuracy_drop"], figures["accuracy_drop_ci"]),
        share(figures["changed_answers"], figures["changed_answers_ci"]),
        percent(figures["changed_per_hit"]),
        speed(figures),
        percent(figures["miss_overhead"]),
        percent(figures["hit_cost"]),
        size(figures["bytes"]),
    )


def _extras(methods: Mapping[str, Figures]) -> Iterator[str]:
    """What else a task counts, where it does."""
    names = list(next(iter(methods.values()))["extras"])
    if names:
        yield table(
            ("method", *(name.replace("_", " ") for name in names)),
            [(label, *(_extra(figures["extras"][name]) for name in names)) for label, figures in methods.items()],
        )


def _stepped_aside(methods: Mapping[str, Figures]) -> Iterator[str]:
    """What is left of the cost where calls bypass the cache."""
    told = [label for label, figures in methods.items() if figures["options"].get("auto_bypass")]
    if told:
        yield table(
            ("method", "requests that went by", "speed-up of the stream's latter half"),
            [(label, number(methods[label]["bypassed"], 0), speed(methods[label]["latter_half"])) for label in told],
        )


def _extra(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _sweep(runs: Sequence[Run]) -> Iterator[str]:
    yield "Most hits in hindsight, by what may be lost:"
    yield table(
        ("stream", "curve", "drop <= 0.5 points: hits", "tau", "changed answers <= 0.5 %: hits", "tau", "n"),
        [_frontier(run, curve) for run in runs for curve in curves(run.metrics["points"])],
    )
    for run in runs:
        yield f"**{run.task}**, {run.metrics['n']:,} requests{_sample(run)}"
        yield f"![Precision and hit rate of {run.task}]({run.group}/{run.path.name}/{CURVES})"
        yield table(
            ("tau", "hit rate", "rows served", run.metrics["metric"], "drop, points", "changed answers", "precision"),
            [_point(point) for point in _shown(run)],
        )
        if run.metrics["live"]:
            yield table(
                (
                    "live, tau",
                    "hit rate",
                    "drop, points",
                    "speed-up",
                    "o",
                    "c",
                    "n",
                    "whole stream: hits",
                    "speed-up of o, c",
                ),
                [_live(row) for row in run.metrics["live"]],
            )


def _shown(run: Run) -> list[Figures]:
    """Points of the first curve: some, and those that are best in hindsight."""
    points, first = run.metrics["points"], curves(run.metrics["points"])[0]
    told = [best(points, first, loss) for loss in LOSSES] + [harmless_tau(run) if first == PAPERS_CURVE else None]
    taus = {*SHOWN_TAUS, *(point["tau"] for point in told if point is not None)}
    return [point for point in of_curve(points, first) if point["tau"] in taus]


def _frontier(run: Run, curve: Curve) -> tuple[Any, ...]:
    found = [best(run.metrics["points"], curve, loss) for loss in LOSSES]
    cells = [cell for point in found for cell in (("", "") if point is None else _hits_and_tau(point))]
    return (run.task, " ".join(name for name in curve if name), *cells, f"{run.metrics['n']:,}")


def _hits_and_tau(point: Figures) -> tuple[str, str]:
    return percent(point["hit_rate"]), "exact only" if point["tau"] is None else str(point["tau"])


def _point(point: Figures) -> tuple[Any, ...]:
    return (
        "exact only" if point["tau"] is None else point["tau"],
        share(point["hit_rate"], point["hit_rate_ci"]),
        percent(point["rows_served"]),
        percent(point["accuracy"]),
        points(point["accuracy_drop"], point["accuracy_drop_ci"]),
        share(point["changed_answers"], point["changed_answers_ci"]),
        percent(point["precision"]),
    )


def _live(row: Figures) -> tuple[Any, ...]:
    return (
        row["tau"],
        percent(row["hit_rate"]),
        points(row["accuracy_drop"], row["accuracy_drop_ci"]),
        speed(row),
        percent(row["miss_overhead"]),
        percent(row["hit_cost"]),
        f"{row['n']:,} x {row['rounds']}",
        percent(row["hit_rate_all"]),
        number(row["speedup_all"], 2),
    )


def _layers(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield (
            f"**{run.task}**, {run.metrics['n']:,} requests{_sample(run)}: the first half fills the banks, the second "
            "is counted"
        )
        yield f"![Hit rate by layer of {run.task}]({run.group}/{run.path.name}/{LAYERS})"
        yield table(
            ("layer", "hits as written", "fingerprint a layer", "and a tau a layer", "that tau", *LIKENESS),
            [
                (
                    row["layer"],
                    *(percent(row[f"hit_rate_{name}"]) for name in ("as_written", "per_layer", "own_tau")),
                    number(row["own_tau"], 3),
                    percent(row["alike_by_embedding"]),
                    percent(row["alike_by_layer"]),
                    number(row["median_cosine"], 3),
                )
                for row in run.metrics["layers"]
            ],
        )
        yield table(
            ("run", "hit rate", "layers skipped", "drop, points", "changed answers", "of hits"),
            [
                (
                    name.replace("_", " "),
                    percent(figures["hit_rate"]),
                    percent(figures["layers_skipped"]),
                    points(figures["accuracy_drop"], figures["accuracy_drop_ci"]),
                    share(figures["changed_answers"], figures["changed_answers_ci"]),
                    percent(figures["changed_per_hit"]),
                )
                for name, figures in run.metrics["runs"].items()
            ],
        )


def _observe(runs: Sequence[Run]) -> Iterator[str]:
    names = varied([run.config for run in runs])
    yield f"![Hit rates of {runs[0].group}]({runs[0].group}/{runs[0].group}.png)"
    yield table(
        (
            *map(label_of, names),
            "hit rate",
            *COSTS[:2],
            "bytes",
            "of states",
            "entries",
            "evicted",
            "revalidated",
            "expelled",
            "codec's error",
        ),
        [
            (
                *(at(run.config, name) for name in names),
                share(run.metrics["hit_rate"], run.metrics["hit_rate_ci"]),
                points(run.metrics["accuracy_drop"], run.metrics["accuracy_drop_ci"]),
                percent(run.metrics["changed_answers"], 2),
                size(run.metrics["bytes"]),
                size(run.metrics["state_bytes"]),
                f"{run.metrics['entries']:,}",
                f"{run.metrics['evicted']:,}",
                f"{run.metrics['revalidated']:,}",
                f"{run.metrics['expelled']:,}",
                number(run.metrics["reconstruction_error"], 4),
            )
            for run in sorted(runs, key=lambda run: [by_size(at(run.config, name)) for name in names])
        ],
    )


def _sample(run: Run) -> str:
    """Says when not all of the data was used."""
    n_all = run.metrics["facts"].get("n_all")
    if n_all is not None and n_all > run.metrics["n"]:
        return f" of {n_all:,}, from {run.metrics['facts']['n_articles']} articles"
    return " (the first of the data)" if run.metrics["limit"] is not None else ""


TABLES: Mapping[str, Callable[[Sequence[Run]], Iterator[str]]] = {
    "latency": latency,
    "serve": _serve,
    "sweep": _sweep,
    "layers": _layers,
    "observe": _observe,
    "trust": trust,
    "bound": bound,
    "adversaries": told,
    "pairs": told,
    "poisoning": told,
    "drift": drift,
    "embeddings": told,
    "payback": payback,
    "service": told,
    "second_pass": told,
    "prefix": prefix,
    "sharing": sharing,
    "decode": decode,
    "parity": parity,
}
