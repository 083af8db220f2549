"""The picture at the top of each page of results, drawn from the files that the page's tables are made from."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.measures.policies import BEST
from experiments.metrics import paper
from experiments.metrics.frontier import of_curve
from experiments.report.claims.evidence import PAPERS_CURVE
from experiments.report.markdown import percent
from experiments.report.pages import engines, reuse, ways
from experiments.report.pages.files import runs_if_any, runs_of
from experiments.report.plots import require_matplotlib, styles

#: Draws a picture of the results in a folder; None if nothing of it was measured.
Draw = Callable[[Path], Any]
_BLUE, _GREY, _ORANGE = "#0a58c2", "#8b95a1", "#b4690e"
_POLICY_STREAMS = ("Mooncake's trace, blocks", "Zipf 1", "Zipf 1, scans", "Zipf 1, 6 phases")
_CACHE = 0.1  # share of the keys that the cache holds


def speed(results_dir: Path) -> Any:
    """Times of eager by each way to answer, one panel a stream, on one thread."""
    rows = engines.first_rows(results_dir)
    if not rows:
        return None
    figure, panels = _panels(len(rows))
    for axes, (task, found) in zip(panels, rows.items(), strict=True):
        names = [engines.NAMES[row["way"]] for row in found]
        colours = [_BLUE if name.startswith("llmcache") else _GREY for name in names]
        axes.barh(names, [row["speedup"] for row in found], color=colours)
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


def quality(results_dir: Path) -> Any:
    """Hits and changed answers of each method, calibrated at each target: medians over seeds."""
    trust = reuse.trust_runs(results_dir)
    figure, panels = _panels(len(trust))
    for axes, (task, runs) in zip(panels, trust.items(), strict=True):
        drops = list(dict.fromkeys(row["max_drop"] for row in runs[0].metrics["calibrated"]))
        for way, name in ways.NAMES.items():
            found = [[reuse.chosen(run, way, "frozen", drop) for run in runs] for drop in drops]
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
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=3)
    return figure


def bound(results_dir: Path) -> Any:
    """Calibrations of 200 that changed more answers than they allowed, by stream and target."""
    groups = {"trust_bound": "reuse", "trust_bound_draft": "reuse and an int8 draft"}
    figure, (axes,) = _panels(1, width=8)
    for shift, (group, name) in enumerate(groups.items()):
        rows = [(run.task, row) for run in runs_if_any(results_dir, group) for row in run.metrics["claims"]]
        places = [place + 0.4 * shift for place in range(len(rows))]
        shares = [100 * row["n_violated"] / row["n_calibrations"] for _, row in rows]
        axes.bar(places, shares, width=0.38, label=name, color=(_BLUE, _ORANGE)[shift])
        if not shift:
            axes.set_xticks([place + 0.2 for place in places])
            axes.set_xticklabels([f"{task}\n{percent(row['max_drop'])}" for task, row in rows])
            allowed = 100 * runs_of(results_dir, group)[0].metrics["delta"]
            axes.axhline(allowed, color="#b3261e", linestyle="--", label="allowed by the confidence of 95 %")
    _label(axes, "stream and target", "calibrations over their target (%)")
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return figure


def prefixes(results_dir: Path) -> Any:
    """Time to first token by the share of the prompt that is known: llmcache and a ready K/V cache."""
    rows = [row for run in runs_of(results_dir, "prefix_limit") for row in run.metrics["summary"]]
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


def serving(results_dir: Path) -> Any:
    """Goodput of each server."""
    named = {"cache": "llmcache serve", "no_cache": "the same, cache off", "baseline": "FastAPI and transformers"}
    named |= {"onnx_baseline": "FastAPI and ONNX Runtime"}
    found = {
        "eager": runs_if_any(results_dir, "serve_load"),
        "ONNX Runtime and draft": runs_if_any(results_dir, "serve_load_engines"),
    }
    found = {name: [run for run in runs if run.is_timed] for name, runs in found.items()}
    panels_of = [(name, run) for name, runs in found.items() for run in runs]
    if not panels_of:
        return None
    figure, panels = _panels(len(panels_of), width=5, height=2.2)
    for axes, (name, run) in zip(panels, panels_of, strict=True):
        rows = [row for row in run.metrics["summary"] if row["arrivals"] == "poisson" and "goodput" in row]
        axes.barh(
            [named.get(row["server"], row["server"]) for row in rows],
            [row["goodput"] for row in rows],
            color=[_BLUE if row["server"] == "cache" else _GREY for row in rows],
        )
        axes.invert_yaxis()
        axes.set_title(f"{run.task}, {name}")
        axes.set_xlabel(f"requests per second, 99 % of them within {run.metrics['slo_ms']:g} ms")
    return figure


def stores(results_dir: Path) -> Any:
    """Hits of each eviction policy in a cache that holds a tenth of the keys."""
    runs = {run.task: run for run in runs_of(results_dir, "policies")}
    shown = [name for name in _POLICY_STREAMS if name in runs]
    figure, panels = _panels(len(shown), width=2.4)
    for axes, name in zip(panels, shown, strict=True):
        rows = [row for row in runs[name].metrics["summary"] if row["share"] == _CACHE]
        rows.sort(key=lambda row: (row["policy"] == BEST, row["hit_rate"]))
        names = ["best possible" if row["policy"] == BEST else row["policy"] for row in rows]
        axes.barh(
            names,
            [100 * row["hit_rate"] for row in rows],
            color=[_GREY if row["policy"] == BEST else _BLUE for row in rows],
        )
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("hits (% of requests)")
    return figure


def the_paper(results_dir: Path) -> Any:
    """Hits and loss of the paper's method against its threshold, on each stream."""
    runs = runs_of(results_dir, "fig5_tau")
    figure, panels = _panels(2, width=4.5)
    for axes, key, what in (
        (panels[0], "hit_rate", "hit rate (% of requests)"),
        (panels[1], "changed_answers", "changed answers (% of requests)"),
    ):
        for run, style in zip(runs, styles(), strict=False):
            points = [row for row in of_curve(run.metrics["points"], PAPERS_CURVE) if row["tau"] is not None]
            points.sort(key=lambda row: row["tau"])
            axes.plot([row["tau"] for row in points], [100 * row[key] for row in points], label=run.task, **style)
        axes.axvspan(*paper.TAUS, color=_GREY, alpha=0.2, label="the paper's best thresholds")
        _label(axes, "threshold tau", what)
    figure.legend(*panels[1].get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=4)
    return figure


def _panels(n: int, width: float = 3.2, height: float = 3.0) -> tuple[Any, Sequence[Any]]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * n, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(1, n, squeeze=False)[0]


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


PICTURES: Mapping[str, Draw] = {
    "speed": speed,
    "quality": quality,
    "bound": bound,
    "prefixes": prefixes,
    "serving": serving,
    "stores": stores,
    "paper": the_paper,
}


def draw(results_dir: Path, folder: Path) -> None:
    """Draw each picture into a folder; one of times from a busy machine keeps its file."""
    import matplotlib

    for name, make in PICTURES.items():
        if (figure := make(results_dir)) is not None:
            with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8}):
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
