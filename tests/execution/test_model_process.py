"""`cache.start_model_process()`: what nothing serves is computed by a process of its own, equal bit for bit."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import ConfigError, LLMCache, WrapError
from llmcache.execution import compiled as compiling
from llmcache.execution.model_process import ModelProcess
from tests.contract.test_forks import KINDS, check_children
from tests.execution.calls import fail_alike, one_layer, quietly, wrapped
from tests.tiny_models import CLASSIFIERS, build, padded, tokens

Pair = tuple[LLMCache, nn.Module]


@pytest.fixture(scope="module")
def started() -> Iterator[Pair]:
    """A model with a process, and the same model alone; the process is started once."""
    alone = build(one_layer)
    with LLMCache.wrap(build(one_layer), auto_bypass=False) as cache:
        cache(input_ids=tokens(1, 5, seed=1000))  # shows how the trunk packs its output
        cache.start_model_process()
        yield cache, alone


def process(cache: LLMCache) -> ModelProcess:
    compiler = cache._components.compiled
    assert compiler is not None
    assert compiler._compiled is not None
    assert compiler._compiled.process is not None
    return compiler._compiled.process


def computed(cache: LLMCache) -> int:
    found = cache.stats().compiled
    assert found is not None
    return found.n_requests


def is_equal(pair: Pair, **inputs: Any) -> bool:
    cache, alone = pair
    return torch.equal(cache(**inputs).logits, quietly(alone, **inputs).logits)


@pytest.mark.slow
def test_what_nothing_serves_is_computed_there_and_equal(started: Pair) -> None:
    cache, _ = started
    before, hits = computed(cache), cache.stats().n_hits
    assert is_equal(started, **padded([6, 4]))
    assert is_equal(started, **padded([9, 9, 2], seed=3))
    assert is_equal(started, input_ids=tokens(2, 11, seed=5))
    assert computed(cache) == before + 7
    assert is_equal(started, **padded([6, 4]))
    assert (computed(cache), cache.stats().n_hits) == (before + 7, hits + 2)


@pytest.mark.slow
def test_calls_without_the_cache_are_computed_there_as_well(started: Pair) -> None:
    cache, _ = started
    before = computed(cache)
    with cache.disabled():
        assert is_equal(started, **padded([6, 4], seed=8))
        assert is_equal(started, **padded([6, 4], seed=8, left=True))  # here: it is padded on the left
    assert computed(cache) == before + 2


@pytest.mark.slow
def test_what_was_calibrated_or_stored_before_is_served(started: Pair) -> None:
    cache, _ = started
    hits = cache.stats().n_hits
    cache(input_ids=tokens(1, 5, seed=1000))  # stored before the process was started
    assert cache.stats().n_hits == hits + 1


@pytest.mark.slow
def test_a_wrong_input_raises_what_the_model_raises_and_the_process_stays(started: Pair) -> None:
    cache, alone = started
    fail_alike(cache, alone)
    before = computed(cache)
    assert is_equal(started, **padded([7], seed=21))
    assert computed(cache) == before + 1


@pytest.mark.slow
def test_threads_share_it(started: Pair) -> None:
    results: list[bool] = []

    def ask(seed: int) -> None:
        results.extend(is_equal(started, **padded([5, 8], seed=100 * seed + i)) for i in range(5))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert results == [True] * 15


@pytest.mark.slow
def test_edits_in_place_are_seen_there(started: Pair) -> None:
    cache, alone = started
    for model in (cache.model, alone):
        with torch.no_grad():
            model.bert.encoder.layer[0].output.dense.weight.mul_(1.5)
    cache(**padded([5], seed=2))  # the first of these weights shows how the output is packed
    before = computed(cache)
    assert is_equal(started, **padded([6, 3], seed=30))
    assert computed(cache) == before + 2


@pytest.mark.slow
def test_a_process_that_is_killed_is_computed_around(started: Pair, caplog: pytest.LogCaptureFixture) -> None:
    cache, _ = started
    pid = process(cache)._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert is_equal(started, **padded([6, 3], seed=40))
    assert is_equal(started, **padded([6, 3], seed=41))
    found = cache.stats().compiled
    assert found is not None
    assert (found.has_process, found.n_failed, cache.stats().errors) == (False, 1, 0)
    assert "process" in caplog.text


@pytest.mark.slow
def test_other_edits_end_it(caplog: pytest.LogCaptureFixture) -> None:
    cache, alone = wrapped(one_layer, auto_bypass=False), build(one_layer)
    cache.start_model_process()
    running = process(cache)._process
    for model in (cache.model, alone):
        old = model.bert.encoder.layer[0].output.dense
        old.weight = nn.Parameter(old.weight.detach() * 1.5)
    assert is_equal((cache, alone), **padded([6]))
    assert is_equal((cache, alone), **padded([6], seed=4))
    assert not running.is_alive()
    assert "the model's process was ended" in caplog.text
    cache.start_model_process()
    again = process(cache)._process
    assert is_equal((cache, alone), **padded([6], seed=5))
    cache.unwrap()
    assert not again.is_alive()
    with pytest.raises(WrapError):
        cache.start_model_process()


def test_what_it_puts_out_is_compared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __init__(self, run: Any) -> None:
            self._run = run
            self.is_closed = False
            made.append(self)

        def __call__(self, inputs: Any) -> list[torch.Tensor]:
            with torch.no_grad():
                return [one + 1e-6 for one in self._run(inputs)]

        def close(self) -> None:
            self.is_closed = True

    made: list[Wrong] = []
    monkeypatch.setattr(compiling, "ModelProcess", Wrong)
    cache, alone = wrapped(one_layer), build(one_layer)
    with pytest.raises(ConfigError, match="not what the trunk does"):
        cache.start_model_process()
    assert [one.is_closed for one in made] == [True]
    assert is_equal((cache, alone), **padded([6]))


def test_a_model_that_cannot_be_handed_over_is_refused() -> None:
    model = build(one_layer)
    model.bert.note = lambda: None  # cannot be pickled
    with LLMCache.wrap(model) as cache:
        with pytest.raises(ConfigError, match="start_model_process"):
            cache.start_model_process()
        assert torch.isfinite(cache(**padded([6])).logits).all()


def test_models_whose_calls_are_decided_at_their_layers_are_refused() -> None:
    cache = wrapped(CLASSIFIERS["bert"], fingerprint="mean", tau=0.9, allow_unsafe=True)
    with pytest.raises(ConfigError, match="within the layers"):
        cache.start_model_process()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_computes_by_itself() -> None:
    """A child never takes another request's answer from the pipe, and leaves the process of its parent running."""
    with LLMCache.wrap(build(KINDS["encoder"]), auto_bypass=False) as cache:
        cache.start_model_process()
        check_children(cache, "encoder")
        stats = cache.stats().compiled
        assert stats is not None and stats.has_process, "a child ended its parent's process"
