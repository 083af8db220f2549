"""Tables of the measure `trust`: methods calibrated by the same tests on the same requests, every seed in a cell."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.metrics.frontier import best
from experiments.report.markdown import MISSING, each, percent, table
from experiments.runs.read import Figures, Run, grouped

#: Methods in row order, with their titles.
WAYS = {
    "llmcache": "llmcache: neighbours and forecast",
    "student": "the forecast alone",
    "semantic_response": "semantic response cache",
    "doccache": "DocCache",
    "paper": "the paper's method",
}
#: Methods whose errors are shown by hit and by intent.
OWN = ("llmcache", "student")
#: Curves in column order, with their headings.
CURVES = {
    ("llmcache", "frozen"): "llmcache, frozen",
    ("llmcache", "growing"): "llmcache, growing",
    ("semantic_response", None): "semantic response cache",
    ("doccache", None): "DocCache",
    ("paper", None): "the paper's method",
    ("student", "frozen"): "the forecast alone",
}
SOURCES = {"frozen": "frozen", "growing": "growing, no bound"}
LOSSES = {"changed_answers": "0.5 % of answers changed", "accuracy_drop": "half a point of accuracy lost"}
WORTH_TELLING = 0.01  # share of all requests from which exact repeats are shown apart from all hits


def calibrated(runs: Sequence[Run]) -> str:
    """Return the table of limits chosen in advance: every stream and target, with frozen and growing sources."""
    heads = [f"{title}: {name}" for title in SOURCES.values() for name in ("hits", "changed", "points lost")]
    rows = [
        (
            task,
            percent(drop),
            *(cell for sources in SOURCES for cell in _limits(found_of(seeds, "llmcache", drop, sources))),
        )
        for task, seeds in grouped(runs, "task").items()
        for drop in drops_of(seeds)
    ]
    return table(("stream", "target", *heads), rows)


def ways(runs: Sequence[Run]) -> str:
    """Return the table of hits and changed answers: every method, frozen sources, limits chosen in advance."""
    drops = drops_of(runs)
    heads = [f"target {percent(drop)}: {what}" for drop in drops for what in ("hits", "changed")]
    rows = [
        (task, told, *(cell for drop in drops for cell in hits_and_changed(found_of(seeds, way, drop))))
        for task, seeds in grouped(runs, "task").items()
        for way, told in WAYS.items()
    ]
    return table(("stream", "way", *heads), rows)


def errors(runs: Sequence[Run]) -> str:
    """Return the table of changed answers by hit, by intent and overall; frozen sources."""
    rows = [
        (task, WAYS[way], percent(drop), *_errors(found_of(seeds, way, drop)))
        for task, seeds in grouped(runs, "task").items()
        for way in OWN
        for drop in drops_of(seeds)
    ]
    return table(("stream", "way", "target", "changed", "of hits", "worst intent", "median intent"), rows)


def hindsight(runs: Sequence[Run]) -> str:
    """Return the table of each method's best threshold in hindsight, on the requests it is counted on."""
    rows = [
        (task, told, *(_best(seeds, curve, loss) for curve in CURVES))
        for loss, told in LOSSES.items()
        for task, seeds in grouped(runs, "task").items()
    ]
    return table(("stream", "at most", *CURVES.values()), rows)


def drops_of(runs: Sequence[Run]) -> list[float]:
    return list(dict.fromkeys(row["max_drop"] for row in runs[0].metrics["calibrated"])) if runs else []


def chosen(run: Run, way: str, sources: str, drop: float) -> Figures | None:
    """Return a method's figures at a limit chosen in advance; None if not measured."""
    wanted = (way, sources, drop)
    rows = run.metrics["calibrated"]
    return next((r for r in rows if (r.get("method", "llmcache"), r["sources"], r["max_drop"]) == wanted), None)


def found_of(runs: Sequence[Run], way: str, drop: float, sources: str = "frozen") -> list[Figures]:
    """Return a method's figures in every run; none if any run lacks them."""
    rows = [chosen(run, way, sources, drop) for run in runs]
    found = [row for row in rows if row is not None]
    return found if len(found) == len(rows) else []


def _of(found: Sequence[Figures], get: str | Callable[[Figures], Any], digits: int = 1, unit: str = " %") -> str:
    return each([row[get] if isinstance(get, str) else get(row) for row in found], digits, unit)


def _limits(found: Sequence[Figures]) -> tuple[str, ...]:
    if not found:
        return MISSING, "", ""
    return _of(found, "hit_rate"), _of(found, "changed_answers", 2), _of(found, "accuracy_drop", 2, unit="")


def hits_and_changed(found: Sequence[Figures]) -> tuple[str, str]:
    if not found:
        return MISSING, ""
    hits = _of(found, "hit_rate")
    if max(map(_exact, found)) >= WORTH_TELLING:
        hits += f", of these exact {_of(found, _exact)}"
    return hits, _of(found, "changed_answers", 2)


def _exact(row: Figures) -> float:
    """Return the hits on a request's own repeat, as a share of all requests."""
    return float(row["hits_by_rung"].get("exact", 0.0))


def _errors(found: Sequence[Figures]) -> tuple[str, ...]:
    if not found:
        return MISSING, "", "", ""
    told = _of(found, "changed_answers", 2), _of(found, "changed_per_hit", 2)
    if any(row.get("by_intent") is None for row in found):
        return *told, MISSING, MISSING
    worst, middle = (lambda row: row["by_intent"]["worst"]["changed"]), (lambda row: row["by_intent"]["median"])
    return *told, _of(found, worst), _of(found, middle, 2)


def _best(runs: Sequence[Run], curve: tuple[str, str | None], loss: str) -> str:
    """Format the hits of every seed; if accuracy is the limit, also the changed answers."""
    found = [best(run.metrics["points"], curve, loss) for run in runs]
    if all(point is None for point in found):
        return MISSING
    hits, changed = (each([point and point[name] for point in found]) for name in ("hit_rate", "changed_answers"))
    return hits if loss != "accuracy_drop" else f"{hits}; changed {changed}"
