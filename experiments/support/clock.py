"""A clock for what a device does.

A GPU works behind the host's back: the host's clock says when work was handed over. So there, time is taken by CUDA
events in the stream that the work goes through: from when the device is done with what came before, to when it is done
with the last that a call gave it. The call's own time on the host is within, since the last event is handed over when
the call returns. The host's clock is read beside it. On a CPU it is the only one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

EVENTS, HOST = "CUDA events", "perf_counter"

Made = TypeVar("Made")


class Spent(NamedTuple):
    ms: float  # by the clock of the device that it ran on
    host_ms: float  # by the host's, until the device was done


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the work of a device."""

    at: float  # when it was set, seconds of the host's clock
    event: Any  # in the device's stream; None on a CPU


class Clock:
    def __init__(self, device: Any, cuda: Any = torch.cuda) -> None:
        """`cuda` makes events and waits for the device, if it is a GPU."""
        self._device = torch.device(device)
        self._cuda = cuda if self._device.type == "cuda" else None

    @property
    def name(self) -> str:
        """What `Spent.ms` is taken by."""
        return HOST if self._cuda is None else EVENTS

    def wait(self) -> None:
        """Return once the device has done what it was given."""
        if self._cuda is not None:
            self._cuda.synchronize(self._device)

    def mark(self) -> Mark:
        """Mark what the device was given until now."""
        event = None
        if self._cuda is not None:
            event = self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(self._device))
        return Mark(perf_counter(), event)

    def ms(self, start: Mark, end: Mark) -> float:
        """Milliseconds from one mark to another; waits until the device has come to the second."""
        if start.event is None:
            return (end.at - start.at) * 1e3
        end.event.synchronize()
        return float(start.event.elapsed_time(end.event))

    def time(self, call: Callable[[], Made]) -> tuple[Spent, Made]:
        """What a call took, on a device that has nothing else to do, and what it returned."""
        self.wait()
        start = self.mark()
        made = call()
        end = self.mark()
        if start.event is None:
            ms = self.ms(start, end)
            return Spent(ms, ms), made
        self.wait()
        host_ms = (perf_counter() - start.at) * 1e3
        return Spent(self.ms(start, end), host_ms), made
