"""Plots of results. Each function reads one run's files and draws one figure."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.metrics import paper
from experiments.metrics.frontier import curves, of_curve
from experiments.runs.read import Figures, Run, at, by_size, groups, label_of, read_runs, varied
from llmcache import ConfigError
from llmcache.cli.output import naming

CURVES, LAYERS = "curves.png", "layers.png"  # in the folder of a run
DPI = 80
#: Titles of experiments and names of curves, in words; others are shown with spaces.
_WORDS = {
    "fig3_hit_rate_by_layer": "Figure 3: hits by layer",
    "fig4_memory": "Figure 4: hits by memory",
    "fig5_tau": "Figure 5: hits and loss by threshold",
    "doccache": "DocCache",
    "semantic_response": "semantic response cache",
    "exact_response": "exact response cache",
}


def require_matplotlib() -> None:
    """Raise at once, before anything is measured, if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plot: matplotlib is missing: pip install 'llmcache-torch[demo]'") from None
    matplotlib.use("Agg")


def plot_speed_against_changes(report: Mapping[str, Any], path: Path, is_idle: bool = True) -> None:
    """Draw speed-up against changed answers for the demo's settings, with a line to the bound of calibrated ones."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = report["settings"][1:]
    x = [100 * row["changed_answers"] for row in rows]
    y = [row["speedup"] for row in rows]
    away = [
        [row["speedup"] - row["speedup_min"] for row in rows],
        [row["speedup_max"] - row["speedup"] for row in rows],
    ]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--", label="no cache")
    axes.errorbar(x, y, yerr=away, marker="o", linestyle="", capsize=3, label="after learning")
    axes.plot(x, [row["whole"]["speedup"] for row in rows], "C0.", alpha=0.5, label="whole stream, learning included")
    for row, *place in zip(rows, x, y, strict=True):
        if row["bound"] is not None:
            axes.plot([place[0], 100 * row["bound"]], [place[1]] * 2, "C3:|", markersize=12)
        axes.annotate(row["name"], place, xytext=(6, 8), textcoords="offset points", fontsize=9)
    axes.plot([], [], "C3:|", markersize=12, label="up to the upper bound")
    axes.set_xlabel("changed answers (% of all requests)")
    axes.set_ylabel("speed-up (times)")
    busy = "" if is_idle else " (busy machine: no measurement)"
    axes.set_title(f"Support desk, {report['n']:,} requests, all-MiniLM-L6-v2{busy}")
    axes.legend(fontsize=8, loc="lower right")
    axes.margins(x=0.15, y=0.15)
    with naming(path):
        figure.savefig(path, dpi=150)


def draw_all(folders: Sequence[Path], is_whole: bool = True) -> list[Path]:
    """Draw every figure of finished runs into the folder of the run, or of the experiment if that `is_whole`."""
    require_matplotlib()
    drawn = (runs for _, runs in groups(read_runs(folders)) if runs[0].measure in PLOTS)
    return [path for runs in drawn for path in PLOTS[runs[0].measure](runs, is_whole)]


def _sweep(runs: Sequence[Run], _: bool) -> Iterator[Path]:
    """Draw precision against hit rate for every curve; hits and loss against tau for the first curve."""
    for run in runs:
        figure, (left, right) = _panels(2)
        names, looks = curves(run.metrics["points"]), styles()
        for name in names:
            served = [point for point in of_curve(run.metrics["points"], name) if point["precision"] is not None]
            served.sort(key=lambda point: point["hit_rate"])
            x, y = ([100 * point[key] for point in served] for key in ("hit_rate", "precision"))
            left.plot(x, y, label=_told(*name), **next(looks))
        _label(left, "hit rate (% of all requests)", "hits whose answer stays (%)")
        left.legend(fontsize=8)
        points = [point for point in of_curve(run.metrics["points"], names[0]) if point["tau"] is not None]
        tau = [point["tau"] for point in points]
        right.axvspan(*paper.TAUS, color="grey", alpha=0.2, label="the paper's best tau")
        lines = (("hit_rate", "hit rate"), ("accuracy_drop", "accuracy lost"), ("changed_answers", "changed answers"))
        for (key, what), look in zip(lines, styles(), strict=False):
            right.plot(tau, [100 * point[key] for point in points], label=what, **look)
        _label(right, f"threshold tau ({_told(*names[0])})", "% of all requests; accuracy in points")
        right.legend(fontsize=8)
        yield _save(figure, run, run.path / CURVES)


def _layers(runs: Sequence[Run], _: bool) -> Iterator[Path]:
    """Draw hit rates and similarity of states for every layer."""
    lines = {
        "hit_rate_as_written": "hits, as the paper writes it",
        "hit_rate_per_layer": "hits, one fingerprint for each layer",
        "hit_rate_own_tau": "hits, one threshold for each layer as well",
        "alike_by_layer": "requests whose state is like the nearest one",
    }
    for run in runs:
        figure, (axes,) = _panels(1)
        rows = run.metrics["layers"]
        for (key, what), look in zip(lines.items(), styles(), strict=False):
            axes.plot([row["layer"] for row in rows], [100 * row[key] for row in rows], label=what, **look)
        axes.set_ylim(-5, 105)
        _label(axes, "layer", "% of all requests")
        figure.legend(fontsize=8, loc="outside lower center", ncols=2)
        yield _save(figure, run, run.path / LAYERS)


def _observe(runs: Sequence[Run], is_whole: bool) -> Iterator[Path]:
    """Draw hit rate against bytes if the cache size varies, else one bar per run."""
    names = varied([run.config for run in runs])
    size = ("cache", "max_entries")
    figure, (axes,) = _panels(1)
    others = [name for name in names if name != size]
    series: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: [by_size(at(run.config, name)) for name in names]):
        series.setdefault(" ".join(str(at(run.config, name)) for name in others), []).append(run)
    if size in names:
        for (what, members), look in zip(series.items(), styles(), strict=False):
            kept = [run.metrics["bytes"] / 1e3 for run in members]
            axes.plot(kept, [100 * run.metrics["hit_rate"] for run in members], label=what, **look)
        axes.set_xscale("log", base=2)  # a cache twice as large is one step to the right
        axes.xaxis.set_major_formatter("{x:,.0f}")
        _label(axes, "entries in memory (kB)", "hit rate (% of all requests)")
        if others:
            axes.legend(fontsize=8, title=" ".join(map(label_of, others)))
    else:
        rates = [100 * members[0].metrics["hit_rate"] for members in series.values()]
        axes.barh(list(series), rates)
        _label(axes, "hit rate (% of all requests)", ", ".join(map(label_of, others)))
    folder = runs[0].path.parent if is_whole else runs[0].path
    yield _save(figure, runs[0], folder / f"{runs[0].group}.png")


def styles() -> Iterator[dict[str, Any]]:
    """Yield styles that keep curves apart where they lie on each other."""
    for number, marker in itertools.cycle(enumerate("osvD^x*P")):
        yield {"marker": marker, "markersize": 6 - 0.3 * number, "linewidth": 3.2 - 0.4 * number, "alpha": 0.8}


def _told(*parts: str | None) -> str:
    """Return a name in words."""
    return " ".join(_WORDS.get(part, part.replace("_", " ")) for part in parts if part)


def _panels(n: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * n, 4.2), layout="constrained")
    return figure, figure.subplots(1, n, squeeze=False)[0]


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _save(figure: Any, run: Run, path: Path) -> Path:
    """Save the figure, with a title that names the run."""
    metrics: Figures = run.metrics
    figure.suptitle(f"{_told(run.group)}: {run.task}, {Path(metrics['model']).name}, {metrics['n']:,} requests")
    with naming(path):
        figure.savefig(path, dpi=DPI, metadata={"Software": None})  # the same figures give the same file
    return path


PLOTS: Mapping[str, Callable[[Sequence[Run], bool], Iterator[Path]]] = {
    "sweep": _sweep,
    "layers": _layers,
    "observe": _observe,
}
