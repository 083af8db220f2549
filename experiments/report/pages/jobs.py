"""The README's first table: what one does, the line for it, and what it saves beside the strongest other way."""

from pathlib import Path
from statistics import median

from experiments.measures import engines as ways
from experiments.report.markdown import MISSING, number, percent, table
from experiments.report.pages.files import runs_if_any
from experiments.runs.read import Figures

DROP = 0.01
#: Share of a prompt's tokens that are known, in `prefix_limit`.
KNOWN = (0.75, 0.97)
_SPEED, _PREFIXES, _SERVING = (f"docs/results/{page}.md" for page in ("speed", "prefixes", "serving"))


def jobs(results_dir: Path) -> str:
    """Return the table; jobs not measured are marked."""
    return table(
        ("you", "one line", "times as fast", "beside", "answers", ""),
        [
            (
                "embed a corpus again, nightly",
                "`LLMCache.wrap(model)`",
                _nightly(results_dir),
                "a dict of hashes does as well where whole texts repeat",
                "exact",
                f"[figures]({_SPEED})",
            ),
            (
                "classify a stream with a bound",
                '`wrap(model, engine="onnxruntime", draft="int8")`, `calibrate(texts, max_drop=0.01)`',
                *_stream(results_dir),
                "bounded",
                f"[figures]({_SPEED}#engines-and-drafts)",
            ),
            (
                "chat, or send prompts that begin alike",
                "`LLMCache.wrap(model)`",
                *_first_token(results_dir),
                "exact",
                f"[figures]({_PREFIXES})",
            ),
            (
                "evaluate with lm-eval",
                "`LLMCache.wrap(lm.model)`",
                *_evaluation(results_dir),
                "exact",
                f"[figures]({_PREFIXES})",
            ),
            (
                "serve a classifier over HTTP",
                "`llmcache calibrate --engine onnxruntime --draft int8 --out SAVE`, `llmcache serve --save SAVE`",
                *_serving(results_dir),
                "bounded",
                f"[figures]({_SERVING})",
            ),
        ],
    ).replace("---:", "---")


def _rows(results_dir: Path, *groups: str) -> list[Figures]:
    runs = [run for group in groups for run in runs_if_any(results_dir, group) if run.is_timed]
    return [row for run in runs for row in run.metrics["summary"]]


def _nightly(results_dir: Path) -> str:
    rows = _rows(results_dir, "service_nightly")
    return f"{number(rows[0]['speedup'])}, {percent(rows[0]['known'], 0)} of texts known" if rows else MISSING


def _stream(results_dir: Path) -> tuple[str, str]:
    rows = [row for row in _rows(results_dir, "engines") if row["threads"] == 1]
    ours = [row["speedup"] for row in rows if (row["way"], row["max_drop"]) == (ways.ALL, DROP)]
    int8 = [row for row in rows if row["way"] == ways.INT8]
    if not ours:
        return MISSING, ""
    changed = [row["changed_answers"] for row in int8]
    alone = _span([row["speedup"] for row in int8])
    told = f"{percent(min(changed))} to {percent(max(changed))}"
    return _span(ours), f"int8 alone: {alone}; it changed {told}, with no bound"


def _first_token(results_dir: Path) -> tuple[str, str]:
    rows = [row for row in _rows(results_dir, "prefix_limit") if row["share"] in KNOWN]
    if not rows:
        return MISSING, ""
    first, last = (
        median(row["plain_ms"] / row["cache_ms"] for row in rows if row["share"] == known) for known in KNOWN
    )
    told = (
        f"{number(first)} to {number(last)} to the first token, {percent(KNOWN[0], 0)} to {percent(KNOWN[1], 0)} known"
    )
    others = [row["batching_ms"] / row["cache_ms"] for row in rows if row["batching_ms"]]
    return told, f"transformers' continuous batching takes {_span(others)} times as long as this"


def _evaluation(results_dir: Path) -> tuple[str, str]:
    rows = _rows(results_dir, "lm_eval")
    if not rows:
        return MISSING, ""
    again = _span([row["wall_again_ratio"] for row in rows])
    return _span(
        [row["wall_ratio"] for row in rows]
    ), f"lm-eval's own cache knows whole requests only; run again: {again}"


def _serving(results_dir: Path) -> tuple[str, str]:
    goodput = {
        row["server"]: row["goodput"]
        for row in _rows(results_dir, "serve_load_engines")
        if row["arrivals"] == "poisson"
    }
    if "int8_baseline" not in goodput:
        return MISSING, ""
    ours, plain, int8 = (goodput[name] for name in ("cache", "no_cache", "int8_baseline"))
    beside = f"FastAPI and ONNX Runtime in int8, no bound: {number(int8 / plain)}"
    return f"{number(ours / plain)} in goodput", beside


def _span(values: list[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"
