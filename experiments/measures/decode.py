"""Measure `decode`: what a generation takes, to its first token and after, in each way that one would serve it.

See `experiments.measures.bench.generation`, which measures it, for ways, kinds and times.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from experiments.measures.base import Experiment, Outcome
from experiments.measures.bench import generation
from experiments.models.architectures import Dtype
from experiments.support.folders import Folders
from llmcache.lab import PrefixOptions

#: Kinds as they are shown.
KINDS = {
    "nocache": "no cache",
    "kv_cache": "K/V cache",
    "miss": "K/V cache and llmcache, new prompt",
    "prefix_hit": "K/V cache and llmcache, known beginning",
    "exact_hit": "K/V cache and llmcache, known prompt",
}

#: What a table on the screen has of each row; the files have all.
SHOWN = ("model", "generation", "dtype", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "kv_cache_ratio")


class Decode(Experiment):
    """Settings of the measure."""

    # Causal architectures of the benchmark, with random weights, or prepared models and folders.
    models: tuple[str, ...] = Field(min_length=1)
    prompt_tokens: int = Field(default=128, ge=2)  # tokens of a prompt
    new_tokens: int = Field(default=64, ge=2)  # tokens generated, always as many
    # First tokens that a prompt with a known beginning has of a known one.
    shared_tokens: int = Field(default=96, ge=PrefixOptions().block)
    rounds: int = Field(default=20, ge=3)  # generations of each kind
    device: str = "cpu"  # torch device
    # Where blocks are kept: `host`, from where hits are copied up to a GPU, or `device`. On a CPU they are the same.
    banks: tuple[Literal["host", "device"], ...] = Field(default=("host",), min_length=1)
    dtypes: tuple[Dtype, ...] = Field(default=("float32",), min_length=1)  # of weights and states

    @model_validator(mode="after")
    def _leaves_something_new(self) -> Self:
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(f"shared_tokens: fewer than the prompt's {self.prompt_tokens} (got {self.shared_tokens})")
        return self


def run(experiment: Decode, folders: Folders) -> Outcome:
    """Measure every model."""
    measured = generation.measure_each(
        experiment.models,
        experiment.dtypes,
        experiment.banks,
        folders.models,
        prompt_tokens=experiment.prompt_tokens,
        new_tokens=experiment.new_tokens,
        shared_tokens=experiment.shared_tokens,
        rounds=experiment.rounds,
        device=experiment.device,
        seed=experiment.seed,
    )
    rows = [row for figures in measured for row in _rows(figures)]
    shown = [{name: row[name] for name in SHOWN} for row in rows]
    return Outcome(rows, {"generation": measured, "summary": shown, "threads": torch.get_num_threads()})


def _rows(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Medians, one row a kind; `kv_cache_ratio`: whole generations over those with a K/V cache, of the same round."""
    return [
        {
            "model": figures["model"],
            "weights": figures["weights"],
            "dtype": figures["dtype"],
            "banks": figures["banks"],
            "clock": figures["clock"],
            "prompt_tokens": figures["prompt_tokens"],
            "new_tokens": figures["new_tokens"],
            "shared_tokens": figures["shared_tokens"],
            "generation": shown,
            **{name: value["median"] for name, value in figures["times"][kind].items()},
            "kv_cache_ratio": figures["ratios"].get(f"{kind}/kv_cache", {"median": 1.0})["median"],
        }
        for kind, shown in KINDS.items()
    ]
