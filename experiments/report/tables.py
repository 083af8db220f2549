"""The tables of one experiment, by kind of run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from experiments.metrics.frontier import Curve, best, curves, of_curve
from experiments.report.calls import compiled, latency
from experiments.report.claims.evidence import PAPERS_CURVE, harmless_tau
from experiments.report.markdown import (
    Cell,
    bounded,
    columns,
    count,
    number,
    of,
    percent,
    points,
    share,
    size,
    speed,
    table,
)
from experiments.report.plots import CURVES, LAYERS
from experiments.runs.read import Figures, Run, at, by_size, label_of, varied

LOSSES = ("accuracy_drop", "changed_answers")
SHOWN_TAUS = (None, 0.7, 0.8, 0.82, 0.85, 0.88, 0.9, 0.94, 0.98)

HITS: Mapping[str, Cell] = {"hit rate": bounded(share, "hit_rate")}
LOST: Mapping[str, Cell] = {
    "drop, points": bounded(points, "accuracy_drop"),
    "changed answers": bounded(share, "changed_answers"),
}
OF_HITS: Mapping[str, Cell] = {"of hits": of(percent, "changed_per_hit")}
SPEED: Mapping[str, Cell] = {
    "speed-up": speed,
    "o": of(percent, "miss_overhead"),
    "c": of(percent, "hit_cost"),
}


def of_runs(runs: Sequence[Run]) -> str:
    """Return the tables of all runs of one experiment; all runs are of one measure."""
    return "\n\n".join(TABLES.get(runs[0].measure, _told)(runs))


def _told(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a table with the columns shown on the screen, for runs that kept a summary. Shares are fractions of 1."""
    rows = [(run, row) for run in runs for row in run.metrics.get("summary", ())]
    names = [name for name in (rows[0][1] if rows else ()) if not isinstance(rows[0][1][name], dict)]
    if names:
        cells = ([_plain(row.get(name)) for name in names] for _, row in rows)
        heads = ("stream", "seed", *names)
        yield table(heads, [(run.task, run.config["seed"], *c) for (run, _), c in zip(rows, cells, strict=True)])
    yield "Its figures stand in [docs/results](../docs/results/index.md)."


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _serve(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        metrics = run.metrics
        yield f"**{run.task}**, {metrics['n']:,} requests{_sample(run)}, {metrics['rounds']} rounds"
        shown: dict[str, Cell] = {
            "method": itemgetter("label"),
            **HITS,
            "exact hits": _exact_hits,
            "rows served": of(percent, "rows_served"),
            metrics["metric"]: of(percent, "accuracy"),
            **LOST,
            **OF_HITS,
            **SPEED,
            "cache": of(size, "bytes"),
        }
        yield columns(shown, [{"label": label, **figures} for label, figures in metrics["methods"].items()])
        yield from _extras(metrics["methods"])


def _exact_hits(figures: Figures) -> str:
    return percent(figures["hits_by_rung"].get("exact", 0.0)) if figures["method"] == "llmcache" else ""


def _extras(methods: Mapping[str, Figures]) -> Iterator[str]:
    """Yield the task's extra figures, if it has any."""
    names = list(next(iter(methods.values()))["extras"])
    if names:
        yield table(
            ("method", *(name.replace("_", " ") for name in names)),
            [(label, *(_extra(figures["extras"][name]) for name in names)) for label, figures in methods.items()],
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
        shown = {
            "tau": _tau,
            **HITS,
            "rows served": of(percent, "rows_served"),
            run.metrics["metric"]: of(percent, "accuracy"),
            **LOST,
            "precision": of(percent, "precision"),
        }
        yield columns(shown, _shown(run))
        if run.metrics["live"]:
            yield columns(LIVE, run.metrics["live"])


LIVE: Mapping[str, Cell] = {
    "live, tau": itemgetter("tau"),
    "hit rate": of(percent, "hit_rate"),
    "drop, points": bounded(points, "accuracy_drop"),
    **SPEED,
    "n": lambda row: f"{row['n']:,} x {row['rounds']}",
    "whole stream: hits": of(percent, "hit_rate_all"),
    "speed-up of o, c": of(number, "speedup_all", 2),
}


def _shown(run: Run) -> list[Figures]:
    """Return points of the first curve: the taus of `SHOWN_TAUS`, and the best in hindsight."""
    points, first = run.metrics["points"], curves(run.metrics["points"])[0]
    told = [best(points, first, loss) for loss in LOSSES] + [harmless_tau(run) if first == PAPERS_CURVE else None]
    taus = {*SHOWN_TAUS, *(point["tau"] for point in told if point is not None)}
    return [point for point in of_curve(points, first) if point["tau"] in taus]


def _frontier(run: Run, curve: Curve) -> tuple[Any, ...]:
    found = [best(run.metrics["points"], curve, loss) for loss in LOSSES]
    cells = [cell for point in found for cell in (("", "") if point is None else _hits_and_tau(point))]
    return (run.task, " ".join(name for name in curve if name), *cells, f"{run.metrics['n']:,}")


def _hits_and_tau(point: Figures) -> tuple[str, str]:
    return percent(point["hit_rate"]), str(_tau(point))


def _tau(point: Figures) -> Any:
    return "exact only" if point["tau"] is None else point["tau"]


def _layers(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield (
            f"**{run.task}**, {run.metrics['n']:,} requests{_sample(run)}: the first half fills the banks, the second "
            "is counted"
        )
        yield f"![Hit rate by layer of {run.task}]({run.group}/{run.path.name}/{LAYERS})"
        yield columns(LAYER, run.metrics["layers"])
        yield columns(LAYERED, [{"name": name, **figures} for name, figures in run.metrics["runs"].items()])


LAYER: Mapping[str, Cell] = {
    "layer": itemgetter("layer"),
    "hits as written": of(percent, "hit_rate_as_written"),
    "fingerprint a layer": of(percent, "hit_rate_per_layer"),
    "and a tau a layer": of(percent, "hit_rate_own_tau"),
    "that tau": of(number, "own_tau", 3),
    "states alike, nearest by embedding": of(percent, "alike_by_embedding"),
    "nearest by what enters the layer": of(percent, "alike_by_layer"),
    "median cosine": of(number, "median_cosine", 3),
}
LAYERED: Mapping[str, Cell] = {
    "run": lambda row: row["name"].replace("_", " "),
    "hit rate": of(percent, "hit_rate"),
    "layers skipped": of(percent, "layers_skipped"),
    **LOST,
    **OF_HITS,
}


def _observe(runs: Sequence[Run]) -> Iterator[str]:
    names = varied([run.config for run in runs])
    yield f"![Hit rates of {runs[0].group}]({runs[0].group}/{runs[0].group}.png)"
    rows = sorted(runs, key=lambda run: [by_size(at(run.config, name)) for name in names])
    yield table(
        (*map(label_of, names), *OBSERVED),
        [
            (*(at(run.config, name) for name in names), *(cell(run.metrics) for cell in OBSERVED.values()))
            for run in rows
        ],
    )


OBSERVED: Mapping[str, Cell] = {
    **HITS,
    "drop, points": bounded(points, "accuracy_drop"),
    "changed answers": of(percent, "changed_answers", 2),
    "bytes": of(size, "bytes"),
    "of states": of(size, "state_bytes"),
    "entries": of(count, "entries"),
    "evicted": of(count, "evicted"),
    "revalidated": of(count, "revalidated"),
    "expelled": of(count, "expelled"),
    "codec's error": of(number, "reconstruction_error", 4),
}


def _sample(run: Run) -> str:
    """Return a note if not all of the data was used, else ""."""
    n_all = run.metrics["facts"].get("n_all")
    if n_all is not None and n_all > run.metrics["n"]:
        return f" of {n_all:,}, from {run.metrics['facts']['n_articles']} articles"
    return " (the first of the data)" if run.metrics["limit"] is not None else ""


#: Tables of the measures used for the paper's claims; other measures use `_told`.
TABLES: Mapping[str, Callable[[Sequence[Run]], Iterator[str]]] = {
    "latency": latency,
    "compiled": compiled,
    "serve": _serve,
    "sweep": _sweep,
    "layers": _layers,
    "observe": _observe,
}
