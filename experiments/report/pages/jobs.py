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
                "`cache = wrap(model)`, `cache.save(FOLDER)`; the next night `LLMCache.load(model, FOLDER)`",
                *_nightly(results_dir),
                "exact",
                f"[figures]({_SPEED}#texts-embedded-again)",
            ),
            (
                "classify a stream with a bound",
                '`cache = wrap(model, tokenizer=tokenizer, engine="onnxruntime", draft="int8")`, '
                "`cache.calibrate(texts, max_drop=0.01)`",
                *_stream(results_dir),
                "bounded",
                f"[figures]({_SPEED}#engines-and-drafts)",
            ),
            (
                "chat, or send prompts that begin alike",
                "`wrap(model)`",
                *_first_token(results_dir),
                "exact",
                f"[figures]({_PREFIXES})",
            ),
            (
                "evaluate with lm-eval",
                "`wrap(lm.model)`, of an `HFLM`",
                *_evaluation(results_dir),
                "exact",
                f"[figures]({_PREFIXES})",
            ),
            (
                "serve a classifier over HTTP",
                "`llmcache calibrate --model FOLDER --log FILE --max-drop 0.01 --engine onnxruntime --draft int8 "
                "--out SAVE`, then "
                "`llmcache serve --model FOLDER --save SAVE`",
                *_serving(results_dir),
                "bounded",
                f"[figures]({_SERVING})",
            ),
        ],
    ).replace("---:", "---")


def _rows(results_dir: Path, *groups: str) -> list[Figures]:
    runs = [run for group in groups for run in runs_if_any(results_dir, group) if run.is_timed]
    return [row for run in runs for row in run.metrics["summary"]]


def _nightly(results_dir: Path) -> tuple[str, str]:
    rows = _rows(results_dir, "service_nightly")
    if not rows:
        return MISSING, ""
    (row,) = rows
    told = f"{number(row['speedup'])}, {percent(row['known'], 0)} of texts known"
    return told, f"a dict of hashes, in your own code: {number(row['dict_speedup'])}"


def _stream(results_dir: Path) -> tuple[str, str]:
    rows = [row for row in _rows(results_dir, "engines") if row["threads"] == 1]
    ours = [row["speedup"] for row in rows if (row["way"], row["max_drop"]) == (ways.ALL, DROP)]
    int8 = [row for row in rows if row["way"] == ways.INT8]
    if not ours:
        return MISSING, ""
    changed = [row["changed_answers"] for row in int8]
    alone = _span([row["speedup"] for row in int8])
    told = f"{percent(min(changed))} to {percent(max(changed))}"
    return _span(ours), f"int8 alone: {alone}; it changed {told}, with no bound in advance"


def _first_token(results_dir: Path) -> tuple[str, str]:
    rows = [row for row in _rows(results_dir, "prefix_limit") if row["share"] in KNOWN]
    if not rows:
        return MISSING, ""
    first, last = (
        median(row["plain_ms"] / row["cache_ms"] for row in rows if row["share"] == known) for known in KNOWN
    )
    told = (
        f"to the first token {number(first)} if {percent(KNOWN[0], 0)} of a prompt is known, {number(last)} if "
        f"{percent(KNOWN[1], 0)}"
    )
    others = [row["batching_ms"] / row["cache_ms"] for row in rows if row["batching_ms"]]
    return told, f"transformers' continuous batching, which knows prefixes too, takes {_span(others)} of this time"


def _evaluation(results_dir: Path) -> tuple[str, str]:
    rows = _rows(results_dir, "lm_eval")
    if not rows:
        return MISSING, ""
    return _span([row["wall_ratio"] for row in rows]), "lm-eval's own cache saves repeated evaluations only"


def _serving(results_dir: Path) -> tuple[str, str]:
    goodput = {
        row["server"]: row["goodput"]
        for row in _rows(results_dir, "serve_load_engines")
        if row["arrivals"] == "poisson"
    }
    if "int8_baseline" not in goodput:
        return MISSING, ""
    ours, plain, int8 = (goodput[name] for name in ("cache", "no_cache", "int8_baseline"))
    beside = f"FastAPI and ONNX Runtime in int8, no batches, no bound: {number(int8 / plain)}"
    return f"{number(ours / plain)} in goodput", beside


def _span(values: list[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"
