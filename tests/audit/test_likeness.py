"""Requests that are like those of the calibration pass; others are told, and the certificate with them."""

import numpy as np
import pytest

from llmcache import LLMCache
from llmcache.audit.likeness import WINDOW, Likeness
from tests.topics import classifier, requests


def windows(share: float, seed: int, n: int = 20, of: float = 0.5) -> int:
    """How many of `n` windows are told to be unlike a calibration in which `of` were served."""
    rng, likeness = np.random.default_rng(seed), Likeness(of, 1250)
    return sum(likeness.see(1, int(rng.random() < share)) for _ in range(n * WINDOW))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_like_requests_are_never_told(share: float) -> None:
    assert sum(windows(share, seed, of=share) for seed in range(10)) == 0


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_others_are_told_in_the_first_window(share: float) -> None:
    assert windows(share, 0) == 20


def test_requests_that_come_again_and_again_void_nothing() -> None:
    pool, rng = requests(1200, seed=3)[0], np.random.default_rng(0)
    with LLMCache.wrap(classifier(), step_aside=False, max_drop=0.05, audit=1.0, audit_in_background=False) as cache:
        assert cache.calibrate([pool[i] for i in rng.integers(0, 1200, 900)]).is_certified
        for i in rng.integers(0, 1200, 6 * WINDOW):
            cache(**pool[i])
            cache.drain()  # what was looked into is stored, and its repeats are exact
        stats = cache.stats()
        assert stats.audit is not None and stats.audit.status == "certified"
        assert min(stats.hits.values()) > 300


@pytest.mark.parametrize(("noise", "status"), [(0.2, "certified"), (1.0, "drifted")])
def test_a_stream_that_moves_on_voids_the_certificate(noise: float, status: str) -> None:
    with LLMCache.wrap(classifier(), step_aside=False, max_drop=0.05) as cache:
        made = cache.calibrate(requests(700)[0])
        assert made.is_certified and made.watch is not None
        for one in requests(WINDOW + 20, seed=7, noise=noise)[0]:
            cache(**one)
        audit = cache.stats().audit
        assert audit is not None and audit.status == status
        assert cache.calibration is not None
        assert cache.calibration.is_certified == (status == "certified")
        assert cache.calibration.limit == made.limit
