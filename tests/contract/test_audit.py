"""The audit runs no hook of the user's, and its recomputes count as no requests."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import AuditStats, LLMCache
from tests.contract.streams import ask, batched, calibrated, classifier, requests

FRESH = requests(40, seed=7)[0]


class Watch:
    """Counts, by thread, the runs of hooks on a model and its head; these hooks cause no bypass."""

    def __init__(self, model: Any) -> None:
        self.n_calls: Counter[int] = Counter()
        for part in (model, model.dropout, model.classifier):
            part.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.n_calls[threading.get_ident()] += 1


@pytest.fixture
def watched() -> Iterator[tuple[LLMCache, Watch]]:
    model = classifier()
    watch = Watch(model)
    with calibrated(model, audit=1.0) as cache:
        yield cache, watch


def audit_of(cache: LLMCache) -> AuditStats:
    audit = cache.stats().audit
    assert audit is not None
    return audit


def drained(cache: LLMCache) -> AuditStats:
    """Drain the audit from another thread and return its figures."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.drain).result()
    return audit_of(cache)


def test_hits_are_audited_without_hooks(watched: tuple[LLMCache, Watch]) -> None:
    """The audit runs no hook of the user's, in any thread."""
    cache, watch = watched
    n_hits = ask(cache, FRESH).count("semantic")
    n_calls = watch.n_calls.copy()
    audit = drained(cache)
    cache.drain()
    assert watch.n_calls == n_calls and set(n_calls) == {threading.get_ident()}
    assert 0 < n_hits == audit.n_recomputed and cache.stats().errors == 0


def test_the_audit_sees_the_model_of_now(watched: tuple[LLMCache, Watch]) -> None:
    """The audit compares the answer of each hit with the model's own, computed with the present weights."""
    cache, watch = watched
    for seed in (8, 9):
        ids = requests(40, seed=seed)[0]
        answers, served = [], []
        for row in ids:
            answers.append(int(cache(input_ids=row[None]).logits.argmax()))
            served.append(cache.last[0].rung == "semantic")
        before = audit_of(cache).n_changed if seed == 9 else 0
        changed = drained(cache).n_changed - before
        with cache.disabled():
            own = cache(input_ids=ids).logits.argmax(dim=-1).tolist()
        wrong = [a != b for a, b, is_hit in zip(answers, own, served, strict=True) if is_hit]
        assert changed == sum(wrong) and wrong
        cache.model.classifier.weight = nn.Parameter(cache.model.classifier.weight.detach().clone())
        assert audit_of(cache).status == "certified"
    assert set(watch.n_calls) == {threading.get_ident()}


@pytest.mark.slow
def test_learning_and_renewal_run_hooks_in_the_callers_threads_alone() -> None:
    """Learning in service and renewal run the user's hooks only in the threads that call."""
    model = classifier()
    watch = Watch(model)
    settings: dict[str, Any] = {"max_drop": 0.1, "auto_bypass": False, "audit": 1.0, "learn": 120, "recalibrate": 120}
    with LLMCache.wrap(model, **settings) as cache:
        for call in batched(requests(120)[0], 20):
            cache(**call)
        cache.drain()
        first, n_recomputed = cache.calibration, 0
        assert first is not None
        for call in batched(requests(160, seed=3)[0], 20):
            cache(**call)
            n_recomputed += drained(cache).n_recomputed
        assert cache.calibration not in (None, first)
        assert cache.stats().errors == 0 and n_recomputed > 0
    assert set(watch.n_calls) == {threading.get_ident()}


def test_what_is_audited_is_no_request(watched: tuple[LLMCache, Watch]) -> None:
    """`last` and the request counts of `stats` cover the user's calls only, not the audit's recomputes."""
    cache, _ = watched
    ask(cache, FRESH)
    before, last = cache.stats(), cache.last
    drained(cache)
    after = cache.stats()
    assert (after.n_requests, after.n_hits, after.bypassed) == (before.n_requests, before.n_hits, before.bypassed)
    assert cache.last == last and after.n_requests == len(FRESH)


def test_hooks_see_the_calls_that_are_computed(watched: tuple[LLMCache, Watch]) -> None:
    """A hook on the model sees each call, served or not."""
    cache, _ = watched
    seen: list[torch.Size] = []
    cache.model.register_forward_hook(lambda module, args, output: seen.append(output.logits.shape))
    ask(cache, FRESH[:20])
    assert seen == [torch.Size([1, 5])] * 20
