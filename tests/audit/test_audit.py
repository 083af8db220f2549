"""The audit in a cache: what it sees is the truth, what follows from it, and what cannot disturb it."""

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import AuditStats, LLMCache
from llmcache.audit.account import AuditAccount
from llmcache.audit.idle_worker import GaveWay
from llmcache.audit.recomputer import Recomputer
from llmcache.calibration.drift import DriftDetector
from llmcache.errors import CalibrationError, ConfigError
from llmcache.execution.fast_path import FastPath
from tests import inside
from tests.tiny_models import PAD, build, llama
from tests.topics import batched, classifier, requests

N = 700
SETTINGS: dict[str, Any] = {"max_drop": 0.05, "audit": 1.0, "auto_bypass": False}
Inputs = dict[str, Tensor]


class Reading:
    """Finds logits; on demand those of a model that has another opinion now, or none at all."""

    def __init__(self) -> None:
        self.drifts = False
        self.fails = False

    def __call__(self, output: Any) -> Tensor:
        if self.fails:
            raise RuntimeError("no answer today")
        return output.logits.roll(1, dims=-1) if self.drifts else output.logits


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return classifier()


@pytest.fixture(scope="module")
def folder(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated cache, saved."""
    folder = tmp_path_factory.mktemp("calibrated")
    with LLMCache.wrap(model, **SETTINGS) as cache:
        assert cache.calibrate(batched(requests(N)[0])).is_certified
        cache.save(folder)
    return folder


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
def cache(model: nn.Module, folder: Path, reading: Reading) -> Iterator[LLMCache]:
    with LLMCache.load(model, folder, answer_of=reading) as cache:
        yield keep_quiet(cache)


def keep_quiet(cache: LLMCache) -> LLMCache:
    """Have nothing audited before `drain`."""
    shadow = inside.audit(cache).worker
    shadow._idle_s = shadow._patience_s = 1e6
    return cache


def known(cache: LLMCache) -> AuditStats:
    stats = cache.stats().audit
    assert stats is not None
    return stats


def ask(cache: LLMCache, inputs: list[Inputs]) -> list[str | None]:
    """Which rung gave each answer."""
    rungs = []
    for one in inputs:
        cache(**one)
        rungs.append(cache.last[0].rung)
    return rungs


def fresh(n: int, seed: int = 7) -> list[Inputs]:
    return requests(n, seed=seed)[0]


def ring(cache: LLMCache, reading: Reading, seed: int = 20) -> None:
    """Serve answers that are all wrong until the alarm rings."""
    reading.drifts, before = True, known(cache).n_alarms
    for one in fresh(400, seed=seed):
        cache(**one)
        cache.drain()
        if known(cache).n_alarms > before:
            break
    else:
        raise AssertionError("no alarm")
    reading.drifts = False


@contextmanager
def edited(weight: Tensor) -> Iterator[None]:
    """Within: other values."""
    own = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(own.flip(0) + 0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(own)


# -- what it sees ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_sees_as_many_changed_answers_as_there_are(cache: LLMCache) -> None:
    inputs = fresh(150)
    served = [(int(cache(**one).logits.argmax()), cache.last[0].rung) for one in inputs]
    with cache.disabled():
        own = [int(cache(**one).logits.argmax()) for one in inputs]
    n_hits = sum(rung == "semantic" for _, rung in served)
    n_changed = sum(answer != plain for (answer, _), plain in zip(served, own, strict=True))
    assert known(cache).n_waiting == known(cache).n_drawn == n_hits > 50
    last, counted = cache.last, cache.stats().n_requests
    assert cache.drain() == n_hits
    stats = known(cache)
    assert (stats.n_requests, stats.n_recomputed, stats.n_changed, stats.n_waiting) == (150, n_hits, n_changed, 0)
    assert stats.n_changed > 0
    assert stats.rate == n_changed / 150
    assert stats.lower < stats.rate < stats.upper < 1
    assert stats.needed is not None and stats.needed > 0
    assert cache.stats().errors == 0
    assert (cache.last, cache.stats().n_requests) == (last, counted)  # its own calls are nobody's requests


def test_what_was_looked_into_serves_its_repeats_and_no_others(cache: LLMCache) -> None:
    inputs = fresh(60)
    shelf = inside.partition(cache)
    held = len(shelf)
    before = ask(cache, inputs)
    cache.drain()
    assert "semantic" in before
    assert set(ask(cache, inputs)) == {"exact"}
    assert len(shelf) == held


def test_rows_of_a_padded_batch_are_looked_into_one_by_one(cache: LLMCache) -> None:
    rows = [one["input_ids"][0] for n_words in (4, 5, 6) for one in requests(12, seed=n_words, n_words=n_words)[0]]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    answers = cache(input_ids=ids, attention_mask=mask).logits.argmax(dim=-1)
    n_hits = [outcome.rung for outcome in cache.last].count("semantic")
    with cache.disabled():
        own = cache(input_ids=ids, attention_mask=mask).logits.argmax(dim=-1)
    cache.drain()
    assert known(cache).n_recomputed == n_hits > 10
    assert known(cache).n_changed == int((answers != own).sum())


@pytest.mark.slow
def test_it_computes_in_the_calls_namespace_and_precision_whoever_drains(model: nn.Module) -> None:
    with LLMCache.wrap(model, **SETTINGS) as cache:
        with cache.namespace("tenant"), torch.autocast("cpu", dtype=torch.bfloat16):
            cache.calibrate(batched(requests(N)[0]))
            keep_quiet(cache)
            n_hits = ask(cache, fresh(60)).count("semantic")
        with cache.namespace("other"), cache.disabled():
            cache.drain()
        assert known(cache).n_recomputed == n_hits > 20
        assert cache.stats().errors == 0
        assert {record.scope.namespace for record in inside.records(cache)} == {"tenant"}


@pytest.mark.slow
def test_when_the_queue_is_full_drawn_hits_are_computed_instead(cache: LLMCache) -> None:
    inside.audit(cache).worker._max_jobs = 0
    inputs = fresh(80)
    assert ask(cache, inputs) == [None] * 80
    stats = known(cache)
    assert stats.n_drawn == stats.n_recomputed > 20
    assert stats.n_waiting == cache.drain() == 0
    assert cache.stats().errors == 0


def test_a_thread_of_its_own_does_it_when_nobody_calls(model: nn.Module, folder: Path) -> None:
    with LLMCache.load(model, folder) as cache:
        shadow = inside.audit(cache).worker
        shadow._idle_s = 0.0
        n_hits = ask(cache, fresh(30)).count("semantic")
        cache.drain()  # with it
        assert shadow._thread is not None and shadow._thread.is_alive()
        assert known(cache).n_recomputed == n_hits > 5


def test_without_an_audit_nothing_is_looked_into(model: nn.Module, folder: Path) -> None:
    with LLMCache.load(model, folder) as cache:
        inside.audit(cache)._floor = 0.0
        assert "semantic" in ask(cache, fresh(40))
        assert (known(cache).status, known(cache).n_requests, known(cache).rate) == ("certified", 0, None)
        assert (known(cache).upper, cache.drain()) == (1.0, 0)
        assert inside.audit(cache).worker._thread is None


def test_reuse_that_is_not_calibrated_has_no_audit(model: nn.Module) -> None:
    with LLMCache.wrap(model, tau=0.9) as cache:
        assert cache.stats().audit is None
        assert cache.drain() == 0


def test_states_of_a_model_that_was_edited_meanwhile_are_not_kept(
    cache: LLMCache, model: nn.Module, reading: Reading
) -> None:
    one = next(one for one in fresh(50) if ask(cache, [one]) == ["semantic"])
    weight = model.bert.encoder.layer[-1].output.dense.weight
    as_it_was = weight.detach().clone()
    layer = model.bert.encoder.layer[0]

    def edit(*_: Any) -> None:
        with torch.no_grad():
            weight.add_(1.0)

    hook = layer.register_forward_hook(edit)
    assert cache.drain() > 0
    hook.remove()
    with torch.no_grad():
        weight.copy_(as_it_was)
    assert ask(cache, [one]) != ["exact"]


def test_a_hit_that_is_not_served_after_all_counts_as_none(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    run_rest, failed = FastPath.run_rest, []

    def fail_at_first(*args: Any) -> Any:
        if len(failed) < 3:
            failed.append(args)
            raise RuntimeError("no rows can be taken out")
        return run_rest(*args)

    monkeypatch.setattr(FastPath, "run_rest", fail_at_first)
    ask(cache, fresh(1, seed=32))  # from here on the output is understood
    served = []
    for one, other in zip(fresh(60, seed=33), fresh(60, seed=34), strict=True):
        n_failed = len(failed)
        cache(input_ids=torch.cat([one["input_ids"], other["input_ids"]]))
        rungs = [outcome.rung for outcome in cache.last]
        assert len(failed) == n_failed or rungs == [None, None]
        served += rungs
    assert len(failed) == cache.stats().errors == 3
    assert 0 < served.count("semantic") == known(cache).n_drawn


# -- what follows ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_source_whose_answer_changed_serves_nobody_else_again(
    cache: LLMCache, model: nn.Module, reading: Reading, tmp_path: Path
) -> None:
    reading.drifts = True
    one = next(one for one in fresh(50) if ask(cache, [one]) == ["semantic"])
    source = cache.last[0].source
    cache.drain()
    assert list(inside.banks(cache).quarantined) == [source]
    again = fresh(300, seed=30)
    ask(cache, again)
    sources = {cache.last[0].source for other in again if ask(cache, [other]) == ["semantic"]}
    assert sources and source not in sources
    assert ask(cache, [one]) == ["exact"]
    assert known(cache).n_quarantined == 1
    cache.save(tmp_path)
    cache.unwrap()
    with LLMCache.load(model, tmp_path) as loaded:
        assert list(inside.banks(loaded).quarantined) == [source]
        assert loaded.stats().errors == 0


@pytest.mark.slow
def test_striking_only_turns_hits_into_computed_requests(cache: LLMCache) -> None:
    inputs = fresh(120)

    def sources() -> list[str | None]:
        found = []
        for one in inputs:
            cache(**one)
            found.append(cache.last[0].source if cache.last[0].rung == "semantic" else None)
            inside.banks(cache).layer_banks[3].remove(cache.last[0].key)  # so that no repeat is exact
        return found

    before = sources()
    quarantined = {key for key in before if key is not None and hash(key) % 2}
    for key in quarantined:
        inside.banks(cache).quarantine(key, "default")
    assert quarantined
    assert sources() == [None if key in quarantined else key for key in before]


@pytest.mark.slow
def test_the_first_alarm_halves_what_is_served_and_the_second_ends_it(
    cache: LLMCache, model: nn.Module, reading: Reading, tmp_path: Path
) -> None:
    found = cache.calibration
    assert found is not None and found.chosen is not None and found.watch is not None
    assert known(cache).status == "certified"
    assert found.watch.tighter < found.chosen.limit
    before = ask(cache, fresh(150, seed=41)).count("semantic")
    ring(cache, reading)
    tightened = cache.calibration
    assert tightened is not None and not tightened.is_certified
    assert (tightened.limit, tightened.to_dict()["n_alarms"]) == (found.watch.tighter, 1)
    assert (known(cache).status, known(cache).n_alarms) == ("tightened", 1)
    assert known(cache).n_requests < 5  # a new account
    assert 0 < ask(cache, fresh(150, seed=42)).count("semantic") < 0.75 * before
    cache.save(tmp_path)
    ring(cache, reading, seed=21)
    assert cache.calibration is None
    assert (known(cache).status, known(cache).n_alarms) == ("off", 2)
    assert "semantic" not in ask(cache, fresh(60, seed=43))
    cache.unwrap()
    with LLMCache.load(model, tmp_path) as loaded:
        assert loaded.calibration == tightened
        assert known(loaded).status == "tightened"
        assert 0 < ask(loaded, fresh(150, seed=44)).count("semantic") < 0.75 * before


@pytest.mark.slow
def test_the_alarm_comes_within_the_requests_that_it_is_said_to_need(cache: LLMCache, reading: Reading) -> None:
    ask(cache, fresh(100, seed=50))
    cache.drain()
    needed = known(cache).needed
    assert needed is not None
    reading.drifts = True

    def rings(one: Inputs) -> bool:
        cache(**one)
        cache.drain()
        return known(cache).n_alarms == 1

    assert any(rings(one) for one in fresh(needed, seed=51))


@pytest.mark.slow
def test_after_the_second_alarm_it_learns_anew_where_it_was_to_learn(model: nn.Module, reading: Reading) -> None:
    with LLMCache.wrap(model, learn=N, answer_of=reading, **SETTINGS) as cache:
        assert known(cache).status == "learning"
        first = cache.calibrate(batched(requests(N)[0]))
        keep_quiet(cache)
        calibrated = cache.calibrated
        assert calibrated is not None
        for _ in range(2):
            assert cache.calibration is not None
            calibrated.alarm(cache.calibration)
        assert (known(cache).status, cache.calibration) == ("learning", None)
        ask(cache, fresh(N + 60, seed=60))
        assert cache.calibration not in (None, first)
        assert known(cache).status == "certified"
        assert cache.stats().errors == 0


def test_calls_that_are_computed_during_a_calibration_do_not_wait_for_it(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMCache.wrap(model, learn=N, **SETTINGS) as cache:
        calibrated, wanted = cache.calibrated, []

        def fit(observed: Any, claim: Any) -> None:
            wanted.append(calibrated.is_learning)
            raise CalibrationError("not today")

        monkeypatch.setattr(calibrated, "_calibrate", fit)
        with pytest.raises(CalibrationError, match="not today"):
            cache.calibrate(batched(fresh(N)))
        assert (wanted, calibrated.is_learning) == ([False], True)


def test_an_alarm_of_a_calibration_that_has_ended_changes_nothing(cache: LLMCache) -> None:
    calibrated, made = cache.calibrated, cache.calibration
    assert calibrated is not None and made is not None
    calibrated.alarm(made)
    tightened = cache.calibration
    calibrated.alarm(made)
    assert cache.calibration is tightened is not made


@pytest.mark.slow
def test_growing_sources_are_joined_by_what_was_looked_into(model: nn.Module, reading: Reading) -> None:
    with LLMCache.wrap(model, sources="growing", answer_of=reading, **SETTINGS) as cache:
        cache.calibrate(batched(requests(N)[0]))
        keep_quiet(cache)
        shelf = inside.partition(cache)
        assert known(cache).status == "growing"
        n_hits = ask(cache, fresh(60)).count("semantic")
        held = len(shelf)
        cache.drain()
        assert len(shelf) == held + n_hits > held


@pytest.mark.slow
def test_a_calibration_is_renewed_from_what_was_drawn(model: nn.Module) -> None:
    with LLMCache.wrap(model, recalibrate=300, **SETTINGS) as cache:
        first = cache.calibrate(batched(requests(N)[0]))
        keep_quiet(cache)
        ask(cache, fresh(299, seed=70))
        cache.drain()
        assert cache.calibration is first
        ask(cache, fresh(40, seed=71))
        cache.drain()
        renewed = cache.calibration
        assert renewed is not None and renewed is not first
        assert (renewed.max_drop, renewed.delta, renewed.sources) == (first.max_drop, first.delta, first.sources)
        # Every request since then was drawn, and the newest 2 * 118 are kept.
        assert renewed.n_sources + renewed.n_tested == pytest.approx(236, abs=3)
        assert known(cache).n_requests == 0
        assert cache.stats().errors == 0
        with pytest.raises(ConfigError, match="recalibrate=300 with metric 'accuracy'"):
            cache.calibrate(batched(requests(N)[0]), labels=requests(N)[1], metric="accuracy")
        assert cache.calibration is renewed


@pytest.mark.slow
def test_it_is_not_renewed_from_fewer_than_can_carry_the_claim(model: nn.Module, folder: Path) -> None:
    with LLMCache.load(model, folder) as cache:
        keep_quiet(cache)
        inside.audit(cache)._fresh.every = 20
        found = cache.calibration
        rungs = ask(cache, fresh(100, seed=72))
        cache.drain()
        assert cache.calibration is found
        assert {"semantic", None} == set(rungs)
        assert len(inside.audit(cache)._fresh.cases) == 100  # hits and misses alike: all are drawn here
        calibrated = cache.calibrated
        assert calibrated is not None and found is not None
        with pytest.raises(CalibrationError, match="at least 118 are needed"):
            calibrated.renew(found, inside.audit(cache)._fresh.cases)
        assert cache.calibration is found


@pytest.mark.slow
def test_what_accuracy_allows_to_change_rings_no_alarm(cache: LLMCache) -> None:
    inputs, labels = requests(N)
    found = cache.calibrate(batched(inputs), labels=labels, metric="accuracy", max_drop=0.05)
    assert found.watch is not None
    assert 0.01 < found.watch.most_changed <= 0.5
    assert found.watch.most_changed != found.max_drop
    changed = cache.calibrate(batched(inputs), max_drop=0.05)
    assert changed.watch is not None and changed.watch.most_changed == 0.05


@pytest.mark.slow
def test_once_requests_were_told_to_have_changed_nothing_is_served_and_the_account_goes_on(
    cache: LLMCache, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(cache, fresh(30))
    cache.drain()
    looked = known(cache).n_recomputed
    monkeypatch.setattr(DriftDetector, "see", lambda *_: True)
    assert ask(cache, fresh(1, seed=30)) == [None]  # the very request that tells it is computed
    monkeypatch.undo()
    assert known(cache).status == "drifted" and cache.calibration is not None
    assert known(cache).n_requests == 31 and known(cache).n_recomputed == looked > 10  # the account goes on
    assert set(ask(cache, fresh(30, seed=31))) == {None}
    assert (known(cache).n_requests, known(cache).n_drawn, known(cache).n_alarms) == (61, looked, 0)


# -- what cannot disturb it --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_look_that_fails_is_counted_and_raises_nowhere(cache: LLMCache, reading: Reading) -> None:
    n_hits = ask(cache, fresh(40)).count("semantic")
    before = known(cache).upper
    reading.fails = True
    assert cache.drain() == n_hits > 10
    assert cache.stats().errors >= n_hits
    stats = known(cache)
    assert (stats.n_recomputed, stats.n_waiting) == (0, 0)
    assert (stats.n_alarms, stats.status) == (1, "tightened")  # all of them count as changed
    assert before > 0.9  # as they do while they wait
    reading.fails = False
    more = ask(cache, fresh(80, seed=80)).count("semantic")
    cache.drain()
    assert known(cache).n_recomputed == more > 10


def test_a_model_that_raises_meanwhile_raises_nowhere(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    n_hits = ask(cache, fresh(40)).count("semantic")

    def fail(namespace: str, inputs: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(inside.audit(cache)._recomputer, "compute", fail)
    assert cache.drain() == n_hits
    assert cache.stats().errors == n_hits


def test_weights_edited_meanwhile_give_no_verdict(cache: LLMCache, model: nn.Module) -> None:
    n_hits = ask(cache, fresh(40)).count("semantic")
    with edited(model.bert.encoder.layer[0].output.dense.weight):
        assert cache.drain() == n_hits
        assert known(cache).status == "other weights"
        ask(cache, fresh(20, seed=81))
    stats = known(cache)
    assert stats.status == "certified"
    assert (stats.n_drawn, stats.n_recomputed, stats.n_changed, stats.n_requests) == (n_hits, 0, 0, 40)
    assert not inside.banks(cache).quarantined


def known_after(cache: LLMCache) -> tuple[int, int, int, int]:
    """Hits drawn, audited, lost and waiting after a drain."""
    cache.drain()
    stats = known(cache)
    return stats.n_drawn, stats.n_recomputed, stats.n_lost, stats.n_waiting


@pytest.mark.slow
@pytest.mark.parametrize("part", ["trunk", "head"])
def test_adapters_that_take_turns_lose_no_look(cache: LLMCache, model: nn.Module, part: str) -> None:
    """A look takes the weights that served: it waits for them, however often others come in between."""
    weight = model.bert.encoder.layer[0].output.dense.weight if part == "trunk" else model.classifier.bias
    n_hits = 0
    for one, other in zip(fresh(60), fresh(60, seed=82), strict=True):
        n_hits += ask(cache, [one]).count("semantic")
        with edited(weight):
            assert ask(cache, [other]) == [None]
            assert known_after(cache) == (n_hits, 0, 0, n_hits)
    assert n_hits > 20
    assert known_after(cache) == (n_hits, n_hits, 0, 0)
    assert known(cache).status == "certified" and cache.stats().errors == 0


@pytest.mark.slow
def test_an_adapter_that_comes_before_a_call_has_ended_loses_no_look(
    cache: LLMCache, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, weight = inside.audit(cache), model.bert.encoder.layer[0].output.dense.weight
    served = audit.served

    def late(call: Any) -> None:
        with edited(weight):
            served(call)

    monkeypatch.setattr(audit, "served", late)
    n_hits = ask(cache, fresh(40)).count("semantic")
    assert n_hits > 10 and known_after(cache) == (n_hits, n_hits, 0, 0)


@pytest.mark.slow
def test_adapters_that_leave_no_idle_moment_have_looks_made_in_calls(cache: LLMCache, model: nn.Module) -> None:
    weight, shadow = model.bert.encoder.layer[0].output.dense.weight, inside.audit(cache).worker
    shadow._patience_s = 0.0
    for one, other in zip(fresh(100), fresh(100, seed=82), strict=True):
        shadow._credit_s = 1e6
        ask(cache, [one])
        with edited(weight):
            ask(cache, [other])
    stats = known(cache)
    assert stats.n_drawn > 30 and stats.n_recomputed >= stats.n_drawn - 8 and stats.n_lost == 0


@pytest.mark.slow
def test_with_more_looks_than_can_wait_for_their_weights_none_is_lost(
    cache: LLMCache, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcache.audit.audit.MOST_WAITING", 10)
    monkeypatch.setattr("llmcache.audit.account._MOST_OPEN", 12)
    weight = model.bert.encoder.layer[0].output.dense.weight
    rungs = []
    for one in fresh(60):
        rungs += ask(cache, [one])
        with edited(weight):
            cache.drain()
    stats = known(cache)
    assert (rungs.count("semantic"), stats.n_waiting, stats.n_lost, stats.status) == (10, 10, 0, "certified")
    assert stats.n_recomputed == stats.n_drawn - 10 > 10  # those were computed in their calls


@pytest.mark.slow
def test_looks_that_nothing_follows_from_any_more_wait_no_longer(cache: LLMCache, model: nn.Module) -> None:
    ask(cache, fresh(40))
    with edited(model.bert.encoder.layer[0].output.dense.weight):
        cache.drain()
        assert known(cache).n_waiting > 10
        assert cache.calibrate(batched(requests(N)[0]), max_drop=0.3).chosen is not None
        cache.drain()
        assert known(cache).n_waiting == 0


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Within: in training mode, of a trunk without dropout."""
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
    try:
        yield
    finally:
        model.eval()


def test_a_model_in_training_mode_is_looked_into_afterwards(cache: LLMCache, model: nn.Module) -> None:
    n_hits = ask(cache, fresh(40)).count("semantic")
    with training(model):
        assert known_after(cache) == (n_hits, 0, 0, n_hits)
    assert cache.stats().errors == 0 and not cache.stats().health.is_failing  # nothing has failed
    assert known_after(cache) == (n_hits, n_hits, 0, 0)


def test_training_that_begins_while_it_looks_costs_no_verdict(
    cache: LLMCache, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_hits, run = ask(cache, fresh(20)).count("semantic"), Recomputer._run

    def train_first(self: Recomputer, look: Any, inputs: Any) -> Any:
        model.train()
        return run(self, look, inputs)

    monkeypatch.setattr(Recomputer, "_run", train_first)
    with training(model):
        assert known_after(cache) == (n_hits, 0, 0, n_hits)
    monkeypatch.undo()
    assert known_after(cache) == (n_hits, n_hits, 0, 0)


@pytest.mark.slow
def test_a_trunk_that_writes_its_frequencies_in_each_call_is_looked_into() -> None:
    """With what they were: that comes before layer 0, in the middle of the look."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    llm = build(lambda: tf.LlamaForSequenceClassification(llama(rope_parameters=rope)))
    settings = {**SETTINGS, "max_drop": 0.3, "audit_in_background": False}
    with LLMCache.wrap(llm, **settings) as cache:
        assert cache.calibrate(batched(requests(N)[0])).is_certified
        n_hits = ask(cache, fresh(40)).count("semantic")
        assert n_hits > 20
        assert known_after(cache) == (n_hits, n_hits, 0, 0)
        assert cache.stats().errors == 0


def test_looks_of_another_attention_wait_for_it(cache: LLMCache, model: nn.Module) -> None:
    """It is no part of the weights' digest, and answers may differ in the last bits."""
    n_hits = ask(cache, fresh(40)).count("semantic")
    model.set_attn_implementation("eager")
    try:
        assert known_after(cache) == (n_hits, 0, 0, n_hits)
    finally:
        model.set_attn_implementation("sdpa")
    assert known_after(cache) == (n_hits, n_hits, 0, 0)


def test_a_request_that_reads_as_another_one_counts_against_the_claim(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_hits = ask(cache, fresh(6)).count("semantic")
    compute = Recomputer._compute_again
    monkeypatch.setattr(
        Recomputer,
        "_compute_again",
        lambda self, looks: [replace(case, row=replace(case.row, key="other")) for case in compute(self, looks)],
    )
    cache.drain()
    assert 0 < n_hits == cache.stats().errors
    assert known(cache).n_lost + known(cache).n_alarms > 0


@pytest.mark.slow
def test_a_job_that_gave_way_settles_no_look_twice(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of looks that fail together each is computed by itself; some are done when a call comes."""
    n_hits = ask(cache, fresh(40)).count("semantic")
    audit, settled = inside.audit(cache), []
    run, settle, n_runs = Recomputer._run, AuditAccount.settle, 0

    def run_some(self: Recomputer, look: Any, inputs: Any) -> Any:
        nonlocal n_runs
        n_runs += 1
        if len(inputs["input_ids"]) > 1:
            raise RuntimeError("not together")
        if n_runs == 14:
            raise GaveWay
        return run(self, look, inputs)

    def settle_once(self: AuditAccount, sample: Any, is_changed: bool) -> bool:
        settled.append(sample.number)
        return settle(self, sample, is_changed)

    monkeypatch.setattr(Recomputer, "_run", run_some)
    monkeypatch.setattr(AuditAccount, "settle", settle_once)
    audit._recomputer.queue._tried.add(1)  # they are taken to come out alike together
    cache.drain()
    cache.drain()
    assert n_runs > 14 and len(settled) == len(set(settled)) == n_hits == known(cache).n_recomputed


def test_who_handles_a_log_record_may_ask_for_the_stats(cache: LLMCache, reading: Reading) -> None:
    seen: list[str] = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(known(cache).status)

    handler = Asking()
    logging.getLogger("llmcache").addHandler(handler)
    try:
        thread = threading.Thread(target=ring, args=(cache, reading), daemon=True)
        thread.start()
        thread.join(15)
        assert not thread.is_alive()  # it waits for nobody
    finally:
        logging.getLogger("llmcache").removeHandler(handler)
    assert "tightened" in seen


def test_a_head_edited_meanwhile_gives_no_verdict(cache: LLMCache, model: nn.Module) -> None:
    ask(cache, fresh(40))
    with edited(model.classifier.bias):
        cache.drain()
        stats = known(cache)
        assert (stats.n_recomputed, stats.n_alarms, stats.n_quarantined) == (0, 0, 0)


def test_purged_and_cleared_requests_are_not_looked_into(cache: LLMCache) -> None:
    ask(cache, fresh(40))
    cache.purge(namespace="other")
    assert known(cache).n_waiting > 10
    inside.banks(cache).quarantine("gone", "default")
    inside.banks(cache).quarantine("stays", "other")
    cache.purge(namespace="default")
    assert known(cache).n_waiting == 0
    cache.drain()  # jobs are left, with nothing to audit
    assert (known(cache).n_recomputed, len(inside.banks(cache))) == (0, 0)
    assert list(inside.banks(cache).quarantined) == ["stays"]
    cache.clear()
    assert not inside.banks(cache).quarantined


def test_unwrapping_drops_what_waits_and_ends_the_thread(cache: LLMCache) -> None:
    ask(cache, fresh(40))
    thread = inside.audit(cache).worker._thread
    cache.unwrap()
    assert thread is not None and not thread.is_alive()
    assert (cache.drain(), known(cache).n_recomputed) == (0, 0)


@pytest.mark.slow
def test_a_model_that_nobody_holds_leaves_with_its_thread(folder: Path) -> None:
    model = classifier()
    cache = keep_quiet(LLMCache.load(model, folder))
    ask(cache, fresh(40))
    thread, gone = inside.audit(cache).worker._thread, weakref.ref(model)
    del model, cache
    gc.collect()
    assert gone() is None
    assert thread is not None
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.slow
def test_threads_that_call_drain_and_ask_at_once_lose_nothing(cache: LLMCache) -> None:
    inside.audit(cache).worker._idle_s = 0.0
    start = threading.Barrier(4)

    def work(seed: int) -> int:
        start.wait()
        n_hits = 0
        for one in fresh(40, seed=seed):
            n_hits += ask(cache, [one]).count("semantic")
            if seed % 2:
                cache.drain()
            known(cache)
        return n_hits

    with ThreadPoolExecutor(4) as pool:
        n_hits = sum(pool.map(work, range(90, 94)))
    cache.drain()
    stats = known(cache)
    assert stats.n_drawn == stats.n_recomputed == n_hits > 60
    assert stats.n_requests == 160
    assert cache.stats().errors == 0
    assert inside.audit(cache).worker._n_calls == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"audit": -0.1}, "audit"),
        ({"audit": 1.5}, "audit"),
        ({"recalibrate": 0}, "recalibrate"),
        ({"recalibrate": 500, "audit": 0}, "audit=0"),
        ({"tau": 0.9, "audit": 0.1}, "tau is your own choice"),
        ({"tau": 0.9, "recalibrate": 500}, "tau is your own choice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(model: nn.Module, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMCache.wrap(model, **wrong)
