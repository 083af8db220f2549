"""Measure `latency`: what one request costs, by what happens to it; and generation with and without K/V caching.

Real architectures with random weights, or trained models from folders. `as the paper` keeps all tokens of all layers,
searched with the mean embedding; `pooled` keeps what the head reads of the last layer.
"""

from typing import Any

import torch
from pydantic import Field

from experiments.bench import generation, latency
from experiments.folders import Folders
from experiments.measures.base import Experiment, Outcome
from experiments.models import find

MEGABYTE = 1e6

#: Two ways to keep entries, as settings of the benchmark.
KEPT = {
    "as the paper": {"payload": "sequence", "layers": "all"},
    "pooled": {"payload": "auto", "layers": "last"},
}


class Latency(Experiment):
    """Settings of the measure.

    Attributes:
        models: Architectures (`bert-base`, `distilbert`, `gpt2`, with random weights), or prepared models and folders.
        kept: What entries keep: keys of `KEPT`.
        batch_sizes: Rows a call.
        seq_len: Tokens a row.
        entries: Entries that fill each bank, by what is kept: whole sequences are large.
        rounds: Calls of each kind.
        device: Torch device.
        dtypes: Of weights and states: `float32`, `bfloat16`.
        generate: Models that also generate: prompt and new tokens together are `seq_len` long.
        new_tokens: Tokens generated.
        generate_rounds: Generations of each kind.
    """

    models: tuple[str, ...] = Field(min_length=1)
    kept: tuple[str, ...] = ("as the paper", "pooled")
    batch_sizes: tuple[int, ...] = (1,)
    seq_len: int = Field(default=128, ge=8)
    entries: dict[str, int] = {"as the paper": 200, "pooled": 10_000}  # noqa: RUF012 - pydantic copies it
    rounds: int = Field(default=100, ge=10)
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",)
    generate: tuple[str, ...] = ()
    new_tokens: int = Field(default=16, ge=1)
    generate_rounds: int = Field(default=20, ge=3)


def run(experiment: Latency, folders: Folders) -> Outcome:
    """Measure every model.

    Raises:
        ConfigError: A model was not found, or a setting does not suit it.
    """
    rows = [
        _row(experiment, folders, model, kept, batch_size, dtype)
        for model in experiment.models
        for kept in experiment.kept
        for batch_size in experiment.batch_sizes
        for dtype in experiment.dtypes
    ]
    generated = [
        generation.measure(
            find(model, folders.models),
            prompt_tokens=experiment.seq_len - experiment.new_tokens,
            new_tokens=experiment.new_tokens,
            rounds=experiment.generate_rounds,
            device=experiment.device,
            seed=experiment.seed,
        )
        for model in experiment.generate
    ]
    shown = [{name: value for name, value in row.items() if not isinstance(value, dict)} for row in rows]
    return Outcome(
        shown, {"calls": rows, "generation": generated, "summary": shown, "threads": torch.get_num_threads()}
    )


def _row(experiment: Latency, folders: Folders, model: str, kept: str, batch_size: int, dtype: str) -> dict[str, Any]:
    """Figures of one model and way to keep entries."""
    figures = latency.measure(
        latency.Settings(
            model=find(model, folders.models),
            batch_size=batch_size,
            seq_len=experiment.seq_len,
            entries=experiment.entries[kept],
            rounds=experiment.rounds,
            device=experiment.device,
            dtype=dtype,
            seed=experiment.seed,
            **KEPT[kept],
        )
    )
    medians = {key: value["median"] for key, value in figures.items() if key.endswith("_ms")}
    return {
        "model": model,
        "weights": figures["weights"],
        "kept": kept,
        "batch_size": batch_size,
        "dtype": dtype,
        **medians,
        "hit_speedup": medians["nocache_ms"] / medians["hit_ms"],
        "miss_ratio": figures["ratios"]["miss/nocache"]["median"],
        "model_mb": figures["model_bytes"] / MEGABYTE,
        "entry_kb": figures["entry_bytes"] / 1e3,
        "cache_mb": figures["entry_bytes"] * experiment.entries[kept] / MEGABYTE,
        "entries": experiment.entries[kept],
        "detail": {key: value for key, value in figures.items() if key.endswith("_ms") or key == "ratios"},
    }
