"""Table of the ways of reuse, the guarantee of each, and its gain."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.report.claims import judge
from experiments.report.claims.rules import Verdict
from experiments.report.markdown import MISSING, number, percent, table
from experiments.report.pages.files import claims_runs, runs_if_any
from experiments.runs.read import Figures, Run

#: Common parts of prompts, by the experiment that measured them.
PROMPTS = {
    "prefix_system_prompt": "after one system prompt",
    "prefix_chat": "in conversations",
    "prefix_mooncake": "on a trace of a chat service",
    "prefix_nothing_shared": "where nothing is shared",
}
VERDICTS = {Verdict.HOLDS: "hold", Verdict.HOLDS_UNDER: "hold under a condition", Verdict.DOES_NOT_HOLD: "do not"}


def modes(results_dir: Path) -> str:
    """Return the table of all modes with their gains; modes not measured are marked."""
    return table(
        ("mode", "serves", "exact or bounded", "measured gain", "when to use it"),
        [
            (
                "exact repeats: `wrap(model)`",
                "requests with the same tokens",
                "exact: the stored run, bit for bit where requests are batched alike",
                _repeats(results_dir),
                "on by default; requests or documents repeat",
            ),
            (
                "prefixes: `wrap(model)`, decoders",
                "the first tokens that a prompt shares with an earlier one",
                "exact up to rounding",
                _prefixes(results_dir),
                "on by default, without `tau`; system prompts, conversations, few-shot prompts",
            ),
            (
                "calibrated reuse: `wrap(model, learn=2500)` or `cache.calibrate(requests)`",
                "also requests that most likely have the same answer",
                "bounded: at most `max_drop` of all answers change, with confidence 1 - `delta`",
                _calibrated(results_dir),
                "classifiers and scorers with a steady stream",
            ),
            (
                "the paper's cache: `wrap(model, tau=0.85)`",
                "layers whose input is similar to a stored one: Algorithm 1 of the paper",
                "neither",
                f"{_paper(results_dir)}; `tau` 0.9 with `layers='last'`: {_tau(results_dir)}",
                "a reference for experiments; else measure the threshold on your own traffic",
            ),
        ],
    ).replace("---:", "---")


def _repeats(results_dir: Path) -> str:
    """Format whole passes: the stream with most repeats, the other streams, and texts embedded twice."""
    streams: dict[str, list[Figures]] = {}
    for run in runs_if_any(results_dir, "service_exact"):
        streams.setdefault(run.metrics["task"], []).extend(_summaries([run]))
    again = _summaries(runs_if_any(results_dir, "service_second_pass"))
    if not streams:
        return MISSING
    most = max(streams, key=lambda task: max(float(row["hit_rate"]) for row in streams[task]))
    told = [f"{_times(streams[most])} at a hit rate of {_shares(row['hit_rate'] for row in streams[most])}"]
    if others := [row for task, rows in streams.items() if task != most for row in rows]:
        told.append(f"{_times(others)} at {_shares(row['hit_rate'] for row in others)}")
    if again:
        told.append(f"texts embedded a second time: {_times(again)}")
    return "; ".join(told)


def _prefixes(results_dir: Path) -> str:
    """Format time to first token in interleaved calls: whole passes were not measured."""
    told = []
    for group, what in PROMPTS.items():
        rows = [row for run in runs_if_any(results_dir, group) for row in run.metrics["methods"].values()]
        if rows:
            told.append(f"{_times(rows)} {what}")
    return f"first token, calls in turns: {', '.join(told)}" if told else MISSING


def _calibrated(results_dir: Path) -> str:
    rows = _summaries(runs_if_any(results_dir, "service_small"))
    told = []
    for target in sorted({float(row["max_drop"]) for row in rows}):
        found = [row for row in rows if row["max_drop"] == target]
        told.append(
            f"{_times(found)} after learning at a hit rate of {_shares(row['hit_rate'] for row in found)}: target "
            f"{percent(target)} of answers, {_shares((row['changed_answers'] for row in found), 2)} changed"
        )
    return "; ".join(told) or MISSING


def _tau(results_dir: Path) -> str:
    """Format one stream at one threshold in interleaved calls: whole passes were not measured."""
    told = [
        f"{_times([row])} at a hit rate of {percent(row['hit_rate'])}, {percent(row['changed_answers'], 2)} of answers "
        "changed (calls in turns)"
        for run in runs_if_any(results_dir, "banking77")
        for row in run.metrics["methods"].values()
        if row["method"] == "llmcache"
    ]
    return "; ".join(told) or MISSING


def _paper(results_dir: Path) -> str:
    judged = [judgement.verdict for _, judgement in judge(claims_runs(results_dir), {})]
    told = (f"{judged.count(verdict)} {what}" for verdict, what in VERDICTS.items())
    return f"of the paper's {len(judged)} claims {', '.join(told)}"


def _summaries(runs: Iterable[Run]) -> list[Figures]:
    return [row for run in runs for row in run.metrics["summary"]]


def _times(rows: Sequence[Figures]) -> str:
    """Format the smallest and largest speed-up of rows; each is the median of its rounds."""
    least, most = (number(found(row["speedup"] for row in rows), 2) for found in (min, max))
    return f"{least}×" if least == most else f"{least} to {most}×"


def _shares(values: Iterable[float], digits: int = 1) -> str:
    found = sorted(values)
    least, most = percent(found[0], digits), percent(found[-1], digits)
    return most if least == most else f"{least.removesuffix(' %')} to {most}"
