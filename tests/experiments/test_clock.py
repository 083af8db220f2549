"""Timing by GPU events, on a fake device that runs behind the host."""

from types import SimpleNamespace
from typing import Any

import pytest

from experiments.support import clock as clocks
from experiments.support.clock import EVENTS, Clock


class Machine:
    """A fake host and GPU. To launch work takes the host 1 ms; the work takes the GPU `ms`, an event no time."""

    def __init__(self) -> None:
        self.host_ms = self.done_ms = 0.0
        self.n_waits = 0
        self.current_stream = lambda device: "the stream"

    def work(self, ms: float) -> str:
        self.host_ms += 1.0
        self.done_ms = max(self.done_ms, self.host_ms) + ms
        return "made"

    def synchronize(self, device: Any) -> None:
        self.n_waits += 1
        self.host_ms = max(self.host_ms, self.done_ms)

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace()

        def record(stream: str) -> None:
            assert stream == "the stream"
            event.at = self.done_ms = max(self.done_ms, self.host_ms)

        event.record = record
        event.synchronize = lambda: self.synchronize(None)
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clocks, "perf_counter", lambda: machine.host_ms / 1e3)
    return machine


def test_a_call_takes_until_the_device_is_done(machine: Machine) -> None:
    clock = Clock("cuda", machine)
    machine.work(100.0)  # of another call: not counted
    spent, made = clock.time(lambda: machine.work(30.0))
    assert clock.name == EVENTS and made == "made"
    assert spent == pytest.approx((31.0, 31.0))
    spent, _ = clock.time(lambda: setattr(machine, "host_ms", machine.host_ms + 5.0))
    assert spent == pytest.approx((5.0, 5.0))  # host-only work counts too
