"""Calls and their cost: who is asked about, what is timed, and what stepping aside looks like from outside."""

import copy
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmcache import LLMCache
from llmcache.execution.cost import PATIENCE, PATIENCE_OF_TAU, CostModel, Times
from llmcache.execution.meter import Meter
from llmcache.request.call import Call, Inputs, Read
from llmcache.request.outcome import Outcome
from llmcache.request.rows import Row, Scope
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, padded, tokens

LENGTH = 6
SOON = PATIENCE // 8  # where repeats would be served although calls were bypassed
_MISS = Times(0.011, 0.0006, 0.0004)


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.n_waits = 0

    def __call__(self) -> float:
        return self.now

    def wait(self, device: torch.device) -> None:
        """What an accelerator was given takes a second."""
        self.n_waits += 1
        self.now += 1.0


def parts(**more: Any) -> Any:
    """What a meter looks at, of a cache without calibration."""
    nothing = {"cost": CostModel(4), "calibrated": None, "fingerprint": None, "is_collecting": False, "recorder": None}
    nothing["weights"] = SimpleNamespace(latest="")
    return SimpleNamespace(**{**nothing, **more})


def call_with(ids: Tensor, namespace: str = "default", mask: Tensor | None = None) -> Call:
    call = Call(Inputs({"input_ids": ids, "attention_mask": mask}, namespace))
    rows = [Row(i, "", b"", slice(0, LENGTH), LENGTH) for i in range(len(ids))]
    call.read = Read(rows, Scope(namespace, "", "", ""), torch.float32)
    return call


def repeats(*calls: Call) -> float:
    """Share of the requests of these calls that had come before."""
    served = parts()
    for call in calls:
        assert Meter(served).ask(call) is None
    (row,) = served.cost.rows()
    return float(row.repeats)


# -- what is asked about -----------------------------------------------------------------------------------------------


def test_requests_are_told_apart_by_tokens_and_namespace() -> None:
    one, other = tokens(1, LENGTH, seed=1), tokens(1, LENGTH, seed=2)
    assert repeats(call_with(one), call_with(one)) == 0.5
    assert repeats(call_with(one), call_with(other)) == 0.0
    assert repeats(call_with(one), call_with(one, "tenant")) == 0.0


def test_padding_makes_no_other_request() -> None:
    short, long = padded([4, 7]), padded([4, 5])
    calls = [call_with(inputs["input_ids"], mask=inputs["attention_mask"]) for inputs in (short, long)]
    assert repeats(*calls) == 0.25


def test_an_empty_call_is_not_asked_about() -> None:
    served = parts()
    call = call_with(torch.zeros((0, LENGTH), dtype=torch.int64))
    assert Meter(served).ask(call) is None
    assert not call.progress.is_metered
    assert served.cost.rows() == ()


class Learner:
    """Stands for what a cache learns with."""

    def __init__(self, is_learning: bool, serves: bool = False) -> None:
        self.is_learning = is_learning
        self._serves = serves

    def is_serving(self, weights: str) -> bool:
        return self._serves


@pytest.mark.parametrize(
    ("more", "is_asked", "is_pinned"),
    [
        ({"calibrated": Learner(True)}, False, False),
        ({"calibrated": Learner(False)}, True, True),
        ({"calibrated": Learner(False), "is_collecting": True}, False, True),
        ({"fingerprint": SimpleNamespace(n_fit=64)}, False, False),
        ({"fingerprint": SimpleNamespace(n_fit=0)}, True, True),
        ({"calibrated": Learner(False), "fingerprint": SimpleNamespace(n_fit=64)}, True, True),
    ],
)
def test_what_is_computed_to_be_learned_from_is_not_judged(
    more: dict[str, Any], is_asked: bool, is_pinned: bool
) -> None:
    served = parts(**more)
    served.cost.judge(LENGTH, 1, (7,))
    call = call_with(tokens(1, LENGTH))
    assert Meter(served).ask(call) is None
    assert call.progress.is_metered is is_asked
    assert bool(served.cost.rows()) is is_pinned


# -- what is timed -----------------------------------------------------------------------------------------------------


def serve(meter: Meter, clock: Clock, ids: Tensor) -> Call:
    """A miss that takes 5 s, 3 of them in the lookup and 0.5 in storing."""
    call = call_with(ids)
    if meter.ask(call) is None:
        clock.now += 4.5
        call.progress.lookup_s += 3.0
        started = meter.now(call)
        clock.now += 0.5
        ended = meter.now(call)
        call.progress.storing_s += ended - started
        meter.took(call, ended)
    return call


def test_on_the_host_every_call_is_timed_and_nothing_waited_for() -> None:
    served, clock = parts(), Clock()
    meter = Meter(served, clock, clock.wait)
    for seed in range(3):
        serve(meter, clock, tokens(1, LENGTH, seed))
    (row,) = served.cost.rows()
    assert (row.miss_ms, row.lookup_ms, row.storing_ms) == pytest.approx((5000, 3000, 500))
    assert row.layer_ms == pytest.approx(1500 / 4)
    assert clock.n_waits == 0


def test_on_an_accelerator_one_call_in_64_is_waited_for_at_its_ends_and_before_storing() -> None:
    """Tensors on `meta` can be neither read nor waited for, which an accelerator's need not be."""
    served, clock = parts(), Clock()
    meter = Meter(served, clock, clock.wait)
    ids = torch.zeros((1, LENGTH), dtype=torch.int64, device="meta")
    calls = [serve(meter, clock, ids) for _ in range(128)]
    assert [i for i, call in enumerate(calls, 1) if call.progress.started is not None] == [64, 128]
    assert clock.n_waits == 2 * 3
    (row,) = served.cost.rows()
    assert row.miss_ms == pytest.approx(7000)  # the two waits after it began are part of it
    assert row.storing_ms == pytest.approx(1500)
    assert (row.hit_rate, row.repeats) == (0.0, None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_calls_go_by_to_be_compared_only_where_they_can_be_timed(device: str) -> None:
    served, clock = parts(calibrated=Learner(False, serves=True)), Clock()
    meter = Meter(served, clock, clock.wait)
    ids = torch.zeros((1, LENGTH), dtype=torch.int64, device=device)
    reasons = [meter.ask(call_with(ids)) for _ in range(300)]
    assert reasons.count("compared") == (16 if device == "cpu" else 0)


# -- from outside ------------------------------------------------------------------------------------------------------


def asked(cache: LLMCache, n: int, first: int = 0) -> list[str | None]:
    """Ask requests that differ, one by one; why each bypassed the cache, or None."""
    reasons = []
    for number in range(first, first + n):
        cache(input_ids=request(number))
        reasons.append(cache.last[0].bypassed)
    return reasons


def request(number: int) -> Tensor:
    """One of 8,100 requests that all differ."""
    return torch.tensor([[5 + number // 90, 5 + number % 90, *range(10, 10 + LENGTH - 2)]])


def test_a_stream_without_repetition_goes_by_counted_and_bit_equal(caplog: pytest.LogCaptureFixture) -> None:
    model = build(CLASSIFIERS["bert"])
    plain = copy.deepcopy(model)
    cache = LLMCache.wrap(model)
    with caplog.at_level(logging.INFO, logger="llmcache"):
        assert asked(cache, SOON + 10) == [None] * SOON + ["not_worthwhile"] * 10
    stats = cache.stats()
    assert stats.bypassed == {"not_worthwhile": 10}
    assert (stats.n_requests, stats.n_misses, stats.n_stored) == (SOON + 10, SOON, SOON)
    with torch.inference_mode():
        served, computed = (which(input_ids=request(8000), output_attentions=False) for which in (model, plain))
    assert cache.last[0].bypassed == "not_worthwhile"
    assert torch.equal(served.logits, computed.logits)
    assert len(caplog.messages) == 2  # the turn with its figures, and the first bypass with its cure
    assert "auto_bypass=False" in caplog.messages[1]


def test_stats_tell_the_costs_in_plain_values() -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    asked(cache, 2)
    asked(cache, 1)
    (row,) = json.loads(json.dumps(cache.stats().to_dict(), allow_nan=False))["cost"]
    assert (row["tokens"], row["is_bypassed"]) == (4, False)
    assert row["hit_rate"] == row["repeats"] == pytest.approx(1 / 3)
    assert row["miss_ms"] == pytest.approx(row["lookup_ms"] + row["storing_ms"] + 4 * row["layer_ms"])
    assert row["hit_ms"] > 0


def test_stats_are_printed_a_figure_a_line() -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    asked(cache, 2)
    asked(cache, 1)
    lines = str(cache.stats()).split("\n")
    assert lines[0] == "n_requests: 3" and lines[-1] == "hit_rate: 0.3333"
    assert "hits: {'exact': 1}" in lines
    assert not any(line.startswith("n_blocks") for line in lines)


@pytest.mark.parametrize(
    ("settings", "patience"),
    [
        ({"auto_bypass": False}, None),
        ({"mode": "paper", "tau": 0.9}, None),
        ({"tau": 0.9}, PATIENCE_OF_TAU),
        ({}, PATIENCE),
    ],
)
def test_settings_say_whether_and_when_it_steps_aside(settings: dict[str, Any], patience: int | None) -> None:
    cost = LLMCache.wrap(build(CLASSIFIERS["bert"]), **settings)._components.cost
    if patience is None:
        assert cost is None
        return
    assert cost is not None
    for number in range(patience):
        assert cost.judge(LENGTH, 1, (number,)).is_worthwhile
        cost.took(LENGTH, 1, 0, None if number < patience - 32 else _MISS)
    assert not cost.judge(LENGTH, 1, ()).is_worthwhile


def test_without_stepping_aside_there_are_no_costs_to_tell() -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]), auto_bypass=False)
    assert set(asked(cache, PATIENCE + 10)) == {None}
    assert cache.stats().cost == ()


def test_clear_begins_anew_and_purge_forgets_who_asked() -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    asked(cache, PATIENCE)
    cache.purge(namespace="default")
    asked(cache, 10)
    (row,) = cache.stats().cost
    assert (row.is_bypassed, row.repeats) == (True, 0.0)
    cache.clear()
    assert asked(cache, 10) == [None] * 10


def test_requests_that_are_held_are_served_when_others_were_purged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while recording costs too much, so that most calls are bypassed without a further look."""
    monkeypatch.setattr("llmcache.execution.cost.CostModel._may_record", lambda cost, bucket: False)
    monkeypatch.setattr("llmcache.execution.length_costs.LengthCosts.serves", lambda bucket, share: share > 0)
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    assert asked(cache, PATIENCE + 1)[-1] == "not_worthwhile"
    cache.purge(namespace="nobody")
    asked(cache, SOON)
    assert cache.stats().hits == {"exact": SOON}


def test_calibrating_begins_anew() -> None:
    """What can be served afterwards has changed; `calibrate` refuses so few, but only once it has computed them."""
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    assert asked(cache, PATIENCE + 1)[-1] == "not_worthwhile"
    with pytest.raises(ValueError, match="requests"):
        cache.calibrate([{"input_ids": request(number)} for number in range(3)])
    assert asked(cache, 1) == [None]


def test_a_call_that_fails_is_not_told_of() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    broken = model.bert.encoder.layer[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache(input_ids=request(0))
    broken.remove()
    (row,) = cache.stats().cost
    assert row.hit_rate is None


def test_a_failing_cost_model_costs_the_call_its_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    monkeypatch.setattr(CostModel, "judge", lambda *_: 1 / 0)
    assert asked(cache, 1) == ["error"]
    assert cache.stats().errors == 1


class Machine(Clock):
    """A clock on which a layer takes 10 ms, lookup and storing 1 ms each, keeping a state 0.5 ms, and all else none."""

    def __init__(self, cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr("llmcache.execution.capture.perf_counter", self)
        monkeypatch.setattr("llmcache.execution.lookup.perf_counter", self)
        flow, banks = cache._flow, cache._components.banks
        flow._meter = Meter(cache._components, self)
        for layer in cache._components.trunk.layers:
            next(layer.children()).register_forward_pre_hook(lambda *_: self.spend(0.01))
        read, put, payload = flow._lookup._reader.read, banks.put, type(cache._components.payload)
        take = payload.take
        monkeypatch.setattr(payload, "take", lambda *args: (self.spend(0.0005), take(*args))[1])
        monkeypatch.setattr(flow._lookup._reader, "read", lambda *args: (self.spend(0.001), read(*args))[1])
        monkeypatch.setattr(banks, "put", lambda *args: (self.spend(0.001), put(*args))[1])

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_times_of_a_call_go_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    Machine(cache, monkeypatch)
    asked(cache, 2)
    asked(cache, 2)
    (row,) = cache.stats().cost
    assert (row.miss_ms, row.lookup_ms, row.storing_ms, row.layer_ms) == pytest.approx((42.5, 1, 1.5, 10))
    assert row.hit_ms == pytest.approx(1)
    assert row.worthwhile_from == pytest.approx(2.5 / 41.5)
    assert cache.stats().storing_ms == pytest.approx(3)


def test_it_returns_when_requests_come_again_and_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    Machine(cache, monkeypatch)
    assert asked(cache, 2 * PATIENCE)[-2] == "not_worthwhile"  # the last of these is a probe
    again = asked(cache, 2 * PATIENCE)
    back = again.index(None)
    assert back == 0  # it was stored, or noted
    assert set(again[back:]) == {None}
    hits = cache.stats().n_hits
    asked(cache, 2 * PATIENCE)
    assert cache.stats().n_hits >= hits + 2 * PATIENCE - back
    assert cache.stats().bypassed["not_worthwhile"] <= 2 * PATIENCE - SOON + back


class Doubling(TorchFunctionMode):
    """A mode of which nothing is known."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def in_training(model: nn.Module, ids: Tensor) -> None:
    model.train()
    model(input_ids=ids)
    model.eval()


def with_gradients(model: nn.Module, ids: Tensor) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        model(input_ids=ids.clone())


def watched(model: nn.Module, ids: Tensor) -> None:
    with Doubling():
        model(input_ids=ids)


def decoding(model: nn.Module, ids: Tensor) -> None:
    past = model.unwrapped(input_ids=ids, use_cache=True).past_key_values
    model(input_ids=ids, past_key_values=past, use_cache=True)


@pytest.mark.parametrize(
    ("reason", "call"),
    [("training", in_training), ("gradients", with_gradients), ("traced", watched), ("decode", decoding)],
)
def test_a_call_that_could_not_be_served_is_told_as_such_while_others_go_by(
    reason: str, call: Callable[[Any, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(GENERATORS["gpt2"])
    model.unwrapped = copy.deepcopy(model)
    cache = LLMCache.wrap(model)
    asked(cache, PATIENCE + 1)
    for bucket in cache._components.cost._buckets.values():
        bucket.recordable = 0.0  # noting takes too long
    cache._components.cost._n_free = 0
    let_pass, lets_pass = [], CostModel.lets_pass
    monkeypatch.setattr(CostModel, "lets_pass", lambda *args: let_pass.append(lets_pass(*args)) or let_pass[-1])
    with torch.inference_mode():
        for number in range(20):
            call(model, request(4000 + number))
    assert cache.stats().bypassed == {"not_worthwhile": 1, reason: 20}
    assert not let_pass
    asked(cache, 5, first=4100)
    assert True in let_pass and cache.stats().bypassed["not_worthwhile"] == 6


def test_a_call_that_goes_by_may_hold_another_one_and_may_fail() -> None:
    """One that is let pass has no frame of its own; a longer one within it is none of its steps."""
    model = build(CLASSIFIERS["bert"])
    plain = copy.deepcopy(model)
    cache = LLMCache.wrap(model)
    asked(cache, SOON + 1)
    for bucket in cache._components.cost._buckets.values():
        bucket.recordable = 0.0
    cache._components.cost._n_free = 0
    inner = {4000: request(0), 4001: torch.arange(5, 25)[None], 4002: torch.tensor([[10**6]])}
    due, outcomes = list[int](), list[Outcome]()

    def call_another(*_: Any) -> None:
        if due:
            model(input_ids=inner[due.pop()])
            outcomes.append(cache.last[0])

    model.bert.encoder.layer[1].register_forward_pre_hook(call_another)
    with torch.inference_mode():
        for number in inner:
            due.append(number)
            if number == 4002:
                with pytest.raises(IndexError):
                    model(input_ids=request(number))
            else:
                logits = model(input_ids=request(number)).logits
                assert torch.equal(logits, plain(input_ids=request(number)).logits)
            assert cache.last[0].bypassed == "not_worthwhile"
    assert [(one.rung, one.bypassed) for one in outcomes] == [("exact", None), (None, None)]


@pytest.mark.parametrize("ids", [torch.tensor(5), torch.ones(1, 8, dtype=torch.bfloat16), request(1).to_sparse()])
def test_what_a_model_cannot_read_it_refuses_itself_while_others_go_by(ids: Tensor) -> None:
    plain = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]))
    assert asked(cache, PATIENCE + 1)[-1] == "not_worthwhile"
    with torch.inference_mode():
        for _ in range(2):
            with pytest.raises(Exception) as own:
                plain(input_ids=ids)
            with pytest.raises(own.type) as ours:
                cache(input_ids=ids)
            assert str(ours.value) == str(own.value)


def test_prefills_are_judged_and_decode_steps_are_not() -> None:
    model = build(GENERATORS["gpt2"])
    cache = LLMCache.wrap(model)
    with torch.inference_mode():
        for number in range(PATIENCE + 3):
            model.generate(request(number), do_sample=False, max_new_tokens=2, pad_token_id=0)
    assert cache.stats().bypassed["not_worthwhile"] == 3
    assert [row.tokens for row in cache.stats().cost] == [4]
