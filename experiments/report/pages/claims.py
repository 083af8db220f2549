"""Short table of the verdicts on the paper's claims."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.metrics.frontier import at_tau
from experiments.metrics.paper import TAUS
from experiments.report.claims import judge
from experiments.report.claims.evidence import PAPERS_CURVE
from experiments.report.markdown import percent, points, ratio, table
from experiments.report.pages.files import runs_of
from experiments.report.verdict import Judgement, Verdict
from experiments.runs.read import Run

GROUPS = ("table1_latency", "table2_accuracy", "fig3_hit_rate_by_layer", "fig4_memory", "fig5_tau")


def verdicts(results_dir: Path) -> str:
    """Return the table of claims with the deciding figures and the report's verdicts."""
    results = {group: runs_of(results_dir, group) for group in GROUPS}
    judged = judge(results, {})
    return table(
        ("claim of LLMCache (Bansal 2025)", "measured", "verdict", "why"),
        [
            (
                f"[{claim.said}](configs/{claim.config}.yaml)",
                f"{shown(results[claim.config])}{_under(judgement)}",
                WORDS[judgement.verdict],
                f"{judgement.why.partition('. ')[0].rstrip('.')}.",
            )
            for (claim, judgement), shown in zip(judged, MEASURED, strict=True)
        ],
    ).replace("---:", "---")


#: Verdicts in a word.
WORDS: Mapping[Verdict, str] = {
    Verdict.HOLDS: "holds",
    Verdict.HOLDS_UNDER: "partly",
    Verdict.DOES_NOT_HOLD: "fails",
    Verdict.INCOMPLETE: "incomplete",
    Verdict.NOT_MEASURED: "unmeasured",
}


def _under(judgement: Judgement) -> str:
    """Return when a claim holds, or the note to its verdict, in brackets; "" without one."""
    told = judgement.condition
    if not told or told.startswith("("):
        return f" {told}".rstrip()
    return f" (holds under: {told})" if judgement.verdict is Verdict.HOLDS_UNDER else f" ({told})"


def _calls(head: str) -> Callable[[Sequence[Run]], str]:
    """Return a formatter for the costs of a call with the paper's search and storage."""

    def told(runs: Sequence[Run]) -> str:
        rows = [row for row in runs[0].metrics["calls"] if row["kept"] == "as the paper" and row["head"] == head]
        return "; ".join(
            f"{row['model']} {row['nocache_ms']:.1f} ms, a hit {row['hit_ms']:.1f}, a miss {row['miss_ms']:.1f}"
            for row in rows
            if head == "token" or row["model"] in ("bert-base", "distilbert")
        )

    return told


def _fastest(runs: Sequence[Run]) -> str:
    row = max((row for run in runs for row in run.metrics["live"]), key=lambda row: float(row["speedup"]))
    run = next(run for run in runs if row in run.metrics["live"])
    return (
        f"fastest live run: {row['speedup']:.2f} times on {run.task} at tau {row['tau']}, a drop of "
        f"{points(row['accuracy_drop'])} points, {percent(row['changed_answers'])} of answers changed"
    )


def _generation(runs: Sequence[Run]) -> str:
    ratios = runs[0].metrics["generation"][0]["ratios"]
    return (
        f"{ratio(ratios['exact_hit/kv_cache'])} of its time where the prompt is known, "
        f"{ratio(ratios['miss/kv_cache'])} where not"
    )


def _drops(runs: Sequence[Run]) -> str:
    return "drop, points: " + "; ".join(
        f"{run.task} {points(figures['accuracy_drop'], figures['accuracy_drop_ci'])} at {percent(figures['hit_rate'])} "
        f"hits, {percent(figures['changed_answers'])} changed"
        for run in runs
        for figures in run.metrics["methods"].values()
        if figures["method"] == "llmcache" and "tau" in figures["options"]
    )


def _layers(runs: Sequence[Run]) -> str:
    written: Mapping[str, Mapping[str, float]] = {run.task: run.metrics["runs"]["as_written"] for run in runs}
    return "; ".join(
        f"{task}: {percent(row['hit_rate'])} in every layer alike, {percent(row['changed_per_hit'])} of them with "
        "another answer"
        for task, row in written.items()
    )


def _memory(runs: Sequence[Run]) -> str:
    rates = {
        run.config["cache"]["max_entries"]: run.metrics["hit_rate"]
        for run in runs
        if run.config["cache"]["compression"]["name"] == "none"
    }
    return ", ".join(f"{size:,}: {percent(rates[size])}" for size in sorted(rates))


def _lowest_tau(runs: Sequence[Run]) -> str:
    low = {run.task: at_tau(run.metrics["points"], PAPERS_CURVE, TAUS[0]) for run in runs}
    told = ", ".join(f"{task} {points(row['accuracy_drop'])}" for task, row in low.items() if row is not None)
    return f"drop at {TAUS[0]}, points: {told}"


def _documents(runs: Sequence[Run]) -> str:
    return f"{len(runs)} streams, by the hits that lose half a point at most"


#: Formatters of the figures for each claim, in the claims' order.
MEASURED: Sequence[Callable[[Sequence[Run]], str]] = (
    _calls("class"),
    _calls("token"),
    _fastest,
    _generation,
    _drops,
    _documents,
    _layers,
    _memory,
    _lowest_tau,
)
