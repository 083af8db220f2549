"""Requests that are like those of the calibration pass; others are told, and the certificate with them."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from llmcache import LLMCache
from llmcache.audit.audit import Audit
from llmcache.calibration.drift import DriftDetector, Marks, Profile, profile
from llmcache.request.call import Call
from tests.topics import classifier, requests

N = 800  # of C


REPEAT = Marks(-inf, 1.0, 0)  # of a source


def draw(rng: np.random.Generator, n: int, risk: float = 0.2, classes: int = 20, repeats: float = 0.05) -> list[Marks]:
    """Marks of requests: some repeats of sources, some that nobody may serve, the others in between."""
    risks = np.where(rng.random(n) < 0.05, inf, rng.beta(1, 1 / risk, n)).tolist()
    others = zip(risks, rng.beta(8, 2, n).tolist(), rng.integers(0, classes, n).tolist(), strict=True)
    return [
        REPEAT if is_repeat else Marks(*one) for is_repeat, one in zip(rng.random(n) < repeats, others, strict=True)
    ]


def known(seed: int, repeats: float = 0.05) -> Profile:
    rng = np.random.default_rng(seed)
    marks = draw(rng, N, repeats=repeats)
    return profile(dict(zip(map(str, range(N)), marks, strict=True)), rng.integers(0, 20, N).tolist(), 0.1)


def told_after(likeness: DriftDetector, asked: list[Marks], keys: list[str] | None = None) -> int | None:
    """Number of requests after which they are told to be unlike."""
    for n, (key, marks) in enumerate(zip(keys or map(str, range(len(asked))), asked, strict=False), start=1):
        if likeness.wants(key) and likeness.see(key, marks):
            return n
    return None


def test_like_requests_are_seldom_told() -> None:
    """At most 1 % a 20,000 requests, beside the 1 % of calibrations whose sample misleads; here 40 streams of 5,000."""
    told = [
        told_after(DriftDetector(known(seed)), draw(np.random.default_rng(seed + 1000), 5000)) for seed in range(40)
    ]
    assert sum(one is not None for one in told) == 0


@pytest.mark.parametrize("moved", ["risk", "similarity", "class", "new class"])
@pytest.mark.parametrize("before", [0, 4000])
def test_each_kind_of_change_is_told_soon_also_late(moved: str, before: int) -> None:
    rng = np.random.default_rng(3)
    changed = {
        "risk": [replace_(one, risk=one.risk + 0.15) for one in draw(rng, 500)],
        "similarity": [replace_(one, similarity=one.similarity - 0.2) for one in draw(rng, 500)],
        "class": [replace_(one, forecast=one.forecast % 10) for one in draw(rng, 500)],
        "new class": [replace_(one, forecast=99) if i % 4 == 0 else one for i, one in enumerate(draw(rng, 500))],
    }[moved]
    likeness = DriftDetector(known(1))
    assert told_after(likeness, draw(rng, before), [f"before {i}" for i in range(before)]) is None
    assert (told_after(likeness, changed) or inf) <= 400


def replace_(marks: Marks, **changes: float) -> Marks:
    return marks._replace(**changes)


def test_a_request_that_comes_again_and_again_counts_once() -> None:
    rng = np.random.default_rng(5)
    odd, likeness = Marks(inf, -1.0, 99), DriftDetector(known(2))
    asked = [one if i % 50 == 0 else odd for i, one in enumerate(draw(rng, 5000))]
    keys = [str(i) if i % 50 == 0 else "odd" for i in range(5000)]
    assert told_after(likeness, asked, keys) is None
    assert told_after(DriftDetector(known(2)), asked) is not None  # as many different ones are


@pytest.mark.parametrize("on_c", [0.0, 0.3])
@pytest.mark.parametrize("later", [0.3, 0.95])
def test_repeats_of_sources_are_no_sign_of_anything(on_c: float, later: float) -> None:
    """They are served their own answers. Where a cache learned from what it computed, C holds none of them."""
    told = [
        told_after(DriftDetector(known(seed, on_c)), draw(np.random.default_rng(seed + 50), 4000, repeats=later))
        for seed in range(10)
    ]
    assert told == [None] * 10


def test_what_is_no_repeat_is_compared_among_repeats() -> None:
    rng = np.random.default_rng(3)
    moved = [one if one.is_repeat else replace_(one, risk=one.risk + 0.15) for one in draw(rng, 2000, repeats=0.5)]
    assert (told_after(DriftDetector(known(1, 0.0)), moved) or inf) < 800


def test_fewer_repeats_than_on_c_are_told() -> None:
    """The bound counts them among all requests: without them, more of the others' answers may change than it says."""
    rng = np.random.default_rng(4)
    assert (told_after(DriftDetector(known(1, 0.6)), draw(rng, 1000, repeats=0.1)) or inf) < 300


def test_a_sample_of_nothing_but_repeats_tells_others() -> None:
    everything = profile({str(i): REPEAT for i in range(N)}, [0, 1], 0.1)
    assert (everything.n, everything.n_repeats) == (0, N)
    rng = np.random.default_rng(8)
    assert told_after(DriftDetector(everything), draw(rng, 2000, repeats=1.0)) is None
    assert (told_after(DriftDetector(everything), draw(rng, 2000, repeats=0.5)) or inf) < 100


# -- in a cache --------------------------------------------------------------------------------------------------------


def status_of(cache: LLMCache) -> str:
    audit = cache.stats().audit
    assert audit is not None
    return audit.status


def test_requests_that_come_again_and_again_void_nothing() -> None:
    pool, rng = requests(1200, seed=3)[0], np.random.default_rng(0)
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05, audit=1.0, audit_in_background=False) as cache:
        assert cache.calibrate([pool[i] for i in rng.integers(0, 1200, 900)]).is_certified
        for i in rng.integers(0, 1200, 3000):
            cache(**pool[i])
            cache.drain()  # what was audited is stored, and its repeats are exact
        assert status_of(cache) == "certified"
        assert min(cache.stats().hits.values()) > 300


def test_repeats_of_what_was_stored_before_are_looked_up_once_more(tmp_path: object) -> None:
    """Of a cache that was loaded misses are exact hits at once: did they not count, hits would seem to be more."""
    pool, rng = requests(1500, seed=3, noise=0.35)[0], np.random.default_rng(0)
    model = classifier()
    with LLMCache.wrap(model, auto_bypass=False, max_drop=0.05, audit=0) as cache:
        assert cache.calibrate(pool[:900]).is_certified
        for one in pool[900:]:
            cache(**one)
        cache.save(str(tmp_path))
    with LLMCache.load(model, str(tmp_path)) as cache:
        for i in rng.integers(900, 1500, 600):
            cache(**pool[i])
        assert status_of(cache) == "unwatched"
        assert cache.stats().hits["exact"] > 100


@pytest.mark.parametrize("audit", [0.0, 0.05])
@pytest.mark.parametrize("noise", [0.2, 1.0])
def test_a_stream_that_moves_on_voids_the_certificate_and_nothing_is_served(
    audit: float, noise: float, caplog: pytest.LogCaptureFixture
) -> None:
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05, audit=audit) as cache:
        assert cache.calibrate(requests(700)[0]).is_certified
        before = status_of(cache)
        assert before == ("certified" if audit else "unwatched")
        for one in requests(500, seed=7, noise=noise)[0]:
            cache(**one)
        assert cache.calibration is not None
        assert status_of(cache) == (before if noise == 0.2 else "drifted")
        assert cache.calibration.is_certified == (noise == 0.2)
        assert ("no longer like those" in caplog.text) == (noise == 1.0)
        served = cache.stats().hits.get("semantic", 0)
        for one in requests(100, seed=8)[0]:  # and it does not come back by itself
            cache(**one)
        later = cache.stats().hits.get("semantic", 0) - served
        assert later == 0 if noise == 1.0 else later > 20
        if noise == 1.0:
            assert cache.calibrate(requests(700)[0]).is_certified
            assert status_of(cache) == before
            cache(**requests(1, seed=9)[0][0])


def test_what_was_saved_after_a_drift_is_loaded_as_void(tmp_path: object) -> None:
    model = classifier()
    with LLMCache.wrap(model, auto_bypass=False, max_drop=0.05) as cache:
        cache.calibrate(requests(700)[0])
        for one in requests(300, seed=7, noise=1.0)[0]:
            cache(**one)
        assert status_of(cache) == "drifted"
        cache.save(str(tmp_path))
    with LLMCache.load(model, str(tmp_path)) as cache:
        for one in requests(60, seed=8)[0]:
            cache(**one)
        assert status_of(cache) == "drifted"
        assert "semantic" not in cache.stats().hits


def test_a_cache_that_learns_by_itself_learns_anew_after_a_drift() -> None:
    with LLMCache.wrap(classifier(), learn=700, auto_bypass=False, max_drop=0.05, audit=0) as cache:
        cache.calibrate(requests(700)[0])
        for one in requests(900, seed=7, noise=0.5)[0]:
            cache(**one)
            if status_of(cache) == "learning":
                break
        assert status_of(cache) == "learning"
        for one in requests(760, seed=8, noise=0.0)[0]:
            cache(**one)
        assert status_of(cache) == "unwatched"


def test_calls_that_are_known_to_be_held_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bypassed calls, those that are held take part: they are no sample of all."""
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05) as cache:
        cache.calibrate(requests(700)[0])
        draw = Audit.draw

        def foretold(self: Audit, call: Call, decided: Any) -> Any:
            call.progress.is_foretold = True
            return draw(self, call, decided)

        monkeypatch.setattr(Audit, "draw", foretold)
        for one in requests(300, seed=7, noise=1.0)[0]:
            cache(**one)
        assert status_of(cache) == "certified"
        monkeypatch.undo()
        for one in requests(300, seed=8, noise=1.0)[0]:
            cache(**one)
        assert status_of(cache) == "drifted"


def test_other_tenants_are_not_compared() -> None:
    """Nobody serves them, so they say nothing of those who are served."""
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05) as cache:
        cache.calibrate(requests(700)[0])
        with cache.namespace("other"):
            for one in requests(300, seed=7)[0]:
                cache(**one)
        assert status_of(cache) == "certified"


def test_sources_that_were_struck_off_do_not_look_like_other_requests() -> None:
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05, audit=0.05) as cache:
        cache.calibrate(requests(700)[0])
        banks = cache._components.banks
        for record in banks.records():
            if record.is_pinned:
                banks.quarantine(record.key, "default")
        for one in requests(400, seed=7)[0]:
            cache(**one)
        assert status_of(cache) == "certified"
        assert "semantic" not in cache.stats().hits


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_save_that_does_not_tell_repeats_apart_is_unwatched_and_suspends_nothing(is_counted: bool) -> None:
    """How many of C were served says nothing of different requests, where some come often."""
    pool, rng = requests(1500, seed=3)[0], np.random.default_rng(0)
    weights = np.arange(1.0, 1501) ** -1
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05, audit=0.05) as cache:
        asked = [pool[i] for i in rng.choice(1500, 3000, p=weights / weights.sum())]
        made = cache.calibrate(asked[:900])
        calibrated = cache._components.calibrated
        assert calibrated is not None and made.watch is not None and made.watch.profile is not None
        early = replace(made.watch.profile, n_repeats=None) if is_counted else None
        calibrated._serve(replace(made, watch=replace(made.watch, profile=early)))
        for one in asked[900:]:
            cache(**one)
        assert status_of(cache) == "unwatched"
        assert cache.stats().hits["semantic"] > 100


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_repeats_of_what_it_learned_from_void_nothing(share: float) -> None:
    learned, rng = requests(700)[0], np.random.default_rng(1)
    with LLMCache.wrap(classifier(), learn=700, auto_bypass=False, max_drop=0.05, audit=0.05) as cache:
        for one in learned:
            cache(**one)
        assert status_of(cache) == "certified"
        for one in requests(1200, seed=6)[0]:
            cache(**(learned[rng.integers(700)] if rng.random() < share else one))
        assert status_of(cache) == "certified"


@pytest.mark.parametrize("power", [0.8, 1.2])
def test_a_sample_without_duplicates_speaks_for_a_stream_in_which_some_come_often(power: float) -> None:
    pool, rng = requests(2500, seed=3)[0], np.random.default_rng(0)
    weights = np.arange(1.0, 2501) ** -power
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05, audit=0.05) as cache:
        assert cache.calibrate([pool[i] for i in rng.permutation(2500)[:900]]).is_certified
        for i in rng.choice(2500, 3000, p=weights / weights.sum()):
            cache(**pool[i])
        assert status_of(cache) == "certified"


def test_a_calibration_is_renewed_from_requests_after_the_drift() -> None:
    with LLMCache.wrap(
        classifier(), auto_bypass=False, max_drop=0.05, audit=1.0, recalibrate=100, audit_in_background=False
    ) as cache:
        made = cache.calibrate(requests(700)[0])
        for one in requests(90, seed=6)[0]:
            cache(**one)
        cache.drain()
        calibrated, audit = cache._components.calibrated, cache._components.audit
        assert calibrated is not None and audit is not None and len(audit._fresh.cases) == 90
        n = 0
        while cache.calibration is not None and not cache.calibration.has_drifted:
            cache(**requests(1, seed=1000 + n, noise=1.0)[0][0])
            n += 1
        assert n < 300 and cache.calibration is not None
        cache.drain()
        assert len(audit._fresh.cases) <= n  # of those before the drift none is left
        for one in requests(300, seed=7, noise=0.1)[0]:
            cache(**one)
            cache.drain()
            if not cache.calibration.has_drifted:
                break
        assert cache.calibration is not made and status_of(cache) in ("certified", "off")
        assert cache.calibration.n_sources + cache.calibration.n_tested <= n + 300
