"""Measure `decode`: time of a generation to its first token and after, in each way of serving it.

See `experiments.measures.bench.generation` for ways, kinds and times.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field

from experiments.measures.base import DeviceExperiment, Outcome
from experiments.measures.bench import generation
from experiments.support.files import Folders
from llmcache.lab import PrefixOptions

#: Kinds, with their titles.
KINDS = {
    "nocache": "no cache",
    "kv_cache": "K/V cache",
    "miss": "K/V cache and llmcache, new prompt",
    "prefix_hit": "K/V cache and llmcache, known beginning",
    "exact_hit": "K/V cache and llmcache, known prompt",
}

#: Columns of the table on the screen; the files have all.
SHOWN = ("model", "generation", "dtype", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "kv_cache_ratio")


class Decode(DeviceExperiment):
    """Settings of the measure; models are causal."""

    prompt_tokens: int = Field(default=128, ge=2)  # tokens per prompt
    new_tokens: int = Field(default=64, ge=2)  # tokens generated, a fixed number
    # Length of the known prefix of a `prefix_hit` prompt, in tokens.
    shared_tokens: int = Field(default=96, ge=PrefixOptions().block)
    rounds: int = Field(default=20, ge=3)  # generations of each kind

    def check(self) -> None:
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(f"shared_tokens: fewer than the prompt's {self.prompt_tokens} (got {self.shared_tokens})")


def run(experiment: Decode, folders: Folders) -> Outcome:
    lengths = {name: getattr(experiment, name) for name in ("prompt_tokens", "new_tokens", "shared_tokens", "rounds")}
    measured = generation.measure_each(experiment, experiment.models, folders, **lengths)
    rows = [row for figures in measured for row in _rows(figures)]
    shown = [{name: row[name] for name in SHOWN} for row in rows]
    return Outcome(rows, {"generation": measured, "summary": shown, "threads": torch.get_num_threads()})


def _rows(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return medians, one row per kind; `kv_cache_ratio`: a generation's time over that with a K/V cache, by round."""
    return [
        {
            **{name: figures[name] for name in ("model", "weights", "dtype", "banks", "clock")},
            **{name: figures[name] for name in ("prompt_tokens", "new_tokens", "shared_tokens")},
            "generation": shown,
            **{name: value["median"] for name, value in figures["times"][kind].items()},
            "kv_cache_ratio": figures["ratios"].get(f"{kind}/kv_cache", {"median": 1.0})["median"],
        }
        for kind, shown in KINDS.items()
    ]
