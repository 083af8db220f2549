"""Columns of tables: headings, and functions from a row to its cell. The run of a row is under its key `run`."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from experiments.measures import engines as ways
from experiments.measures.decode import KINDS
from experiments.measures.service import share_of_bound
from experiments.measures.turns import WAYS
from experiments.report.markdown import (
    Cell,
    bounded,
    count,
    named_model,
    number,
    of,
    percent,
    points,
    ratio,
    share,
    size,
    speed,
)

STREAM: Mapping[str, Cell] = {"stream": lambda row: row["run"].task}
SEED: Mapping[str, Cell] = {"seed": lambda row: row["run"].config["seed"]}

# Methods on a stream, call by call.

QUALITY: Mapping[str, Cell] = {
    "hits": bounded(share, "hit_rate"),
    "points lost": bounded(points, "accuracy_drop"),
    "changed": bounded(share, "changed_answers"),
}
COSTS: Mapping[str, Cell] = {
    "of hits": of(percent, "changed_per_hit"),
    "a miss costs more": of(percent, "miss_overhead"),
    "a hit costs": of(percent, "hit_cost"),
    "speed-up": speed,
}
CACHE: Mapping[str, Cell] = {"cache": of(size, "bytes")}
SERVED: Mapping[str, Cell] = {"method": itemgetter("label"), **QUALITY, **COSTS, **CACHE}
SCREEN: Mapping[str, Cell] = {name: SERVED[name] for name in ("method", *QUALITY, "speed-up")}
LIVE: Mapping[str, Cell] = {**STREAM, "live, tau": itemgetter("tau"), **QUALITY, **COSTS}
OBSERVED: Mapping[str, Cell] = {
    **QUALITY,
    **CACHE,
    **{name: of(count, name) for name in ("entries", "evicted", "revalidated", "expelled")},
}


def _hits(loss: str) -> Cell:
    """Return a cell with the hits and the threshold of a curve's best point; see `tables.swept`."""

    def cell(row: Mapping[str, Any]) -> str:
        if (point := row[loss]) is None:
            return ""
        where = "exact repeats" if point["tau"] is None else f"tau {point['tau']}"
        return f"{share(point['hit_rate'], point['hit_rate_ci'])}, {where}"

    return cell


CURVES: Mapping[str, Cell] = {
    **STREAM,
    "curve": itemgetter("curve"),
    "requests": lambda row: count(row["run"].metrics["n"]),
    "most hits, half a point lost": _hits("accuracy_drop"),
    "most hits, 0.5 % changed": _hits("changed_answers"),
}

# Whole passes, and the bound.

PASSES: Mapping[str, Cell] = {
    **STREAM,
    "reuse": lambda row: "exact repeats" if row["max_drop"] is None else f"calibrated, {percent(row['max_drop'])}",
    "threads": itemgetter("threads"),
    "hits": of(percent, "hit_rate"),
    "changed": of(percent, "changed_answers", 2),
    "points lost": of(points, "accuracy_drop"),
    "speed-up": speed,
    "of the ideal": lambda row: percent(share_of_bound(row["speedup"], row["hit_rate"]), 0),
    **{f"{kind}, ms": of(number, f"{kind}_ms", 2) for kind in ("plain", "hit", "miss")},
}
RATED: Mapping[str, Cell] = {
    "hits asked for": of(percent, "hit_rate_set", 0),
    **{name: cell for name, cell in PASSES.items() if name not in ("stream", "reuse", "points lost")},
}
KNOWN: Mapping[str, Cell] = {
    **STREAM,
    "texts": of(count, "n"),
    "a batch": itemgetter("batch"),
    "embedded before": lambda row: percent(row.get("known"), 0),
    "hits": of(percent, "hit_rate", 2),
    "speed-up": speed,
    "a dict of hashes": lambda row: number(row.get("dict_speedup"), 2),
    "share of the ideal": PASSES["of the ideal"],
    "plain, ms": PASSES["plain, ms"],
}
SECOND_PASS: Mapping[str, Cell] = {
    **{name: KNOWN[name] for name in ("stream", "texts", "a batch")},
    "hits of the second pass": of(percent, "hit_rate"),
    "its speed-up": speed,
    "the first costs more": of(percent, "first_costs", 0),
    "plain, ms": PASSES["plain, ms"],
}
NAMES = {
    ways.EAGER: "PyTorch, eager",
    ways.ONNX: "ONNX Runtime alone",
    ways.INT8: "ONNX Runtime alone, int8",
    ways.SEMANTIC: "semantic response cache",
    ways.EXACT: "llmcache, exact repeats",
    ways.REUSE: "llmcache, reuse",
    ways.DRAFT: "llmcache, draft",
    ways.ALL: "llmcache, reuse and draft",
}
ENGINES: Mapping[str, Cell] = {
    **STREAM,
    "threads": itemgetter("threads"),
    "way": lambda row: NAMES[row["way"]],
    "target": of(percent, "max_drop"),
    "ms": of(number, "ms", 2),
    "times eager": speed,
    "times ONNX Runtime": of(number, "times_onnx", 2),
    "requests / s": of(number, "per_s", 0),
    "not computed": of(percent, "hit_rate"),
    "changed": of(percent, "changed_answers", 2),
    "accuracy": of(percent, "accuracy"),
    "weights, MB": of(number, "weights_mb", 0),
    "cache, MB": of(number, "cache_mb"),
    "rungs": lambda row: row["rungs"] or "",
    "audit": lambda row: percent(row.get("audit_share")),
}
ENGINES_BERT: Mapping[str, Cell] = {
    "tokens": lambda row: number(row["run"].metrics["mean_tokens"], 0),
    "requests a call": lambda row: count(row["run"].metrics["batch"]),
    **{name: cell for name, cell in ENGINES.items() if name not in STREAM},
}
ENGINE_PARITY: Mapping[str, Cell] = {
    **STREAM,
    "engine": itemgetter("engine"),
    "misses": of(count, "n_misses"),
    "largest difference": lambda row: f"{row['difference_most']:.1e}",
    "beyond the tolerance": of(count, "n_beyond"),
    "answers changed": of(count, "n_changed"),
}
ADVICE: Mapping[str, Cell] = {
    "way": itemgetter("name"),
    "mean ms": of(number, "mean_ms", 2),
    "p50 ms": of(number, "p50_ms", 2),
    "p99 ms": of(number, "p99_ms", 2),
    "times as fast": of(number, "speedup", 2),
    "changed": lambda row: "" if row["mean_ms"] is None else percent(row["changed"], 2),
    "at most": of(percent, "bound", 2),
    "hits": lambda row: "" if row["mean_ms"] is None else percent(row["hit_rate"]),
    "MB": lambda row: number(row["nbytes"] / 1e6, 0) if row["nbytes"] else "",
    "learning s": lambda row: number(row["learning_s"], 0) if row["learning_s"] else "",
}
ADVICES: Mapping[str, Cell] = {**STREAM, "threads": itemgetter("threads"), **ADVICE}
BESIDE: Mapping[str, Cell] = {
    "computed by": lambda row: "ONNX Runtime" if "engine" in row["run"].config["cache"] else "PyTorch",
    "calls": itemgetter("when"),
    "n": of(count, "n"),
    "p50, ms": of(number, "p50_ms", 2),
    "p99, ms": of(number, "p99_ms", 2),
}
OVERHEADS: Mapping[str, Cell] = {
    "way": itemgetter("way"),
    "served by": itemgetter("served"),
    "n": of(count, "n"),
    "ms": of(number, "ms", 2),
    "sessions": of(str, "sessions"),
    "sessions alone, ms": of(number, "sessions_ms", 2),
    "added, ms": of(number, "beside_ms", 2),
}
BOUND: Mapping[str, Cell] = {
    **STREAM,
    "target": of(percent, "max_drop"),
    "over the target": lambda row: f"{row['n_violated']} of {row['n_calibrations']}",
    "allowed": lambda row: f"{row['run'].metrics['delta'] * row['n_calibrations']:.0f}",
    "hits, median": of(percent, "hit_rate_median"),
    "10th to 90th percentile": lambda row: f"{percent(row['hit_rate_p10'])} to {percent(row['hit_rate_p90'])}",
}
BOUND_DRAFT: Mapping[str, Cell] = {
    **BOUND,
    "changed, median": of(percent, "changed_answers_median", 2),
    "rungs": lambda row: ", ".join(f"{rungs}: {n}" for rungs, n in sorted(row.get("rungs", {}).items())),
}

FAULTS = {
    **{f"{name}, {times} times": (name, times) for name in ("risks too low", "alike") for times in (2, 4, 20)},
    **{f"{name}, {times} times": (name, times) for name in ("drift", "bad source") for times in (2, 4)},
}


def _until(row: Mapping[str, Any], event: str) -> str:
    times = (row[f"{event}_{name}"] for name in ("median", "p90"))
    return " / ".join("-" if time is None else count(int(time)) for time in times)


DRAWING: Mapping[str, Cell] = {
    **STREAM,
    "drawn with": itemgetter("rule"),
    "recomputed of 1,000: a pass": lambda row: number(row["right, a pass"]["recomputed"]),
    "a long run": lambda row: number(row["right"]["recomputed"]),
    "at the limit": lambda row: number(row["at the limit"]["recomputed"]),
    "false alarms": lambda row: f"{row['at the limit']['n_rang']}, {row['at the limit, alike']['n_rang']}",
    **{heading: lambda row, fault=fault: _until(row[fault], "alarm") for heading, fault in FAULTS.items()},
    "found first, bad source, 2 times": lambda row: _until(row["bad source", 2], "found"),
}


def _ratio(name: str, *of: Any) -> Cell:
    """Return a cell with a figure of the rule in use over that of the former rule."""

    def cell(row: Mapping[str, Any]) -> str:
        now, before = (rule[of if len(of) > 1 else of[0]][name] for rule in (row["now"], row["before"]))
        return "" if now is None or before is None else f"{now / before:.2f}"

    return cell


def _of_both(*of: Any) -> Cell:
    median, p90 = (_ratio(f"alarm_{name}", *of) for name in ("median", "p90"))
    return lambda row: f"{median(row)} / {p90(row) or '-'}"


DRAWING_RATIOS: Mapping[str, Cell] = {
    **STREAM,
    "recomputed: a pass": _ratio("recomputed", "right, a pass"),
    "a long run": _ratio("recomputed", "right"),
    "at the limit": _ratio("recomputed", "at the limit"),
    **{heading: _of_both(*fault) for heading, fault in FAULTS.items()},
    "found first, bad source, 2 times": _ratio("found_median", "bad source", 2),
}

# Prompts, and single calls.

LIMIT: Mapping[str, Cell] = {
    "model": itemgetter("model"),
    "tokens": of(count, "length"),
    "known": of(number, "n_known", 0),
    "model alone, ms": of(number, "plain_ms"),
    "llmcache": of(number, "cache_ms"),
    "limit": of(number, "limit_ms"),
    "of limit": of(percent, "of_limit"),
    "continuous batching": of(number, "batching_ms"),
    "copy of the ready cache": of(number, "copy_ms"),
    "same first token": lambda row: (
        "" if row["n_same"] is None else f"{row['n_same']} of {row['run'].config['rounds']}"
    ),
    "logits": lambda row: "" if row["max_diff"] is None else f"{row['max_diff']:.0e}",
    "not run": itemgetter("not_run"),
}
PARITY: Mapping[str, Cell] = {
    "greedy continuations": lambda row: f"[{row['dtype']}](configs/{row['run'].group}.yaml)",
    "model": lambda row: named_model(row["model"], row["facts"]["weights"]),
    "same tokens": lambda row: f"{row['n_same']:,} of {row['n']:,}",
    "near ties": itemgetter("n_near_ties"),
    "wrong": itemgetter("n_wrong"),
    "blocks that left": of(count, "n_evicted"),
    "resident, tenth to end": lambda row: " to ".join(size(row["memory"][at]["resident_bytes"]) for at in (0, -1)),
}
PARITY_OF_BATCHES: Mapping[str, Cell] = {
    "model": PARITY["model"],
    "padding": itemgetter("padding"),
    "position ids": lambda row: "passed" if row["positions"] else "",
    **{name: PARITY[name] for name in ("same tokens", "near ties", "wrong")},
    "different prompts": of(count, "n_prompts"),
    "first tokens": of(count, "n_first_tokens"),
    "tokens served": of(percent, "share_reused"),
    "log-probabilities": lambda row: f"{row['logprob_difference']:.0e}",
}


def _median(name: str) -> Cell:
    return lambda row: number(row["times"][row["kind"]][f"{name}_ms"]["median"], 0)


def _of_plain(kind: str) -> Cell:
    return lambda row: ratio(row["detail"]["ratios"][f"{kind}/nocache"]) if row.get("detail") else ""


GENERATION: Mapping[str, Cell] = {
    "generation": lambda row: KINDS[row["kind"]],
    "first token, ms": _median("ttft"),
    "each further token, ms": _median("tpot"),
    "whole, ms": _median("e2el"),
    "of the time with a K/V cache": lambda row: (
        "" if row["kind"] == "kv_cache" else ratio(row["ratios"][f"{row['kind']}/kv_cache"])
    ),
}


def _asked(row: Mapping[str, Any]) -> str:
    run = row["run"]
    shots = "drawn for each" if run.metrics["sampler"] == "default" else "the same for all"
    return f"[{run.task}](configs/{run.group}.yaml), {run.metrics['n']} questions; shots {shots}"


def _passes(name: str, passes: Sequence[str] = ("plain", "cached"), digits: int = 0) -> Cell:
    return lambda row: " / ".join(f"{row[f'{name}_{which}']:,.{digits}f}" for which in passes)


_three = partial(_passes, passes=("plain", "cached", "again"))


def _times(kind: str) -> Cell:
    """Return a cell of times, and of how many times as long the model alone takes as each pass with the cache."""
    return lambda row: f"{_three(f'{kind}_s')(row)} ({row[f'{kind}_ratio']:.2f}; {row[f'{kind}_again_ratio']:.2f})"


TREES: Mapping[str, Cell] = {
    "calls": itemgetter("case"),
    "columns, plain": of(count, "plain"),
    "cached": of(count, "cached"),
    "different tokens": of(count, "ideal"),
    "CPU, s": lambda row: f"{row['plain_s']:.2f} / {row['cached_s']:.2f}",
    "ratio": of(number, "cpu_ratio", 2),
    "same answers": lambda row: "yes" if row["same"] else "no",
    "largest difference of a logit": lambda row: f"{row['max_diff']:.0e} of {row['scale']:.0f}",
}
TURNS: Mapping[str, Cell] = {
    "model": lambda row: row["run"].metrics["model"],
    "later turns": of(count, "turns"),
    "tokens": of(count, "n_tokens"),
    "new": of(count, "n_new"),
    "computed": of(count, "n_computed"),
    **{f"first token, s: {way}" if way == "plain" else way: of(number, f"{way}_ttft_s", 3) for way in WAYS},
    "of limit": of(percent, "of_limit"),
    "time per token / plain": of(number, "tpot_ratio", 3),
    "same answers": lambda row: f"{row['same']} of {row['n']}",
}
EVALUATED: Mapping[str, Cell] = {
    "evaluation": _asked,
    "rows a call": lambda row: row["run"].metrics["batch"],
    "columns of a layer": _three("columns"),
    "ratio": of(number, "columns_ratio", 2),
    "CPU, s": _times("cpu"),
    "wall, s": lambda row: _times("wall")(row) if row["run"].is_timed else "",
    "accuracy": _passes("acc", digits=3),
    "normalised": _passes("acc_norm", digits=3),
    "largest difference of a log-probability": lambda row: f"{row['logprob_difference']:.0e}",
}
COMPILED: Mapping[str, Cell] = {
    **{name: itemgetter(name) for name in ("model", "rows", "tokens", "bucket")},
    "no cache, ms": of(number, "nocache_ms", 2),
    "compiled": of(number, "nocache_compiled_ms", 2),
    "miss": of(number, "miss_ms", 2),
    "compiled miss": of(number, "miss_compiled_ms", 2),
    "exact hit": of(number, "hit_ms", 2),
    "exact hit, compiled": of(number, "hit_compiled_ms", 2),
    "compiled / no cache": _of_plain("nocache_compiled"),
    "compiled miss / no cache": _of_plain("miss_compiled"),
    "graph, s": of(number, "compile_s"),
}

# Servers and stores.


def _spread(name: str) -> Cell:
    """Return a cell of a figure and of its smallest and largest values."""
    return lambda row: f"{number(row[name])} ({number(row[f'{name}_min'])} to {number(row[f'{name}_max'])})"


LOADED: Mapping[str, Cell] = {
    **STREAM,
    "server": itemgetter("server"),
    "arrivals": itemgetter("arrivals"),
    "goodput, requests / s": _spread("goodput"),
    "gain of the cache": lambda row: number(row.get("gain"), 2),
    "hits": of(percent, "hit_rate"),
    "changed": of(percent, "changed_answers", 2),
    **{f"{name}, ms": of(number, f"{name}_ms") for name in ("p50", "p90", "p99")},
    "server, CPU ms": of(number, "server_cpu_ms", 2),
    "generator": of(number, "generator_cpu_ms", 2),
}
STREAMED: Mapping[str, Cell] = {
    "server": itemgetter("server"),
    "load": itemgetter("load"),
    "tokens of a prompt": of(number, "prompt_tokens", 0),
    "tokens / s": _spread("tokens_per_s"),
    "first token, s: median / last": lambda row: f"{row['ttft_s']:.2f} / {row['ttft_max_s']:.2f}",
    "longest gap, s": of(number, "longest_gap_s", 2),
    "server, CPU s": of(number, "cpu_s"),
    "cached tokens": of(number, "cached_tokens", 0),
}
SOAKED: Mapping[str, Cell] = {
    **STREAM,
    "capacity, requests / s": of(number, "capacity"),
    "asked": of(number, "rate"),
    "requests": of(count, "n"),
    "accepted": of(percent, "accepted"),
    "failed": of(count, "n_failed"),
    "p99 of accepted / queue limit, ms": lambda row: f"{number(row['p99_ms'])} / {number(1e3 * row['max_queue_s'], 0)}",
    "most waiting": of(number, "waiting_max", 0),
    "memory when warm / at the end, MB": lambda row: " / ".join(
        number(row[f"rss_{when}_mb"], 0) for when in ("warm", "end")
    ),
    "hits": of(percent, "hit_rate"),
    "checked": of(count, "n_checked"),
    "unequal": of(count, "n_unequal"),
    "changed": of(percent, "changed_answers", 2),
}
REPLICAS: Mapping[str, Cell] = {
    "model": lambda row: row["run"].metrics["model"],
    "kills": lambda row: count(row["run"].metrics["n_kills"]),
    "requests while": itemgetter("phase"),
    "n": of(count, "n"),
    "first tries that failed at the killed replica": of(count, "n_failed_in_hands"),
    "others that failed": of(count, "n_failed_others"),
    "failed three times": of(count, "n_lost"),
    "repeats": of(count, "n_repeats"),
    "of these hits": of(percent, "hit_rate", 2),
    "wrong answers": of(count, "n_wrong"),
}
FAULTS: Mapping[str, Cell] = {
    "fault": itemgetter("kind"),
    **{name: of(count, name) for name in ("n", "requests", "hits", "purges")},
    "wrong answers": of(count, "wrong"),
    "served after a purge": of(count, "stale"),
    "crashes": of(count, "crashed"),
}
HOSTILE: Mapping[str, Cell] = {
    "list": itemgetter("list"),
    **{name: of(count, name) for name in ("tests", "requests")},
    **{name: lambda row, name=name: count(row.get(name, 0)) for name in ("2xx", "4xx", "5xx", "unanswered")},
}
COMMANDS: Mapping[str, Cell] = {"command": itemgetter("command"), "s": of(number, "seconds", 0)}
