"""Tables of latency: single calls, and generation."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.metrics import paper
from experiments.report.markdown import by_events, named_model, number, ratio, spread, table, varied
from experiments.runs.read import Figures, Run

KINDS = ("nocache", "miss", "hit", "exact_hit", "floor")
TIMES = tuple(f"{kind}_ms" for kind in KINDS)
CALL_HEADINGS = (
    *("model", "head", "entries keep", "rows", "dtype"),
    *("no cache, ms", "miss", "hit", "exact hit", "no layers"),
    *("no cache / hit", "miss / no cache", "model", "entry", "cache", "paper, ms"),
)
BLOCK_HEADINGS = (
    *("model", "head", "entries keep", "rows", "dtype", "tokens"),
    *("no cache, ms", "miss", "hit", "exact hit", "no layers", "miss / no cache", "hit / no cache", "calls in rounds"),
)
COMPILED_HEADINGS = (
    *("model", "rows", "tokens", "bucket"),
    *("no cache, ms", "compiled", "miss", "compiled miss", "exact hit", "exact hit, compiled"),
    *("compiled / no cache", "compiled miss / no cache", "graph, s"),
)
GENERATION_HEADINGS = (
    *("generation", "prompt", "new tokens"),
    *("no cache, ms", "K/V cache", "llmcache, new prompt", "known prompt", "new / K/V", "known / K/V", "n"),
)


def latency(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the tables of call times by outcome, and of generation."""
    calls = [row for run in runs for row in run.metrics["calls"]]
    apart = varied(calls, "banks")
    yield table((*CALL_HEADINGS, *apart), [(*_call(row), *(row[name] for name in apart)) for row in calls])
    n = {row["detail"]["nocache_ms"]["n"] for row in calls}
    yield (
        f"Medians of {_numbers(n)} calls of each kind, interleaved in one process; the bank is full, so a miss also "
        f"evicts; {_numbers({row['entries'] for row in calls})} entries. `as the paper` searches the bank of every "
        "layer, `all tokens` keeps the last layer's states and searches once, `pooled` what the head reads of these. "
        "`no layers` is the same model without any: nothing can be faster. "
        "Rows were measured minutes apart, and absolute times differ between them as the machine did: compare within a "
        f"row. `miss / no cache` is taken within each round: median, 5th and 95th percentile.{by_events(calls)}"
    )
    if blocks := [row for row in calls if row["detail"].get("service")]:
        yield table(BLOCK_HEADINGS, map(_blocks, blocks))
        yield (
            "The same calls in service rounds: whole blocks of one kind with the cache, then as many by the model "
            "alone; the order alternates. Medians, with those of the fastest and slowest block; ratios of whole blocks."
        )
    if made := [row for run in runs for row in run.metrics["generation"]]:
        yield table(GENERATION_HEADINGS, map(_generation, made))
        yield (
            "Medians of whole generations. The ratios to K/V caching are taken within each round: median, 5th and 95th "
            "percentile. A prompt is known when it was asked before."
        )


def compiled(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the table of call times with and without a compiler and a cache."""
    asked = [row for run in runs for row in run.metrics["calls"]]
    calls = [row for row in asked if not row.get("not_run")]
    apart = varied(asked, "dtype", "banks")
    kinds = ("nocache", "nocache_compiled", "miss", "miss_compiled", "hit", "hit_compiled")
    yield table(
        (*apart, *COMPILED_HEADINGS),
        [
            (
                *(row[name] for name in apart),
                *(row[name] for name in ("model", "rows", "tokens", "bucket")),
                *(number(row[f"{kind}_ms"], 2) for kind in kinds),
                *(ratio(row["detail"]["ratios"][f"{kind}/nocache"]) for kind in ("nocache_compiled", "miss_compiled")),
                number(row["compile_s"], 1),
            )
            for row in calls
        ],
    )
    n = {row["detail"]["nocache_ms"]["n"] for row in calls}
    yield (
        f"Medians of {_numbers(n)} calls of each kind, interleaved in one process. `compiled` without a cache is "
        "`torch.compile(model, dynamic=False)` for the very shape; with one, `cache.compile()`, which pads to the "
        "bucket and makes its graph in the seconds that the last column tells. Ratios are taken within each round: "
        f"median, 5th and 95th percentile.{by_events(calls)}"
    )
    for row in asked:
        if row.get("not_run"):
            shape = (
                f"{row['model']}, {row['dtype']}, {row['rows']} rows of {row['tokens']} tokens, {row['banks']} banks"
            )
            yield f"Not run: {shape}: {row['not_run']}"


def _call(row: Figures) -> tuple[Any, ...]:
    return (
        named_model(row),
        row["head"],
        row["kept"],
        row["batch_size"],
        row["dtype"],
        *(number(row[key], 2) for key in TIMES),
        number(row["hit_speedup"]),
        ratio(row["detail"]["ratios"]["miss/nocache"]),
        f"{row['model_mb']:.0f} MB",
        f"{row['entry_kb']:,.1f} kB",
        f"{row['cache_mb']:,.1f} MB",
        " to ".join(map(str, paper.MS.get((row["model"], row["head"]), ()))),
    )


def _blocks(row: Figures) -> tuple[Any, ...]:
    service = row["detail"]["service"]
    return (
        *(named_model(row), row["head"], row["kept"], row["batch_size"], row["dtype"], row["seq_len"]),
        *(spread(service[f"{kind}_ms"]) for kind in KINDS),
        *(spread(service["ratios"][f"{kind}/nocache"], 3) for kind in ("miss", "hit")),
        f"{service['nocache_ms']['n']:,} in {service['rounds']}",
    )


def _generation(row: Figures) -> tuple[Any, ...]:
    return (
        named_model(row),
        row["prompt_tokens"],
        row["new_tokens"],
        *(number(row[f"{kind}_ms"]["median"]) for kind in ("nocache", "kv_cache", "miss", "exact_hit")),
        *(ratio(row["ratios"][f"{kind}/kv_cache"]) for kind in ("miss", "exact_hit")),
        row["nocache_ms"]["n"],
    )


def _numbers(values: set[int]) -> str:
    return " or ".join(f"{value:,}" for value in sorted(values))
