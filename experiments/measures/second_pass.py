"""Measure `second_pass`: texts embedded twice by sentence-transformers' `encode`, under a cache with default settings.

    plain    by the model alone
    first    with a new, empty cache, `LLMCache.wrap(model)`
    second   the same texts again

Each text occurs once per pass: hits of the second pass were computed and stored in the first.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from experiments.data.labelled import Data, read_requests
from experiments.measures.base import Experiment, Outcome
from experiments.models.loading import MINILM, find
from experiments.support.files import Folders
from experiments.support.section import ONE_OR_MORE
from llmcache import ConfigError, LLMCache


class SecondPass(Experiment):
    data: Data  # source of texts: the first distinct ones, in its order
    model: str = MINILM  # sentence-transformers model: a folder, or a name for `experiments.models.loading.find`
    # Numbers of texts to embed.
    sizes: Annotated[tuple[PositiveInt, ...], ONE_OR_MORE] = Field(default=(300, 5000), min_length=1)
    # Batch sizes of `encode`, whose default is 32.
    batch_sizes: Annotated[tuple[PositiveInt, ...], ONE_OR_MORE] = Field(default=(32, 1), min_length=1)
    rounds: int = Field(default=2, ge=1)  # three passes each, with a new cache

    @property
    def name(self) -> str:
        return self.data.path[0]


def run(experiment: SecondPass, folders: Folders) -> Outcome:
    from sentence_transformers import SentenceTransformer

    records = read_requests(experiment.data, folders.data, experiment.seed)
    texts = list(dict.fromkeys(record.text for record in records))
    if len(texts) < max(experiment.sizes):
        raise ConfigError(
            f"sizes={experiment.sizes}: {experiment.name} has {len(texts)} different texts; ask for fewer"
        )
    model = SentenceTransformer(find(experiment.model, folders.models), device="cpu", local_files_only=True)
    rows = [
        {"n": n, "batch": batch, "round": number, **_round(model, texts[:n], batch)}
        for n in experiment.sizes
        for batch in experiment.batch_sizes
        for number in range(experiment.rounds)
    ]
    ways = [
        _of_way([row for row in rows if (row["n"], row["batch"]) == (n, batch)])
        for n in experiment.sizes
        for batch in experiment.batch_sizes
    ]
    return Outcome(rows, {"task": experiment.name, "model": experiment.model, "ways": ways, "summary": ways})


def _round(model: Any, texts: list[str], batch: int) -> dict[str, Any]:
    """Return the times of the three passes, and the second pass's hits and differences."""

    def encode() -> Any:
        return model.encode(texts, batch_size=batch, show_progress_bar=False)

    model.encode(texts[:batch], batch_size=batch)
    plain_s, plain = _timed(encode)
    with LLMCache.wrap(model) as cache:
        first_s, _ = _timed(encode)
        cache.drain()
        before = cache.stats()
        second_s, again = _timed(encode)
        after = cache.stats()
    n_bypassed = sum(after.bypassed.values()) - sum(before.bypassed.values())
    return {
        "plain_s": plain_s,
        "first_s": first_s,
        "second_s": second_s,
        "hit_rate": (after.n_hits - before.n_hits) / len(texts),
        "bypassed": n_bypassed / len(texts),
        "bypassed_first": sum(before.bypassed.values()) / len(texts),
        "largest_difference": float(np.abs(again - plain).max()),
    }


def _timed(encode: Callable[[], Any]) -> tuple[float, Any]:
    started = perf_counter()
    made = encode()
    return perf_counter() - started, made


def _of_way(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Return medians over rounds; of hits the minimum, of differences the maximum."""
    speedups = [row["plain_s"] / row["second_s"] for row in rows]
    return {
        "n": rows[0]["n"],
        "batch": rows[0]["batch"],
        "hit_rate": min(row["hit_rate"] for row in rows),
        "speedup": float(np.median(speedups)),
        "speedup_min": min(speedups),
        "speedup_max": max(speedups),
        "first_costs": float(np.median([row["first_s"] / row["plain_s"] - 1 for row in rows])),
        "plain_ms": float(np.median([1e3 * row["plain_s"] / row["n"] for row in rows])),
        "largest_difference": max(row["largest_difference"] for row in rows),
    }
