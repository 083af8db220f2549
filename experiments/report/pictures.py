"""Pictures by measure, drawn from the runs of one experiment, for pages and reports; and that of the demo."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.measures.policies import BEST
from experiments.metrics import paper
from experiments.metrics.frontier import of_curve
from experiments.report import tables
from experiments.report.columns import NAMES
from experiments.report.markdown import percent
from experiments.report.tables import WAYS, chosen, drops_of
from experiments.runs.read import Figures, Run, at, by_size, grouped, label_of, read_runs, varied
from llmcache import ConfigError
from llmcache.cli.output import naming

#: Draws the runs of one measure.
Draw = Callable[[Sequence[Run]], Any]
_BLUE, _GREY, _ORANGE, _RED = "#0a58c2", "#8b95a1", "#b4690e", "#b3261e"
#: Names of experiments in pictures that show several.
_TITLES = {
    "trust_bound": "reuse",
    "trust_bound_draft": "reuse and an int8 draft",
    "serve_load": "eager",
    "serve_load_engines": "ONNX Runtime and draft",
}
_SERVERS = {
    "cache": "llmcache serve",
    "no_cache": "the same, cache off",
    "baseline": "FastAPI and transformers",
    "onnx_baseline": "FastAPI and ONNX Runtime",
    "int8_baseline": "FastAPI and ONNX Runtime, int8",
}
_POLICY_STREAMS = ("Mooncake's trace, blocks", "Zipf 1", "Zipf 1, scans", "Zipf 1, 6 phases")
_HELD = 0.1  # share of the keys that a cache holds in the picture of policies
_LAYERS = {
    "hit_rate_as_written": "hits, as the paper writes it",
    "hit_rate_per_layer": "hits, one fingerprint for each layer",
    "hit_rate_own_tau": "hits, one threshold for each layer as well",
    "alike_by_layer": "requests whose state is like the nearest one",
}


def require_matplotlib() -> None:
    """Raise at once, before anything is measured, if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plot: matplotlib is missing: pip install 'llmcache-torch[demo]'") from None
    matplotlib.use("Agg")


def draw_all(folders: Sequence[Path], is_whole: bool = True) -> list[Path]:
    """Draw finished runs into the folder of the experiment, or into that of the first run unless it `is_whole`."""
    require_matplotlib()
    drawn = [
        (group, runs) for group, runs in grouped(read_runs(folders), "group").items() if runs[0].measure in PICTURES
    ]
    paths = [(runs[0].path.parent if is_whole else runs[0].path) / f"{group}.svg" for group, runs in drawn]
    for path, (_, runs) in zip(paths, drawn, strict=True):
        save(PICTURES[runs[0].measure](runs), path)
    return paths


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG; the same figure gives the same file."""
    import matplotlib

    with (
        naming(path),
        matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 8}),
    ):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def first_rows(runs: Sequence[Run]) -> dict[str, list[Figures]]:
    """Return each stream's rows with the fewest threads and the smallest target."""
    found = {}
    for task, members in grouped(runs, "task").items():
        rows = tables.rows_of(members, tables.SUMMARY)
        threads = min(row["threads"] for row in rows)
        drop = min((row["max_drop"] for row in rows if row["max_drop"] is not None), default=None)
        found[task] = [row for row in rows if row["threads"] == threads and row["max_drop"] in (None, drop)]
    return found


def speed(runs: Sequence[Run]) -> Any:
    """Times of eager by each way to answer, one panel a stream."""
    rows = first_rows(runs)
    figure, panels = _panels(len(rows))
    for axes, (task, found) in zip(panels, rows.items(), strict=True):
        names = [NAMES[row["way"]] for row in found]
        _bars(axes, names, [row["speedup"] for row in found], _is_ours)
        for place, row in enumerate(found):
            axes.annotate(
                f"{row['speedup']:.1f}; {percent(row['changed_answers'], 2)}",
                (row["speedup"], place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
        axes.set_xlim(0, 1.5 * max(row["speedup"] for row in found))
        axes.invert_yaxis()
        axes.set_title(task)
        axes.set_xlabel("times as fast as eager; changed answers")
    for axes in panels[1:]:
        axes.set_yticklabels([])
    return figure


def quality(runs: Sequence[Run]) -> Any:
    """Hits and changed answers of each method, calibrated at each target: medians over seeds."""
    by_stream = grouped(runs, "task")
    figure, panels = _panels(len(by_stream))
    for axes, (task, seeds) in zip(panels, by_stream.items(), strict=True):
        drops = drops_of(seeds)
        for way, name in WAYS.items():
            found = [[chosen(run, way, "frozen", drop) for run in seeds] for drop in drops]
            points = [[row for row in rows if row is not None] for rows in found]
            x, y = (
                [100 * median(row[key] for row in rows) for rows in points if rows]
                for key in ("hit_rate", "changed_answers")
            )
            style = {"color": _BLUE, "linewidth": 2} if way == "llmcache" else {"alpha": 0.8}
            axes.plot(x, y, marker="o", label=name, **style)
        for drop in drops:
            axes.axhline(100 * drop, color=_GREY, linewidth=0.7, linestyle=":")
        axes.set_title(task)
        _label(axes, "served from memory (% of requests)", "changed answers (% of requests)")
    _legend(figure, panels[0])
    return figure


def bound(runs: Sequence[Run]) -> Any:
    """Calibrations that changed more answers than they allowed, by stream and target."""
    members = grouped(runs, "group")
    found = {group: tables.rows_of(members[group], tables.figure("claims")) for group in members}
    figure, (axes,) = _panels(1, width=max(8, 0.8 * max(map(len, found.values()))))
    for shift, (group, rows) in enumerate(found.items()):
        places = [place + 0.4 * shift for place in range(len(rows))]
        shares = [100 * row["n_violated"] / row["n_calibrations"] for row in rows]
        axes.bar(places, shares, width=0.38, label=_TITLES.get(group, group), color=(_BLUE, _ORANGE)[shift])
        if not shift:
            axes.set_xticks([place + 0.2 for place in places])
            axes.set_xticklabels([f"{row['run'].task}\n{percent(row['max_drop'])}" for row in rows])
            delta = members[group][0].metrics["delta"]
            axes.axhline(
                100 * delta, color=_RED, linestyle="--", label=f"allowed by the confidence of {percent(1 - delta, 0)}"
            )
    _label(axes, "stream and target", "calibrations over their target (%)")
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


def prefixes(runs: Sequence[Run]) -> Any:
    """Time to first token by the share of the prompt that is known: llmcache and a ready K/V cache."""
    rows = [row for row in tables.rows_of(runs, tables.SUMMARY) if row["n_known"] is not None]  # else it was not run
    models = list(dict.fromkeys((row["model"], row["length"]) for row in rows))
    figure, panels = _panels(len(models), width=2.4)
    for axes, (model, length) in zip(panels, models, strict=True):
        found = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        known = [100 * row["share"] for row in found]
        for key, name, style in (
            ("cache_ms", "llmcache", {"color": _BLUE, "linewidth": 2}),
            ("limit_ms", "a ready K/V cache", {"color": _ORANGE, "linestyle": "--"}),
            ("plain_ms", "the model alone", {"color": _GREY}),
        ):
            axes.plot(known, [row[key] for row in found], marker="o", label=name, **style)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{model}, {length:,} tokens")
        _label(axes, "known tokens (%)", "time to first token (ms)")
    panels[0].legend(fontsize=7)
    return figure


def serving(runs: Sequence[Run]) -> Any:
    figure, panels = _panels(len(runs), width=5, height=2.2)
    for axes, run in zip(panels, runs, strict=True):
        rows = run.metrics["summary"]
        names = [_SERVERS.get(row["server"], row["server"]) for row in rows]
        _bars(axes, names, [row["goodput"] for row in rows], lambda name: name == _SERVERS["cache"])
        axes.invert_yaxis()
        axes.set_title(f"{run.task}, {_TITLES.get(run.group, run.group)}")
        axes.set_xlabel(f"requests per second, 99 % of them within {run.metrics['slo_ms']:g} ms")
    return figure


def stores(runs: Sequence[Run]) -> Any:
    """Hits of each eviction policy in a cache that holds a tenth of the keys, or near it."""
    by_stream = {run.task: run for run in runs}
    shown = [name for name in _POLICY_STREAMS if name in by_stream] or list(by_stream)
    figure, panels = _panels(len(shown), width=2.4)
    for axes, name in zip(panels, shown, strict=True):
        rows = by_stream[name].metrics["summary"]
        held = min((row["share"] for row in rows), key=lambda share: abs(share - _HELD))
        rows = [row for row in rows if row["share"] == held]
        rows.sort(key=lambda row: (row["policy"] == BEST, row["hit_rate"]))
        _bars(axes, [row["policy"] for row in rows], [100 * row["hit_rate"] for row in rows], lambda name: name != BEST)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("hits (% of requests)")
    return figure


def thresholds(runs: Sequence[Run]) -> Any:
    """Hits and changed answers of the paper's method against its threshold, on each stream."""
    figure, panels = _panels(2, width=4.5)
    for axes, key, what in (
        (panels[0], "hit_rate", "hit rate (% of requests)"),
        (panels[1], "changed_answers", "changed answers (% of requests)"),
    ):
        for run, style in zip(runs, styles(), strict=False):
            points = [row for row in of_curve(run.metrics["points"], paper.CURVE) if row["tau"] is not None]
            points.sort(key=lambda row: row["tau"])
            axes.plot([row["tau"] for row in points], [100 * row[key] for row in points], label=run.task, **style)
        axes.axvspan(*paper.TAUS, color=_GREY, alpha=0.2, label="the paper's best thresholds")
        _label(axes, "threshold tau", what)
    _legend(figure, panels[1], n_columns=4)
    return figure


def layers(runs: Sequence[Run]) -> Any:
    """Hit rates and similarity of states for every layer, one panel a stream."""
    figure, panels = _panels(len(runs), width=4.5)
    for axes, run in zip(panels, runs, strict=True):
        rows = run.metrics["layers"]
        for (key, what), style in zip(_LAYERS.items(), styles(), strict=False):
            axes.plot([row["layer"] for row in rows], [100 * row[key] for row in rows], label=what, **style)
        axes.set_ylim(-5, 105)
        axes.set_title(run.task)
        _label(axes, "layer", "% of all requests")
    _legend(figure, panels[0], n_columns=2)
    return figure


def sizes(runs: Sequence[Run]) -> Any:
    """Hit rate against bytes if the cache size varies, else one bar per run."""
    names = varied([run.config for run in runs])
    size = ("cache", "max_entries")
    others = [name for name in names if name != size]
    figure, (axes,) = _panels(1, width=4.5)
    series: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: [by_size(at(run.config, name)) for name in names]):
        series.setdefault(" ".join(str(at(run.config, name)) for name in others), []).append(run)
    if size in names:
        for (what, members), style in zip(series.items(), styles(), strict=False):
            kept = [run.metrics["bytes"] / 1e3 for run in members]
            axes.plot(kept, [100 * run.metrics["hit_rate"] for run in members], label=what, **style)
        axes.set_xscale("log", base=2)  # a cache twice as large is one step to the right
        axes.xaxis.set_major_formatter("{x:,.0f}")
        _label(axes, "entries in memory (kB)", "hit rate (% of all requests)")
        if others:
            axes.legend(fontsize=7, title=", ".join(map(label_of, others)))
    else:
        _bars(axes, list(series), [100 * members[0].metrics["hit_rate"] for members in series.values()])
        _label(axes, "hit rate (% of all requests)", ", ".join(map(label_of, others)))
    return figure


def styles() -> Iterator[dict[str, Any]]:
    """Yield styles that keep curves apart where they lie on each other."""
    for number, marker in itertools.cycle(enumerate("osvD^x*P")):
        yield {"marker": marker, "markersize": 6 - 0.3 * number, "linewidth": 3.2 - 0.4 * number, "alpha": 0.8}


def _panels(n: int, width: float = 3.2, height: float = 3.0) -> tuple[Any, Sequence[Any]]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * n, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(1, n, squeeze=False)[0]


def _bars(
    axes: Any, names: Sequence[str], values: Sequence[float], is_ours: Callable[[str], bool] = lambda _: True
) -> None:
    axes.barh(names, values, color=[_BLUE if is_ours(name) else _GREY for name in names])


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _legend(figure: Any, axes: Any, n_columns: int = 3) -> None:
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=n_columns)


def plot_ways(report: Mapping[str, Any], path: Path, is_idle: bool = True) -> None:
    """Draw the ways of an advice: how fast each is, and the answers that it changed beside what is allowed."""
    require_matplotlib()
    from matplotlib.figure import Figure

    tried = [way for way in report["ways"] if way["mean_ms"]]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(left, [way["name"] for way in tried], [way["speedup"] for way in tried], _is_ours)
    for place, way in enumerate(tried):
        p99 = "" if way["p99_ms"] is None else f";  p99 {way['p99_ms']:.1f} ms"
        text = f"{way['speedup']:.1f}{p99}"
        left.annotate(text, (way["speedup"], place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    left.set_xlim(0, 1.7 * max(way["speedup"] for way in tried))
    left.invert_yaxis()
    left.tick_params(axis="y", labelsize=7)
    left.set_xlabel("times as fast as the model alone", fontsize=8)
    changing = [way for way in tried if way["bound"] is None or way["bound"] > 0]
    for place, way in enumerate(changing):
        right.plot([100 * way["changed"]], [place], "o", color=_BLUE if _is_ours(way["name"]) else _GREY, zorder=3)
        if way["bound"] is not None:
            right.plot([0, 100 * way["bound"]], [place] * 2, "|-", color=_RED, linewidth=1, markersize=9)
    right.plot([], [], "o", color=_GREY, label="changed, seen here")
    right.plot([], [], "|-", color=_RED, label="at most, 95 % sure")
    right.set_yticks(range(len(changing)), [way["name"] for way in changing], fontsize=7)
    right.set_ylim(len(changing) - 0.4, -0.6)
    right.set_xlim(left=0)
    right.set_xlabel("changed answers (%)", fontsize=8)
    right.legend(fontsize=7)
    busy = "" if is_idle else " (busy machine: no measurement)"
    figure.suptitle(f"A support desk, {report['n_served']:,} requests, all-MiniLM-L6-v2{busy}", fontsize=9)
    with naming(path):
        figure.savefig(path, dpi=150)


def _is_ours(name: str) -> bool:
    return name.startswith("llmcache")


PICTURES: Mapping[str, Draw] = {
    "engines": speed,
    "trust": quality,
    "bound": bound,
    "prefix_limit": prefixes,
    "serve_load": serving,
    "policies": stores,
    "sweep": thresholds,
    "layers": layers,
    "observe": sizes,
}
