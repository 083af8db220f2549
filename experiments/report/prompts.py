"""The tables of prompts: time to first token, generation token by token, and parity."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from experiments.measures.decode import KINDS
from experiments.report.markdown import (
    Cell,
    by_events,
    columns,
    count,
    named_model,
    number,
    of,
    percent,
    ratio,
    size,
    speed,
    spread,
    table,
    varied,
)
from experiments.runs.read import Figures, Run


def prefix(runs: Sequence[Run]) -> Iterator[str]:
    """How much sooner the first token is there, and what of the prompts was known."""
    methods = [{"run": run, "label": label, **row} for run in runs for label, row in run.metrics["methods"].items()]
    yield columns(FIRST_TOKEN, methods)
    yield (
        "Ratios: time of the model alone, each prompt with a K/V cache of its own, over that with llmcache, in turns; "
        "sums over prompts, median over rounds, slowest and fastest round. "
        "Ceiling: 1 / (1 - share of tokens known), of the same prompts as the ratio."
    )
    yield table(
        ("stream", "method", "first token, ms", "p50", "p90", "model alone p50", "p90", "n"),
        [
            (
                row["run"].task,
                row["label"],
                kind,
                *_times(row[f"{key}_ms"]),
                *_times(row[f"{key}_recompute_ms"]),
                row[f"{key}_ms"]["n"],
            )
            for row in methods
            for key, kind in (("hit", "hits"), ("miss", "others"))
            if row[f"{key}_ms"] is not None
        ],
    )


FIRST_TOKEN: Mapping[str, Cell] = {
    "stream": lambda row: row["run"].task,
    "model": lambda row: _model(row["run"]),
    "method": itemgetter("label"),
    "tokens known": lambda row: percent(row["run"].metrics["facts"]["share_known"]),
    "reused": of(percent, "share_reused"),
    "ceiling": lambda row: number(row["run"].metrics["facts"]["ceiling"], 2),
    "TTFT ratio": speed,
    "of ceiling": of(percent, "of_ceiling"),
    "median of prompts": of(spread, "ratio_median"),
    "prompts with known tokens": of(spread, "known"),
    "their ceiling": lambda row: number(row["known_ceiling"], 2),
    "latter half": of(speed, "latter_half"),
    "same first token": lambda row: f"{row['n_same']:,} of {row['run'].metrics['n']:,}",
    "held": of(size, "bytes"),
    "n": lambda row: f"{row['run'].metrics['n']:,} x {row['run'].metrics['rounds']}",
}


def _times(values: Mapping[str, float | None]) -> tuple[str, str]:
    return number(values["median"]), number(values["p90"])


def sharing(runs: Sequence[Run]) -> Iterator[str]:
    """How much of a trace is known, as it came and as it was drawn."""
    yield columns(SHARED, [row for run in runs for row in run.metrics["summary"]])


SHARED: Mapping[str, Cell] = {
    "requests": itemgetter("requests"),
    "blocks kept of a prompt": lambda row: "all" if row["blocks"] is None else row["blocks"],
    "tokens known": of(percent, "share_known"),
    "requests cut": of(count, "n_cut"),
    "conversations": of(count, "n_conversations"),
    "n": of(count, "n"),
    "tokens": of(count, "n_tokens"),
}


def decode(runs: Sequence[Run]) -> Iterator[str]:
    """What a generation takes, to its first token and after."""
    made = [row for run in runs for row in run.metrics["generation"]]
    apart = varied(made, "banks")
    yield table(
        (
            *apart,
            *("model", "dtype", "prompt + new", "generation", "TTFT, ms", "TPOT", "ITL p50", "ITL p90"),
            *("E2EL", "E2EL / K/V cache", "n"),
        ),
        [(*(row[name] for name in apart), *_kind(row, kind)) for row in made for kind in KINDS],
    )
    yield (
        "Medians; times as in vLLM's benchmark of serving. Ratios are taken within each round: median, 5th and 95th "
        "percentile. A known beginning is the first "
        f"{runs[0].config['shared_tokens']} tokens of a prompt that was asked before.{by_events(made)}"
    )


def _kind(row: Figures, kind: str) -> tuple[Any, ...]:
    times = row["times"][kind]
    return (
        named_model(row),
        row["dtype"],
        f"{row['prompt_tokens']} + {row['new_tokens']}",
        KINDS[kind],
        *(number(times[f"{name}_ms"]["median"]) for name in ("ttft", "tpot", "itl")),
        number(times["itl_ms"]["p90"]),
        number(times["e2el_ms"]["median"]),
        ratio(row["ratios"][f"{kind}/kv_cache"]) if kind != "kv_cache" else "",
        times["e2el_ms"]["n"],
    )


def prefix_limit(runs: Sequence[Run]) -> Iterator[str]:
    """Time to first token beside the least that it can take."""
    yield columns(LIMIT, [row | {"rounds": run.config["rounds"]} for run in runs for row in run.metrics["ways"]])
    yield (
        "Medians. Limit: the same model handed a ready `DynamicCache` of the known tokens; what a copy of it takes is "
        "no part of that. Of limit: its time over that with llmcache, median over rounds. Logits: the largest "
        "difference from those of the model alone."
    )


def _ms(name: str) -> Cell:
    return lambda row: "" if row[name] is None else number(row[name])


LIMIT: Mapping[str, Cell] = {
    "model": itemgetter("model"),
    "tokens": of(count, "length"),
    "known": lambda row: "" if row["n_known"] is None else count(row["n_known"]),
    "model alone, ms": _ms("plain_ms"),
    "llmcache": _ms("cache_ms"),
    "limit": _ms("limit_ms"),
    "of limit": lambda row: "" if row["of_limit"] is None else percent(row["of_limit"]),
    "continuous batching": _ms("batching_ms"),
    "copy of the ready cache": _ms("copy_ms"),
    "same first token": lambda row: "" if row["n_same"] is None else f"{row['n_same']} of {row['rounds']}",
    "logits": lambda row: "" if row["max_diff"] is None else f"{row['max_diff']:.0e}",
    "not run": itemgetter("not_run"),
}


def parity(runs: Sequence[Run]) -> Iterator[str]:
    """Whether tokens stay the same, and what is held meanwhile."""
    yield columns(PARITY, runs)
    told = sorted({(run.metrics["new_tokens"], run.metrics["ulps"]) for run in runs})
    yield "; ".join(
        f"{new_tokens} new tokens a request; a near tie: the two best logits no further apart than {ulps:g} roundings "
        "of the better one"
        for new_tokens, ulps in told
    )


def _of_run(show: Callable[..., str], key: str) -> Cell:
    return lambda run: show(run.metrics[key])


def _resident(run: Run, place: int) -> str:
    return size(run.metrics["memory"][place]["resident_bytes"])


PARITY: Mapping[str, Cell] = {
    "stream": attrgetter("task"),
    "model": lambda run: _model(run),
    "dtype": _of_run(str, "dtype"),
    "requests": _of_run(count, "n"),
    "same tokens": lambda run: percent(run.metrics["n_same"] / run.metrics["n"]),
    "near ties": _of_run(str, "n_near_ties"),
    "wrong": _of_run(str, "n_wrong"),
    "prefix hits": lambda run: count(run.metrics["hits"].get("prefix", 0)),
    "exact hits": lambda run: count(run.metrics["hits"].get("exact", 0)),
    "evicted": _of_run(count, "n_evicted"),
    "most held": _of_run(size, "most_bytes"),
    "budget": _of_run(size, "max_bytes"),
    "resident after a tenth": lambda run: _resident(run, 0),
    "half": lambda run: _resident(run, len(run.metrics["memory"]) // 2 - 1),
    "end": lambda run: _resident(run, -1),
}


def _model(run: Run) -> str:
    return named_model({"model": run.metrics["model"], "weights": run.metrics["facts"]["weights"]})
