"""What a review found: each once gave a wrong answer, or told a wrong figure."""

import copy
from math import inf
from typing import Any

import pytest
import torch

from llmcache import LLMCache
from llmcache.calibration import calibrated_reuse
from tests.contract.streams import ask, batched, calibrated, classifier, requests
from tests.tiny_models import BARE, build, tokens
from tests.topics import N_CALIBRATED


def test_a_hook_on_a_module_that_was_put_in_place_of_an_equal_one_is_run() -> None:
    """Weights are as before, so entries are served, but not past hooks of others."""
    model: Any = build(BARE["bert"])
    with LLMCache.wrap(model) as cache:
        ids = tokens(1, 6)
        for _ in range(2):
            before = cache(input_ids=ids).last_hidden_state
        assert cache.last[0].rung == "exact"
        layer = model.encoder.layer[0].output
        layer.dense = copy.deepcopy(layer.dense)
        assert torch.equal(cache(input_ids=ids).last_hidden_state, before)
        layer.dense.register_forward_hook(lambda module, args, output: output * 2)
        assert not torch.allclose(cache(input_ids=ids).last_hidden_state, before)
        assert cache.last[0].bypassed == "hooked"


def test_what_was_found_before_a_request_was_forgotten_is_not_served() -> None:
    """A part of a batch that was looked up is looked up anew once its source may serve nobody."""
    with calibrated(audit=0) as cache:
        row = next(row[None] for row in requests(60, seed=7)[0] if ask(cache, row[None]) == ["semantic"])
        found = cache.look_up({"input_ids": row})
        assert found.served is not None
        cache.forget(input_ids=row)
        cache(**found.served.inputs)
        assert cache.last[0].rung is None


def test_a_forgotten_source_goes_on_voting() -> None:
    """A source that was forgotten, computed again and forgotten once more changes no other request's risk."""
    ids = requests(40, seed=7)[0]

    def risks(cache: LLMCache) -> list[float | None]:
        return [(cache(input_ids=row[None]), cache.last[0].risk)[1] for row in ids[1:20]]

    with calibrated(audit=0) as cache:
        assert cache.calibrated is not None
        sources = cache.calibrated.fitter.sources
        row = next(row[None] for row in requests(N_CALIBRATED)[0] if ask(cache, row[None]) == ["exact"])
        n_before, before = len(sources), risks(cache)
        for _ in range(2):
            cache.forget(input_ids=row)
            cache(input_ids=row)
        assert len(sources) == n_before
        again = [(one, other) for one, other in zip(before, risks(cache), strict=True) if None not in (one, other)]
        assert again and all(other in (one, inf) for one, other in again)  # infinite: it would have served


def test_a_request_that_comes_twice_in_a_batch_is_one_source() -> None:
    """Whoever calibrates on repeats has as many sources as there are different requests to learn from."""
    ids = requests(200)[0]
    repeated = torch.cat([ids, ids[:50]])[torch.randperm(250, generator=torch.Generator().manual_seed(0))]
    with LLMCache.wrap(classifier(), max_drop=0.1) as cache:
        for call in batched(ids[:100], 20):
            cache(**call)
        made = cache.calibrate(batched(repeated))
        assert cache.calibrated is not None
        assert made.n_sources == len(cache.calibrated.fitter.sources) <= 200


def test_a_purge_while_it_is_learned_leaves_nothing_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is purged between the last request and the calibration is learned from by nobody."""
    with LLMCache.wrap(classifier(), learn=120, max_drop=0.1) as cache:
        honest = calibrated_reuse.compute_alone
        monkeypatch.setattr(calibrated_reuse, "compute_alone", lambda: (honest(), cache.purge(namespace="default")))
        for call in batched(requests(120)[0], 20):
            cache(**call)
        cache.drain()
        assert cache.calibration is None and cache.stats().n_stored == 0


def test_hits_of_graphs_are_audited() -> None:
    """What graphs keyed is recomputed under the same keys, and found the same."""
    model = classifier()
    with LLMCache.wrap(model, max_drop=0.1, audit={"rate": 1.0, "in_background": False}) as cache:
        cache.compile(lengths=(8,), rows=(1,), backend="eager")
        cache.calibrate(batched(requests(200)[0], 1))
        n_hits = ask(cache, requests(30, seed=7)[0]).count("semantic")
        cache.drain()
        audit = cache.stats().audit
        assert audit is not None and n_hits and audit.n_recomputed == n_hits and audit.n_lost == 0


def test_namespaces_that_come_and_go_leave_nothing() -> None:
    """A namespace for each session takes no memory once it is purged."""
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        for number in range(300):
            with cache.namespace(str(number)):
                cache(input_ids=tokens(1, 4))
            cache.purge(namespace=str(number))
        states = cache._way.forward._forms._states
        assert all(len(one.scopes) <= 256 for one in states.values())
