"""Pictures of results. Each function reads what a run wrote and draws one figure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcache.errors import ConfigError


def require_matplotlib() -> None:
    """Tell at once, before anything is measured, when nothing could be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plot: matplotlib is missing: pip install 'llmcache[demo]'") from None
    matplotlib.use("Agg")


def plot_speed_against_changes(report: Mapping[str, Any], path: Path) -> None:
    """Draw speed-up against changed answers, one point a live setting, bars from the slowest round to the fastest.

    Args:
        report: As `experiments.demo.run_demo` returns it.
        path: Picture to write; the ending decides the format.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    points = [row for row in report["settings"] if row.get("speedup") is not None]
    x = [100 * row["changed_answers"] for row in points]
    y = [row["speedup"] for row in points]
    below = [row["speedup"] - row["speedup_min"] for row in points]
    above = [row["speedup_max"] - row["speedup"] for row in points]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.text(max(x, default=0.0), 1.0, "no cache", color="grey", ha="right", va="bottom")
    axes.errorbar(x, y, yerr=[below, above], marker="o", capsize=3)
    for row, at in zip(points, zip(x, y, strict=True), strict=True):
        axes.annotate(row["name"], at, xytext=(6, -12), textcoords="offset points", fontsize=9)
    axes.set_xlabel("changed answers (% of all requests)")
    axes.set_ylabel("speed-up (times, whole stream)")
    axes.set_title(f"Support desk, {report['n']:,} requests, MiniLM, median of {report['rounds']} round(s)")
    axes.margins(x=0.15, y=0.15)
    figure.savefig(path, dpi=150)
