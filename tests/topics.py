"""Requests of `tests.contract.streams`, one per call, and helpers for tests of calibrations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmcache import AuditStats, LLMCache
from tests.contract import streams

N_CALIBRATED = 300  # requests on which `streams.calibrated` calibrates

Inputs = dict[str, torch.Tensor]


def requests(n: int, seed: int = 0, **how: Any) -> tuple[list[Inputs], list[int]]:
    """Return inputs of one request each, and their topics."""
    ids, topics = streams.requests(n, seed, **how)
    return [{"input_ids": row[None]} for row in ids], topics.tolist()


def batched(inputs: list[Inputs], size: int = 50) -> list[Inputs]:
    """Join requests into larger calls: a calibration sees the same requests, and runs faster."""
    parts = [inputs[i : i + size] for i in range(0, len(inputs), size)]
    return [{name: torch.cat([one[name] for one in part]) for name in part[0]} for part in parts]


def ask(cache: LLMCache, inputs: list[Inputs]) -> tuple[list[int], list[str | None]]:
    """Return the answers of all rows, and the rung that served each."""
    answers, rungs = [], []
    for one in inputs:
        answers += cache(**one).logits.argmax(dim=-1).tolist()
        rungs += [outcome.rung for outcome in cache.last]
    return answers, rungs


def rungs_of(cache: LLMCache, inputs: list[Inputs]) -> list[str | None]:
    """Return the rung that served each row."""
    return ask(cache, inputs)[1]


def known(cache: LLMCache) -> AuditStats:
    """Return the audit's statistics."""
    stats = cache.stats().audit
    assert stats is not None
    return stats


@contextmanager
def edited(weight: torch.Tensor) -> Iterator[None]:
    """Change a weight's values within the context."""
    own = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(own.flip(0) + 0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(own)


class Reading:
    """Reads logits; with `drifts`, rolled, as if the model answered differently."""

    drifts = False

    def __call__(self, output: Any) -> torch.Tensor:
        return output.logits.roll(1, dims=-1) if self.drifts else output.logits
