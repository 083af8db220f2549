"""A stream whose hit rate is set, where repeats alone are served: requests of a pool, as its numbers."""

import random

from llmcache import ConfigError


def with_repeats(n_pool: int, hit_rate: float, n: int, rng: random.Random) -> list[int]:
    """`n` requests, of which the share `hit_rate` came before, drawn alike; the others are the pool's, in its order."""
    n_new = n - round(hit_rate * n)
    if not 1 <= n_new <= n_pool:
        raise ConfigError(f"hit_rates: {hit_rate:g} of {n} takes {n_new} different requests; the stream has {n_pool}")
    is_new = [True] * (n_new - 1) + [False] * (n - n_new)
    rng.shuffle(is_new)
    stream: list[int] = []
    n_seen = 0
    for new in (True, *is_new):
        stream.append(n_seen if new else rng.randrange(n_seen))
        n_seen += new
    return stream
