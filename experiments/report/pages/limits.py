"""Tables of what calibrated reuse does not do: what misleads it, and pairs that share their words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report.markdown import table
from experiments.report.pages.files import MISSING, by_task, each, row_of, runs_of
from experiments.runs.read import Run

AUDIT = 0.05  # the library's default
ASKED = 0.02  # of the experiments that look for trouble


def limits(results_dir: Path) -> str:
    """What misleads it, by stream: edits, streams that change and that do not, embeddings."""
    columns = {name: by_task(runs_of(results_dir, f"trust_{name}")) for name in ("adversaries", "drift", "embeddings")}
    tasks = list(columns["adversaries"])
    units = ["" if told.endswith("points") else " %" for told, *_ in _LIMITS]
    rows: list[tuple[str, ...]] = [
        (told, *(each([value(run.metrics["summary"]) for run in columns[name][task]], digits, unit) for task in tasks))
        for (told, name, digits, value), unit in zip(_LIMITS, units, strict=True)
    ]
    rows += _told_of_change(columns["drift"], tasks)
    return table(("target 2 %, but for the rows on embeddings", *tasks), rows)


def _told_of_change(runs: Mapping[str, Sequence[Run]], tasks: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """How soon a change is told without an audit, and how many streams that do not change are told to have changed."""
    compared = {task: [run for run in runs[task] if run.metrics.get("unchanged")] for task in tasks}

    def told(run: Run) -> float | None:
        after = row_of(run.metrics["summary"], sources="frozen", audit=0.0)["void said after"]
        return None if after is None else float(after)

    def cell(found: Sequence[Run]) -> str:
        return each([told(run) for run in found], 0, unit="", factor=1.0) or "never" if found else MISSING

    yield "requests from the change until the status is `drifted`, frozen, no audit", *map(cell, compared.values())
    for kind, drawn in (("alike", "drawn alike"), ("zipf", "some texts come often")):
        yield (
            f"streams that did not change and were reported as changed, {drawn}",
            *(" / ".join(_suspended(run, kind) for run in found) or MISSING for found in compared.values()),
        )


def _suspended(run: Run, kind: str) -> str:
    row = row_of(run.metrics["unchanged"], repeats=kind, max_drop=ASKED)
    return f"{row['n_suspended']} of {row['n_streams']}"


def _edited(gate: str, what: str) -> Callable[[Any], float]:
    return lambda rows: float(row_of(rows, gate=gate, edit="all", **{"asked: changed": ASKED})[what])


def _drifted(audit: float) -> Callable[[Any], float]:
    return lambda rows: float(row_of(rows, sources="frozen", audit=audit)["after"])


def _calibrated_hits(rows: Any) -> float:
    return max(float(row["hit rate"]) for row in rows if row["asked: changed"] is not None)


def _lost_at_30(rows: Any) -> float:
    curve = [row for row in rows if row["asked: changed"] is None]
    return float(min(curve, key=lambda row: abs(row["hit rate"] - 0.3))["lost"])


_LIMITS: Sequence[tuple[str, str, int, Callable[[Any], float]]] = (
    (
        "requests [edited to mislead](configs/trust_adversaries.yaml): another answer",
        "adversaries",
        1,
        _edited("off", "with another answer"),
    ),
    ("the same with the content gate", "adversaries", 1, _edited("on", "with another answer")),
    ("hits of the stream without the gate", "adversaries", 1, _edited("off", "hit rate")),
    ("with it", "adversaries", 1, _edited("on", "hit rate")),
    (
        "changed answers after a stream [moved on](configs/trust_drift.yaml), frozen, no audit",
        "drift",
        1,
        _drifted(0.0),
    ),
    ("default audit", "drift", 1, _drifted(AUDIT)),
    (
        "[embeddings](configs/trust_embeddings.yaml): hits of the best calibration, target up to 10 %",
        "embeddings",
        1,
        _calibrated_hits,
    ),
    ("embeddings: nDCG@10 lost at 30 % hits, points", "embeddings", 2, _lost_at_30),
)


def paws(results_dir: Path) -> str:
    """Pairs that share words: how many of each kind are served by one another."""
    runs = runs_of(results_dir, "trust_paws")
    ways = {
        "llmcache, target 2 %": {"way": "llmcache", "gate": "off", "asked: changed": ASKED},
        "the paper's tau of 0.85": {"way": "paper", "gate": "off", "limit": 0.85},
        "semantic response cache at 0.8": {"way": "semantic_response", "gate": "off", "limit": 0.8},
        "semantic response cache at 0.95": {"way": "semantic_response", "gate": "off", "limit": 0.95},
    }
    heads = {
        "same meaning": "same meaning, served",
        "other meaning": "another, served",
        "and another answer": "and another answer",
    }
    rows = [
        (
            told,
            *(each([float(row_of(run.metrics["summary"], **wanted)[name]) for run in runs]) for name in heads.values()),
        )
        for told, wanted in ways.items()
    ]
    return table(("served by one another", *heads), rows)
