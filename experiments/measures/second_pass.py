"""Measure `second_pass`: texts embedded twice by sentence-transformers' `encode`, under a cache with default settings.

    first    with a new, empty cache, `LLMCache.wrap(model)`
    second   the same texts again, or some of them beside new ones, in a random order
    plain    those of the second pass by the model alone
    dict     the same, of which only those that are not in a dict by their hash are embedded: what one does otherwise

Each text occurs once per pass: hits of the second pass were computed and stored in the first.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from experiments.data.labelled import Data, read_requests
from experiments.measures.base import Experiment, Outcome
from experiments.measures.harness import speedup
from experiments.models.loading import MINILM, find
from experiments.support.clock import Clock
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
    # Shares of the second pass's texts that the first embedded.
    known: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], ONE_OR_MORE] = Field(default=(1.0,), min_length=1)
    restart: bool = False  # save the cache after the first pass, and load it into a new one
    rounds: int = Field(default=2, ge=1)  # three passes each, with a new cache

    @property
    def name(self) -> str:
        return self.data.path[0]


def run(experiment: SecondPass, folders: Folders) -> Outcome:
    from sentence_transformers import SentenceTransformer

    records = read_requests(experiment.data, folders.data, experiment.seed)
    texts = list(dict.fromkeys(record.text for record in records))
    n_needed = max(n + _n_new(n, known) for n in experiment.sizes for known in experiment.known)
    if len(texts) < n_needed:
        raise ConfigError(
            f"sizes={experiment.sizes}, known={experiment.known}: {experiment.name} has {len(texts)} different texts, "
            f"not {n_needed}; ask for fewer"
        )
    model = SentenceTransformer(find(experiment.model, folders.models), device="cpu", local_files_only=True)
    rows, ways = [], []
    for n, batch, known in product(experiment.sizes, experiment.batch_sizes, experiment.known):
        seen, n_new = texts[:n], _n_new(n, known)
        again = texts[n_new : n + n_new]  # those of the first pass, less its first ones, and as many new ones
        if n_new:
            random.Random(experiment.seed).shuffle(again)
        way = [
            {"n": n, "batch": batch, "known": known, "round": number}
            | embed_twice(model, seen, again, batch, experiment.restart)
            for number in range(experiment.rounds)
        ]
        rows += way
        ways.append(_of_way(way))
    return Outcome(rows, {"task": experiment.name, "model": experiment.model, "ways": ways, "summary": ways})


def _n_new(n: int, known: float) -> int:
    return n - round(known * n)


def embed_twice(
    model: Any,
    texts: Sequence[str],
    later: Sequence[str],
    batch: int,
    is_restarted: bool = False,
    shows_progress: bool = False,
) -> dict[str, Any]:
    """Return the times of the three passes, and the hits and differences of the second, of `later` texts."""
    clock, encode = Clock("cpu"), partial(model.encode, batch_size=batch, show_progress_bar=shows_progress)
    encode(texts[:batch])
    plain, vectors = clock.time(partial(encode, later))
    cache = LLMCache.wrap(model)
    try:
        first, vectors_of_first = clock.time(partial(encode, texts))
        cache.drain()
        if is_restarted:
            cache = _restarted(model, cache)
        before = cache.stats()
        second, again = clock.time(partial(encode, later))
        after = cache.stats()
    finally:
        cache.unwrap()
    by_hash = dict(zip(map(_hash, texts), vectors_of_first, strict=True))
    from_dict, _ = clock.time(lambda: _embed_new(encode, later, by_hash))
    n_bypassed = sum(after.bypassed.values()) - sum(before.bypassed.values())
    return {
        "plain_s": plain.ms / 1e3,
        "first_s": first.ms / 1e3,
        "second_s": second.ms / 1e3,
        "dict_s": from_dict.ms / 1e3,
        "hit_rate": (after.n_hits - before.n_hits) / len(texts),
        "bypassed": n_bypassed / len(texts),
        "bypassed_first": sum(before.bypassed.values()) / len(texts),
        "largest_difference": float(np.abs(again - vectors).max()),
    }


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _embed_new(encode: Callable[[list[str]], Any], texts: Sequence[str], known: dict[bytes, Any]) -> Any:
    """Return vectors (N, D) of N texts, those that are not known embedded."""
    keys = list(map(_hash, texts))
    new = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
    if new:
        known |= zip(new, encode(list(new.values())), strict=True)
    return np.stack([known[key] for key in keys])


def _restarted(model: Any, cache: LLMCache) -> LLMCache:
    with TemporaryDirectory() as folder:
        cache.save(Path(folder) / "saved")
        cache.unwrap()
        return LLMCache.load(model, Path(folder) / "saved")


def _of_way(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Return medians over rounds; of hits the minimum, of differences the maximum."""
    return {
        **{name: rows[0][name] for name in ("n", "batch", "known")},
        "hit_rate": min(row["hit_rate"] for row in rows),
        **speedup(*([row[name] for row in rows] for name in ("plain_s", "second_s"))),
        "dict_speedup": float(np.median([row["plain_s"] / row["dict_s"] for row in rows])),
        "first_costs": float(np.median([row["first_s"] / row["plain_s"] - 1 for row in rows])),
        "plain_ms": float(np.median([1e3 * row["plain_s"] / row["n"] for row in rows])),
        "largest_difference": max(row["largest_difference"] for row in rows),
    }
