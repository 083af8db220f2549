"""Vectors of norm 1 that are like fingerprints of many requests, made block by block. N: vectors, F: dimensions.

    paraphrases   vector = mean + topic + request + wording, scaled to norm 1

Squared norms are 0.5, 0.2, 0.175 and 0.125. All parts but the mean are Gaussian, of variance (i + 10)^-1.5 in dimension
i. There is a topic for 200 vectors and a request for 10, drawn uniformly. Mean fingerprints of banking77 by
all-MiniLM-L6-v2 (F = 384) are alike: half of their variance is in 20 dimensions, and the similarity of any two is 0.55
in the median, that of the nearest 0.89; here 0.51 and 0.90.

    uniform       independent on the sphere: nothing is near anything, and lists or graphs have nothing to hold on to
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Drawn = Literal["paraphrases", "uniform"]

BLOCK = 20_000  # vectors
A_TOPIC, A_REQUEST = 200, 10  # vectors that share one
MEAN, TOPIC, REQUEST, WORDING = 0.5, 0.2, 0.175, 0.125


class Vectors:
    """N vectors that are stored, and others that are asked for: the same ones each time they are drawn."""

    def __init__(self, drawn: Drawn, n: int, dim: int, seed: int) -> None:
        self.n = n
        self._drawn = drawn
        self._dim = dim
        self._seed = seed
        variance = (np.arange(dim) + 10.0) ** -1.5
        self._scale = np.sqrt(variance / variance.sum()).astype(np.float32)
        rng = np.random.default_rng((seed, 0))
        n_topics, n_requests = (max(1, n // shared) if drawn == "paraphrases" else 0 for shared in (A_TOPIC, A_REQUEST))
        self._topics, self._requests = self._gaussian(rng, n_topics), self._gaussian(rng, n_requests)
        self._topic_of = rng.integers(n_topics, size=n_requests) if n_topics else np.empty(0, np.int64)

    def stored(self) -> Iterator[Floats]:
        """Vectors (BLOCK or less, F), N in all."""
        for number, start in enumerate(range(0, self.n, BLOCK)):
            yield self._draw(np.random.default_rng((self._seed, 1, number)), min(BLOCK, self.n - start))

    def asked(self, n: int) -> Floats:
        """Other vectors (n, F) of the same kind."""
        return self._draw(np.random.default_rng((self._seed, 2)), n)

    def _draw(self, rng: np.random.Generator, n: int) -> Floats:
        if self._drawn == "uniform":
            x = rng.standard_normal((n, self._dim), dtype=np.float32)
        else:
            requests = rng.integers(len(self._topic_of), size=n)
            x = np.sqrt(np.float32(WORDING)) * self._gaussian(rng, n)
            x += np.sqrt(np.float32(REQUEST)) * self._requests[requests]
            x += np.sqrt(np.float32(TOPIC)) * self._topics[self._topic_of[requests]]
            x += np.float32(np.sqrt(MEAN / self._dim))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        return x

    def _gaussian(self, rng: np.random.Generator, n: int) -> Floats:
        drawn: Floats = rng.standard_normal((n, self._dim), dtype=np.float32)
        return drawn * self._scale
