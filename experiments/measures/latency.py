"""Measure `latency`: the cost of one request by its outcome, and generation with and without K/V caching.

Models: real architectures with random weights, or trained models from folders. What entries keep, and how they are
searched:

| name | keeps | searches |
|---|---|---|
| `as the paper` | all tokens of all layers | each layer's bank, first to last: Algorithm 1 of LLMCache (Bansal 2025) |
| `all tokens` | all tokens of the last layer | once a call, before layer 0 |
| `pooled` | what the head reads of the last layer | once a call |
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from pydantic import Field, PositiveInt

from experiments.measures.base import DeviceExperiment, Outcome
from experiments.measures.bench import latency
from experiments.measures.decode import measure_each
from experiments.measures.harness import WITH, WITHOUT
from experiments.models.architectures import check, check_target
from experiments.models.loading import find
from experiments.support.files import Folders

MEGABYTE = 1e6

#: Ways to keep entries, as settings of the benchmark.
KEPT = {
    "as the paper": {"payload": "sequence", "layers": "all"},
    "all tokens": {"payload": "sequence", "layers": "last"},
    "pooled": {"payload": "auto", "layers": "last"},
}

#: Settings that suit a head with an output at every token.
OF_TOKENS = tuple(kept for kept, settings in KEPT.items() if settings["payload"] == "sequence")


#: Columns of the table on the screen; the files have all.
SHOWN = (
    *("model", "head", "kept", "batch_size", "dtype", "nocache_ms", "miss_ms", "hit_ms", "floor_ms", "hit_speedup"),
    *("service_nocache_ms", "service_miss_ms", "service_hit_ms", "service_exact_hit_ms", "service_floor_ms"),
)


class Latency(DeviceExperiment):
    # Causal models that are also measured with their language-model head. It answers at every token, so entries are
    # kept only as in `OF_TOKENS`; the cache refuses the others.
    token_heads: tuple[str, ...] = ()
    kept: tuple[str, ...] = Field(default=tuple(KEPT), min_length=1)  # what entries of classifiers keep: keys of `KEPT`
    batch_sizes: tuple[PositiveInt, ...] = Field(default=(1,), min_length=1)  # rows per call
    seq_len: int = Field(default=128, ge=8)  # tokens per row
    # Entries that fill each bank, by what is kept; at least four per row of the largest batch. Whole sequences are
    # large: for BERT-base, 128 tokens of all layers in float32 take 4.7 MB.
    entries: dict[str, int] = {"as the paper": 200, "all tokens": 200, "pooled": 10_000}  # noqa: RUF012 - pydantic copies it
    # Threshold between new random requests and those with one token changed; fewer tokens need a lower threshold.
    tau: float = Field(default=0.98, gt=0.0, le=1.0)
    rounds: int = Field(default=100, ge=10)  # interleaved calls of each kind; p90 and p99 need 200 or more
    # Rounds of whole blocks of one kind of call, as in a service; 0: only interleaved calls.
    service_rounds: int = Field(default=0, ge=0)
    block: int = Field(default=200, ge=10)  # calls per block; below 200, for trial runs only
    generate: tuple[str, ...] = ()  # models that also generate; prompt and new tokens together are `seq_len` long
    new_tokens: int = Field(default=16, ge=1)  # tokens generated
    generate_rounds: int = Field(default=20, ge=3)  # generations of each kind

    def check(self) -> None:
        needed = latency.CALLS_HELD * max(self.batch_sizes)
        for kept in (*self.kept, *(OF_TOKENS if self.token_heads else ())):
            if kept not in KEPT:
                raise ValueError(f"kept: {kept!r} is not known; known: {', '.join(KEPT)}")
            if self.entries.get(kept, 0) < needed:
                raise ValueError(
                    f"entries: {kept!r} needs {needed} or more, the rows of {latency.CALLS_HELD} calls of the largest "
                    f"batch (got {self.entries.get(kept)})"
                )
        if self.generate and self.new_tokens >= self.seq_len:
            raise ValueError(f"new_tokens: a prompt needs some of the {self.seq_len} tokens (got {self.new_tokens})")


def run(experiment: Latency, folders: Folders) -> Outcome:
    for dtype in experiment.dtypes:
        check_target(experiment.device, dtype)
    for model in experiment.models:
        check(find(model, folders.models), experiment.seq_len)
    for model in (*experiment.generate, *experiment.token_heads):
        check(find(model, folders.models), experiment.seq_len, head="token")
    rows = [
        _row(experiment, folders, *way, *how)
        for way in _ways(experiment)
        for how in product(experiment.batch_sizes, experiment.dtypes, experiment.banks)
    ]
    generated = measure_each(
        experiment,
        experiment.generate,
        folders,
        prompt_tokens=experiment.seq_len - experiment.new_tokens,
        new_tokens=experiment.new_tokens,
        rounds=experiment.generate_rounds,
    )
    flat = [{name: value for name, value in row.items() if not isinstance(value, dict)} for row in rows]
    shown = [{name: row[name] for name in SHOWN} for row in rows]
    return Outcome(flat, {"calls": rows, "generation": generated, "summary": shown, "threads": torch.get_num_threads()})


def _ways(experiment: Latency) -> Iterator[tuple[str, str, str]]:
    yield from ((model, "class", kept) for model in experiment.models for kept in experiment.kept)
    yield from ((model, "token", kept) for model in experiment.token_heads for kept in OF_TOKENS)


def _row(
    experiment: Latency, folders: Folders, model: str, head: str, kept: str, batch_size: int, dtype: str, banks: str
) -> dict[str, Any]:
    same = ("seq_len", "tau", "rounds", "service_rounds", "block", "device", "seed")
    settings = {name: getattr(experiment, name) for name in same} | {"entries": experiment.entries[kept], "head": head}
    settings |= {"model": find(model, folders.models), "batch_size": batch_size, "banks": banks, "dtype": dtype}
    figures = latency.measure(latency.Settings(**settings, **KEPT[kept]))
    medians = _medians(figures)
    blocks = figures["service"] or {f"{kind}_ms": None for kind in (*WITH, *WITHOUT)}
    return {
        "model": model,
        "head": head,
        "weights": figures["weights"],
        "kept": kept,
        **{name: figures[name] for name in ("batch_size", "dtype", "banks", "clock", "seq_len")},
        "mixed_ms": None,  # a single row cannot be half hit
        **medians,
        **{f"service_{name}": median for name, median in _medians(blocks).items()},
        "hit_speedup": medians["nocache_ms"] / medians["hit_ms"],
        "miss_ratio": figures["ratios"]["miss/nocache"]["median"],
        "model_mb": figures["model_bytes"] / MEGABYTE,
        "entry_kb": figures["entry_bytes"] / 1e3,
        "cache_mb": figures["entry_bytes"] * experiment.entries[kept] / MEGABYTE,
        "entries": experiment.entries[kept],
        "exact_hit_is_equal": figures["exact_hit_is_equal"],
        "detail": {
            key: value for key, value in figures.items() if key.endswith("_ms") or key in ("ratios", "service", "host")
        },
    }


def _medians(figures: Mapping[str, Any]) -> dict[str, float | None]:
    return {key: value and value["median"] for key, value in figures.items() if key.endswith("_ms")}
