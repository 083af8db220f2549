"""Calls and their cost: who is asked about, what is timed, and what stepping aside looks like from outside."""

import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmcache.execution.cost import PATIENCE, PATIENCE_OF_TAU, CostModel
from llmcache.execution.length_costs import Times
from llmcache.execution.meter import Meter
from llmcache.execution.old_call import Call, Inputs, Read
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmcache import LLMCache
from llmcache.request.outcome import Outcome
from llmcache.request.rows import Row, Scope
from tests import inside
from tests.execution.calls import ask, pair, request, run, wrapped
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, padded, tokens

LENGTH = 6
SOON = PATIENCE // 8  # where repeats would be served although calls were bypassed
LITTLE = 64  # patience of tests that would take long with what is usual
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


def test_requests_are_told_apart_by_tokens_and_namespace_and_not_by_padding() -> None:
    one, other = tokens(1, LENGTH, seed=1), tokens(1, LENGTH, seed=2)
    assert repeats(call_with(one), call_with(one)) == 0.5
    assert repeats(call_with(one), call_with(other)) == 0.0
    assert repeats(call_with(one), call_with(one, "tenant")) == 0.0
    short, long = padded([4, 7]), padded([4, 5])
    assert repeats(*(call_with(both["input_ids"], mask=both["attention_mask"]) for both in (short, long))) == 0.25


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


@pytest.fixture
def cache() -> LLMCache:
    return wrapped(CLASSIFIERS["bert"])


def impatient(cache: LLMCache) -> CostModel:
    """Have a cache bypass itself sooner than is usual."""
    cost = CostModel(4, LITTLE)
    inside.replace(cache, cost=cost)
    return cost


def record_no_more(cost: CostModel) -> None:
    """As where that has been seen to take too long."""
    cost._n_free = 0
    for bucket in cost._buckets.values():
        bucket.recordable = 0.0


def test_a_stream_without_repetition_goes_by_counted_and_bit_equal(caplog: pytest.LogCaptureFixture) -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    with caplog.at_level(logging.INFO, logger="llmcache"):
        assert ask(cache, range(SOON + 10)) == [None] * SOON + ["not_worthwhile"] * 10
    stats = cache.stats()
    assert stats.bypassed == {"not_worthwhile": 10}
    assert (stats.n_requests, stats.n_misses, stats.n_stored) == (SOON + 10, SOON, SOON)
    served, computed = (run(model, input_ids=request(8000), output_attentions=False) for model in (cache.model, alone))
    assert cache.last[0].bypassed == "not_worthwhile"
    assert torch.equal(served, computed)
    assert len(caplog.messages) == 2  # the turn with its figures, and the first bypass with its cure
    assert "auto_bypass=False" in caplog.messages[1]


def test_stats_tell_the_costs_in_plain_values_and_print_a_figure_a_line(cache: LLMCache) -> None:
    ask(cache, [0, 1, 0])
    (row,) = json.loads(json.dumps(cache.stats().to_dict(), allow_nan=False))["cost"]
    assert (row["tokens"], row["is_bypassed"]) == (4, False)
    assert row["hit_rate"] == row["repeats"] == pytest.approx(1 / 3)
    assert row["miss_ms"] == pytest.approx(row["lookup_ms"] + row["storing_ms"] + 4 * row["layer_ms"])
    assert row["hit_ms"] > 0
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
    cost = inside.cost(wrapped(CLASSIFIERS["bert"], **settings))
    if patience is None:
        assert cost is None
        return
    assert cost is not None
    for number in range(patience):
        assert cost.judge(LENGTH, 1, (number,)).is_worthwhile
        cost.took(LENGTH, 1, 0, None if number < patience - 32 else _MISS)
    assert not cost.judge(LENGTH, 1, ()).is_worthwhile


def test_without_stepping_aside_there_are_no_costs_to_tell() -> None:
    cache = wrapped(CLASSIFIERS["bert"], auto_bypass=False)
    assert set(ask(cache, range(SOON + 10))) == {None}
    assert cache.stats().cost == ()


def test_clear_begins_anew_and_purge_forgets_who_asked(cache: LLMCache) -> None:
    ask(cache, range(SOON))
    cache.purge(namespace="default")
    ask(cache, range(10))
    (row,) = cache.stats().cost
    assert (row.is_bypassed, row.repeats) == (True, 0.0)
    cache.clear()
    assert ask(cache, range(10)) == [None] * 10


def test_requests_that_are_held_are_served_when_others_were_purged(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while recording costs too much, so that most calls are bypassed without a further look."""
    monkeypatch.setattr("llmcache.execution.cost.CostModel._may_record", lambda cost, bucket: False)
    monkeypatch.setattr("llmcache.execution.length_costs.LengthCosts.serves", lambda bucket, share: share > 0)
    assert ask(cache, range(SOON + 1))[-1] == "not_worthwhile"
    cache.purge(namespace="nobody")
    assert ask(cache, range(SOON)) == ["exact"] * SOON


def test_calibrating_begins_anew(cache: LLMCache) -> None:
    """What can be served afterwards has changed; `calibrate` refuses so few, but only once it has computed them."""
    assert ask(cache, range(SOON + 1))[-1] == "not_worthwhile"
    with pytest.raises(ValueError, match="requests"):
        cache.calibrate([{"input_ids": request(number)} for number in range(3)])
    assert ask(cache, [5000]) == [None]


def test_a_call_that_fails_is_not_told_of(cache: LLMCache) -> None:
    broken = cache.model.bert.encoder.layer[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(cache, [0])
    broken.remove()
    (row,) = cache.stats().cost
    assert row.hit_rate is None


def test_a_failing_cost_model_costs_the_call_its_cache_only(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "judge", lambda *_: 1 / 0)
    assert ask(cache, [0]) == ["error"]
    assert cache.stats().errors == 1


class Machine(Clock):
    """A clock on which a layer takes 10 ms, lookup and storing 1 ms each, keeping a state 0.5 ms, and all else none."""

    def __init__(self, cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr("llmcache.execution.capture.perf_counter", self)
        monkeypatch.setattr("llmcache.execution.lookup.perf_counter", self)
        flow = cache._flow
        flow._meter = Meter(inside.components(cache), self)
        for layer in inside.trunk(cache).layers:
            next(layer.children()).register_forward_pre_hook(lambda *_: self.spend(0.01))
        for owner, name, seconds in (
            (type(inside.payload(cache)), "take", 0.0005),
            (flow._lookup._reader, "read", 0.001),
            (inside.banks(cache), "put", 0.001),
        ):
            monkeypatch.setattr(owner, name, self.slowed(getattr(owner, name), seconds))

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def slowed(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        return lambda *args: (self.spend(seconds), function(*args))[1]


def test_times_of_a_call_go_where_they_belong(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(cache, monkeypatch)
    ask(cache, [0, 1, 0, 1])
    (row,) = cache.stats().cost
    assert (row.miss_ms, row.lookup_ms, row.storing_ms, row.layer_ms) == pytest.approx((42.5, 1, 1.5, 10))
    assert row.hit_ms == pytest.approx(1)
    assert row.worthwhile_from == pytest.approx(2.5 / 41.5)
    assert cache.stats().storing_ms == pytest.approx(3)


@pytest.mark.slow
def test_it_returns_when_requests_come_again_and_serves_them(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(cache)
    Machine(cache, monkeypatch)
    n = 2 * LITTLE
    assert ask(cache, range(n))[-2] == "not_worthwhile"  # the last of these is a probe
    again = ask(cache, range(n))
    assert again[0] == "exact"  # it was stored, or noted
    assert "not_worthwhile" not in again
    assert ask(cache, range(n)) == ["exact"] * n
    assert cache.stats().bypassed["not_worthwhile"] <= n - LITTLE // 8


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
    past = build(GENERATORS["gpt2"])(input_ids=ids, use_cache=True).past_key_values
    model(input_ids=ids, past_key_values=past, use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "call"),
    [("training", in_training), ("gradients", with_gradients), ("traced", watched), ("decode", decoding)],
)
def test_a_call_that_could_not_be_served_is_told_as_such_while_others_go_by(
    reason: str, call: Callable[[nn.Module, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = wrapped(GENERATORS["gpt2"])
    cost = impatient(cache)
    assert ask(cache, range(LITTLE + 1))[-1] == "not_worthwhile"
    record_no_more(cost)
    let_pass, lets_pass = [], CostModel.lets_pass
    monkeypatch.setattr(CostModel, "lets_pass", lambda *args: let_pass.append(lets_pass(*args)) or let_pass[-1])
    with torch.inference_mode():
        for number in range(20):
            call(cache.model, request(4000 + number))
    assert cache.stats().bypassed == {"not_worthwhile": 1, reason: 20}
    assert not let_pass
    ask(cache, range(4100, 4105))
    assert True in let_pass and cache.stats().bypassed["not_worthwhile"] == 6


def test_a_call_that_goes_by_may_hold_another_one_and_may_fail() -> None:
    """One that is let pass has no frame of its own; a longer one within it is none of its steps."""
    cache, alone = pair(CLASSIFIERS["bert"])
    ask(cache, range(SOON + 1))
    record_no_more(inside.components(cache).cost)
    inner = {4000: request(0), 4001: torch.arange(5, 25)[None], 4002: torch.tensor([[10**6]])}
    due, outcomes = list[int](), list[Outcome]()

    def call_another(*_: Any) -> None:
        if due:
            cache(input_ids=inner[due.pop()])
            outcomes.append(cache.last[0])

    cache.model.bert.encoder.layer[1].register_forward_pre_hook(call_another)
    for number in inner:
        due.append(number)
        if number == 4002:
            with pytest.raises(IndexError):
                cache(input_ids=request(number))
        else:
            assert torch.equal(cache(input_ids=request(number)).logits, run(alone, input_ids=request(number)))
        assert cache.last[0].bypassed == "not_worthwhile"
    assert [(one.rung, one.bypassed) for one in outcomes] == [("exact", None), (None, None)]


@pytest.mark.parametrize("ids", [torch.tensor(5), torch.ones(1, 8, dtype=torch.bfloat16), request(1).to_sparse()])
def test_what_a_model_cannot_read_it_refuses_itself_while_others_go_by(ids: Tensor) -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    assert ask(cache, range(SOON + 1))[-1] == "not_worthwhile"
    for _ in range(2):
        with pytest.raises(Exception) as own:
            run(alone, input_ids=ids)
        with pytest.raises(own.type) as ours:
            cache(input_ids=ids)
        assert str(ours.value) == str(own.value)


@pytest.mark.slow
def test_prefills_are_judged_and_decode_steps_are_not() -> None:
    cache = wrapped(GENERATORS["gpt2"])
    impatient(cache)
    for number in range(LITTLE + 3):
        cache.model.generate(request(number), do_sample=False, max_new_tokens=2, pad_token_id=0)
    assert cache.stats().bypassed["not_worthwhile"] == 3
    assert [row.tokens for row in cache.stats().cost] == [4]
