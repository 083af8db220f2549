"""Embed texts by several processes that share what they compute: python examples/workers.py MODEL FOLDER [TEXTS].

It takes the place of `encode(texts, device=[...])`, whose workers get copies of the model without a cache: here each
worker loads the model, and wraps it with a store on disk that all of them read and write.
"""

import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from llmcache import LLMCache

N_WORKERS = 2
cache: Any = None  # of this worker


def begin(model: str, folder: str) -> None:
    """Load and wrap the model in a worker."""
    global cache
    store = {"name": "disk", "folder": folder}
    cache = LLMCache.wrap(SentenceTransformer(model, device="cpu"), store=store)


def encode(texts: list[str]) -> tuple[Any, float]:
    """Return the vectors of a worker's part, and the share of the texts that were known; all are on disk then."""
    cache.restart_stats()
    vectors = cache.model.encode(texts)
    cache.drain()
    return vectors, cache.stats().hit_rate


def main(model: str, folder: str, texts: str = "") -> None:
    """Encode the lines of a file, or some made-up documents."""
    lines = Path(texts).read_text().splitlines() if texts else [f"document {i}" for i in range(64)]
    parts = [lines[i : i + 32] for i in range(0, len(lines), 32)]
    with get_context("spawn").Pool(N_WORKERS, begin, (model, folder)) as pool:
        vectors, known = zip(*pool.map(encode, parts), strict=True)
    share = np.average(known, weights=[len(part) for part in parts])
    print(f"{len(np.concatenate(vectors))} vectors, {share:.0%} of the texts were known")


if __name__ == "__main__":
    main(*sys.argv[1:])
