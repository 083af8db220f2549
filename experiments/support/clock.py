"""A clock for the work of a device.

A GPU runs asynchronously: the host's clock only shows when work was submitted. So on a GPU, CUDA events in the work's
stream take the time, from the end of earlier work to the end of the last work that a call submitted. The call's own
time on the host is included, since its last event is submitted when it returns. The host's clock is read as well. On a
CPU it is the only clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

EVENTS, HOST = "CUDA events", "perf_counter"

Made = TypeVar("Made")


class Spent(NamedTuple):
    ms: float  # by the clock of the device that ran it
    host_ms: float  # by the host's clock, until the device was done


@dataclass(frozen=True, slots=True)
class Mark:
    at: float  # host's clock when it was set, seconds
    event: Any  # in the device's stream; None on a CPU


class Clock:
    def __init__(self, device: Any, cuda: Any = torch.cuda) -> None:
        """Set up for a device; on a GPU, `cuda` makes events and synchronises."""
        self._device = torch.device(device)
        self._cuda = cuda if self._device.type == "cuda" else None

    @property
    def name(self) -> str:
        return HOST if self._cuda is None else EVENTS

    def wait(self) -> None:
        """Wait until the device has finished the submitted work."""
        if self._cuda is not None:
            self._cuda.synchronize(self._device)

    def mark(self) -> Mark:
        """Mark the end of the work submitted so far."""
        event = None
        if self._cuda is not None:
            event = self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(self._device))
        return Mark(perf_counter(), event)

    def ms(self, start: Mark, end: Mark) -> float:
        """Return the ms between two marks; waits until the device has reached the second."""
        if start.event is None:
            return (end.at - start.at) * 1e3
        end.event.synchronize()
        return float(start.event.elapsed_time(end.event))

    def time(self, call: Callable[[], Made]) -> tuple[Spent, Made]:
        """Return the time of a call on an otherwise idle device, and the call's result."""
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
