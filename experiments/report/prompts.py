"""The tables of prompts: time to first token, generation token by token, and parity."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.measures.decode import KINDS
from experiments.measures.prefix import ceiling_of_known
from experiments.report.markdown import number, percent, ratio, size, speed, table
from experiments.runs.read import Figures, Run


def prefix(runs: Sequence[Run]) -> Iterator[str]:
    """How much sooner the first token is there, and what of the prompts was known."""
    yield table(
        (
            *("stream", "model", "method", "tokens known", "reused", "ceiling", "TTFT ratio", "of ceiling"),
            *(
                "median of prompts",
                "prompts with known tokens",
                "their ceiling",
                "latter half",
                "same first token",
                "held",
                "n",
            ),
        ),
        [_method(run, label, row) for run in runs for label, row in run.metrics["methods"].items()],
    )
    yield (
        "Ratios: time of the model alone, each prompt with a K/V cache of its own, over that with llmcache, in turns; "
        "sums over prompts, median over rounds, slowest and fastest round. "
        "Ceiling: 1 / (1 - share of tokens known), of the same prompts as the ratio."
    )
    yield table(
        ("stream", "method", "first token, ms", "p50", "p90", "model alone p50", "p90", "n"),
        [
            (
                run.task,
                label,
                kind,
                *_times(row[f"{key}_ms"]),
                *_times(row[f"{key}_recompute_ms"]),
                row[f"{key}_ms"]["n"],
            )
            for run in runs
            for label, row in run.metrics["methods"].items()
            for key, kind in (("hit", "hits"), ("miss", "others"))
            if row[f"{key}_ms"] is not None
        ],
    )


def _method(run: Run, label: str, row: Figures) -> tuple[Any, ...]:
    facts, n = run.metrics["facts"], run.metrics["n"]
    return (
        run.task,
        _model(run.metrics["model"], facts["weights"]),
        label,
        percent(facts["share_known"]),
        percent(row["share_reused"]),
        number(facts["ceiling"], 2),
        speed(row),
        percent(row["of_ceiling"]),
        _spread(row["ratio_median"]),
        _spread(row["known"]),
        number(ceiling_of(run, label)["known_ceiling"], 2),
        speed(row["latter_half"]),
        f"{row['n_same']:,} of {n:,}",
        size(row["bytes"]),
        f"{n:,} x {run.metrics['rounds']}",
    )


def ceiling_of(run: Run, label: str) -> Figures:
    """What is known of the prompts that know anything, and what that allows; of older runs from their rows."""
    row: Figures = run.metrics["methods"][label]
    if "known_ceiling" in row or row["known"] is None:
        return {name: row.get(name) for name in ("known_n", "known_share", "known_ceiling")}
    with (run.path / "rows.csv").open(encoding="utf-8") as file:
        return ceiling_of_known(shown for shown in csv.DictReader(file) if shown["method"] == label)


def _spread(values: Mapping[str, float] | None) -> str:
    """Median and range over rounds."""
    return "" if values is None else f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def _times(values: Mapping[str, float | None]) -> tuple[str, str]:
    return number(values["median"]), number(values["p90"])


def sharing(runs: Sequence[Run]) -> Iterator[str]:
    """How much of a trace is known, as it came and as it was drawn."""
    yield table(
        ("requests", "blocks kept of a prompt", "tokens known", "requests cut", "conversations", "n", "tokens"),
        [
            (
                row["requests"],
                "all" if row["blocks"] is None else row["blocks"],
                percent(row["share_known"]),
                f"{row['n_cut']:,}",
                f"{row['n_conversations']:,}",
                f"{row['n']:,}",
                f"{row['n_tokens']:,}",
            )
            for run in runs
            for row in run.metrics["summary"]
        ],
    )


def decode(runs: Sequence[Run]) -> Iterator[str]:
    """What a generation takes, to its first token and after."""
    yield table(
        (
            *("model", "dtype", "prompt + new", "generation", "TTFT, ms", "TPOT", "ITL p50", "ITL p90"),
            *("E2EL", "E2EL / K/V cache", "n"),
        ),
        [_kind(row, kind) for run in runs for row in run.metrics["generation"] for kind in KINDS],
    )
    yield (
        "Medians; times as in vLLM's benchmark of serving. Ratios are taken within each round: median, 5th and 95th "
        "percentile. A known beginning is the first "
        f"{runs[0].config['shared_tokens']} tokens of a prompt that was asked before."
    )


def _kind(row: Figures, kind: str) -> tuple[Any, ...]:
    times = row["times"][kind]
    return (
        _model(row["model"], row["weights"]),
        row["dtype"],
        f"{row['prompt_tokens']} + {row['new_tokens']}",
        KINDS[kind],
        *(number(times[f"{name}_ms"]["median"]) for name in ("ttft", "tpot", "itl")),
        number(times["itl_ms"]["p90"]),
        number(times["e2el_ms"]["median"]),
        ratio(row["ratios"][f"{kind}/kv_cache"]) if kind != "kv_cache" else "",
        times["e2el_ms"]["n"],
    )


def parity(runs: Sequence[Run]) -> Iterator[str]:
    """Whether tokens stay the same, and what is held meanwhile."""
    yield table(
        (
            *("stream", "model", "dtype", "requests", "same tokens", "near ties", "wrong", "prefix hits", "exact hits"),
            *("evicted", "most held", "budget", "resident after a tenth", "half", "end"),
        ),
        [_parity(run) for run in runs],
    )
    told = sorted({(run.metrics["new_tokens"], run.metrics["ulps"]) for run in runs})
    yield "; ".join(
        f"{new_tokens} new tokens a request; a near tie: the two best logits no further apart than {ulps:g} roundings "
        "of the better one"
        for new_tokens, ulps in told
    )


def _parity(run: Run) -> tuple[Any, ...]:
    metrics = run.metrics
    memory = metrics["memory"]
    return (
        run.task,
        _model(metrics["model"], metrics["facts"]["weights"]),
        metrics["dtype"],
        f"{metrics['n']:,}",
        percent(metrics["n_same"] / metrics["n"]),
        metrics["n_near_ties"],
        metrics["n_wrong"],
        *(f"{metrics['hits'].get(rung, 0):,}" for rung in ("prefix", "exact")),
        f"{metrics['n_evicted']:,}",
        size(metrics["most_bytes"]),
        size(metrics["max_bytes"]),
        *(size(point["resident_bytes"]) for point in (memory[0], memory[len(memory) // 2 - 1], memory[-1])),
    )


def _model(name: str, weights: str) -> str:
    return f"{name} ({'random weights' if weights == 'random' else 'trained'})"
