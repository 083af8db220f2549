"""Requests like the calibration's pass; unlike requests are detected and void the certificate."""

from collections.abc import Callable
from math import inf
from pathlib import Path

import numpy as np
import pytest

from llmcache import LLMCache
from llmcache.config import AuditOptions
from llmcache.reuse.calibration.drift import BATCH, DriftDetector, Features, Profile, profile
from tests import inside, topics
from tests.contract.streams import calibrated, classifier
from tests.topics import N_CALIBRATED, Inputs, batched, known, requests

N = 800  # requests in C
REPEAT = Features(-inf, 1.0, 0)  # a repeat of a source


def draw(
    rng: np.random.Generator, n: int, risk: float = 0.2, classes: int = 20, repeats: float = 0.05
) -> list[Features]:
    """Draw features of requests: some repeats of sources, some that no source may serve, the others in between."""
    risks = np.where(rng.random(n) < 0.05, inf, rng.beta(1, 1 / risk, n)).tolist()
    others = zip(risks, rng.beta(8, 2, n).tolist(), rng.integers(0, classes, n).tolist(), strict=True)
    return [
        REPEAT if is_repeat else Features(*one) for is_repeat, one in zip(rng.random(n) < repeats, others, strict=True)
    ]


def compared(seed: int, repeats: float = 0.05) -> Profile:
    rng = np.random.default_rng(seed)
    features = draw(rng, N, repeats=repeats)
    return profile(dict(zip(map(str, range(N)), features, strict=True)), rng.integers(0, 20, N).tolist(), 0.1)


def told_after(likeness: DriftDetector, asked: list[Features], keys: list[str] | None = None) -> int | None:
    """Return the number of requests after which they are detected as unlike."""
    batch: dict[str, Features] = {}
    for n, (key, features) in enumerate(zip(keys or map(str, range(len(asked))), asked, strict=False), start=1):
        if key not in likeness.seen:
            batch.setdefault(key, features)
        if len(batch) == BATCH:
            if likeness.see(batch):
                return n
            batch = {}
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("on_c", "later"), [(0.05, 0.05), (0.0, 0.95), (0.3, 0.3), (0.3, 0.95)])
def test_like_requests_are_seldom_told_and_repeats_are_no_sign_of_anything(on_c: float, later: float) -> None:
    """At most 1 % in 20,000 requests, besides 1 % of calibrations with a misleading sample; here 10 times 5,000.

    `on_c`, `later`: share of repeats, which are served their own answers. If a cache learned from its misses, C holds
    no repeats.
    """
    told = [
        told_after(DriftDetector(compared(seed, on_c)), draw(np.random.default_rng(seed + 50), 5000, repeats=later))
        for seed in range(10)
    ]
    assert told == [None] * 10


CHANGES: dict[str, Callable[[int, Features], Features]] = {
    "risk": lambda i, one: one._replace(risk=one.risk + 0.15),
    "similarity": lambda i, one: one._replace(similarity=one.similarity - 0.2),
    "class": lambda i, one: one._replace(forecast=one.forecast % 10),
    "new class": lambda i, one: one._replace(forecast=99) if i % 4 == 0 else one,
}


@pytest.mark.parametrize(("change", "before"), [*((name, 0) for name in CHANGES), ("risk", 4000)])
def test_each_kind_of_change_is_told_soon_also_late(change: str, before: int) -> None:
    rng = np.random.default_rng(3)
    changed = [CHANGES[change](i, one) for i, one in enumerate(draw(rng, 500))]
    likeness = DriftDetector(compared(1))
    assert told_after(likeness, draw(rng, before), [f"before {i}" for i in range(before)]) is None
    assert (told_after(likeness, changed) or inf) <= 400


def test_changes_in_what_is_repeated_are_told() -> None:
    """The bound counts repeats as requests: with fewer of them, more answers may change than it says."""
    rng = np.random.default_rng(3)
    riskier = [one if one.is_repeat else CHANGES["risk"](0, one) for one in draw(rng, 2000, repeats=0.5)]
    assert (told_after(DriftDetector(compared(1, 0.0)), riskier) or inf) < 800
    assert (told_after(DriftDetector(compared(1, 0.6)), draw(rng, 1000, repeats=0.1)) or inf) < 300
    everything = profile({str(i): REPEAT for i in range(N)}, [0, 1], 0.1)
    assert (everything.n, everything.n_repeats) == (0, N)
    assert told_after(DriftDetector(everything), draw(rng, 2000, repeats=1.0)) is None
    assert (told_after(DriftDetector(everything), draw(rng, 2000, repeats=0.5)) or inf) < 100


def test_a_request_that_comes_again_and_again_counts_once() -> None:
    rng = np.random.default_rng(5)
    odd, likeness = Features(inf, -1.0, 99), DriftDetector(compared(2))
    asked = [one if i % 50 == 0 else odd for i, one in enumerate(draw(rng, 5000))]
    keys = [str(i) if i % 50 == 0 else "odd" for i in range(5000)]
    assert told_after(likeness, asked, keys) is None
    assert told_after(DriftDetector(compared(2)), asked) is not None  # as many different odd requests are detected


# -- in a cache --------------------------------------------------------------------------------------------------------


def ask(cache: LLMCache, inputs: list[Inputs]) -> list[str | None]:
    """Ask five requests per call; return the rungs. The detector sees each request by itself."""
    return topics.rungs_of(cache, batched(inputs, size=5))


def unlike(n: int, noise: float = 1.0, seed: int = 7) -> list[Inputs]:
    """Requests unlike the calibration's."""
    return requests(n, seed=seed, noise=noise)[0]


@pytest.mark.slow
def test_only_unlike_requests_that_sources_could_serve_void_it() -> None:
    """Not repeats, requests of other namespaces, or requests whose sources are quarantined."""
    learned, rng = requests(N_CALIBRATED)[0], np.random.default_rng(0)
    pool = [*learned, *requests(500, seed=3)[0]]
    with calibrated(audit=AuditOptions(rate=1.0, in_background=False)) as cache:
        for few in batched([pool[i] for i in rng.integers(len(pool), size=250)], size=5):
            cache(**few)
            cache.drain()  # audited requests are stored, and their repeats are exact hits
        assert min(cache.stats().hits.values()) > 30
        ask(cache, unlike(25, seed=9) * 12)  # too few to count
        with cache.namespace("other"):
            ask(cache, unlike(300))
        sources = inside.sources(cache)
        for source in sources:
            sources.quarantine(source.key, "default")
        assert "semantic" not in ask(cache, requests(200, seed=7)[0])
        assert known(cache).status == "certified"
        ask(cache, unlike(300, seed=8))
        assert known(cache).status == "drifted"


@pytest.mark.slow
@pytest.mark.parametrize(("audit", "noise"), [(0.05, 0.2), (0.0, 1.0)])
def test_a_stream_that_moves_on_voids_the_certificate_and_nothing_is_served(
    audit: float, noise: float, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with calibrated(model := classifier(), audit=audit) as cache:
        before = known(cache).status
        assert before == ("certified" if audit else "unwatched")
        ask(cache, unlike(300, noise))
        assert known(cache).status == (before if noise == 0.2 else "drifted")
        assert cache.calibration.is_certified == (noise == 0.2)
        assert ("no longer like those" in caplog.text) == (noise == 1.0)
        n_later = ask(cache, requests(100, seed=8)[0]).count("semantic")  # the certificate does not come back by itself
        assert n_later == 0 if noise == 1.0 else n_later > 20
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        assert ("semantic" in ask(cache, requests(60, seed=9)[0])) == (noise == 0.2)
        assert known(cache).status == (before if noise == 0.2 else "drifted")
        assert cache.calibrate(batched(requests(N_CALIBRATED)[0])).is_certified
        assert known(cache).status == before


@pytest.mark.slow
def test_a_calibration_is_renewed_from_requests_after_the_drift() -> None:
    with calibrated(audit=AuditOptions(rate=1.0, in_background=False), recalibrate=100) as cache:
        made, audit = cache.calibration, inside.audit(cache)
        ask(cache, requests(90, seed=6)[0])
        cache.drain()
        assert len(audit._renewal.cases) == 90
        n = 0
        while not cache.calibration.has_drifted:
            cache(**unlike(1, seed=1000 + n)[0])
            n += 1
        assert n < 300
        cache.drain()
        assert len(audit._renewal.cases) <= n  # no case from before the drift is left
        for one in unlike(300, noise=0.1):
            cache(**one)
            cache.drain()
            if not cache.calibration.has_drifted:
                break
        assert cache.calibration is not made and known(cache).status in ("certified", "off")
        assert cache.calibration.n_sources + cache.calibration.n_tested <= n + 300
