"""Decides whether searching for approximate hits pays, from measured times of searching and computing.

Calls are grouped by length. If searches cost more than their hits save, most calls of that length are no longer
searched; one in 64 still is, so that searching resumes once it pays. Exact repeats are always looked up, and every miss
is stored. On accelerators searching is never turned off: computing times are unknown without waiting for the device.
"""

import logging
import threading

from llmcache.reuse.call import Call
from llmcache.support.break_even import LookUpTimes
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

_LEAST = 512  # searched requests before searching may be turned off
_WINDOW = 4096  # requests; older ones fade
_SELDOM = 64  # one call in 64 is searched while searching does not pay


class SearchCost:
    """Times of searching and computing of one wrapped model. Thread-safe."""

    def __init__(self) -> None:
        self._calibration: object = None  # the calibration that the times belong to
        self._lock = forkable(threading.Lock())
        self._restart()

    def _restart(self) -> None:
        self._times = LookUpTimes(_LEAST, _LEAST // 8, _WINDOW, _SELDOM)

    def pays(self, call: Call) -> bool:
        with self._lock:
            return self._times.pays(_length_of(call))

    def took(self, call: Call) -> None:
        """Add `search_s` and `computing_s` of a call that has ended."""
        if call.arguments["input_ids"].device.type != "cpu":
            return
        length = _length_of(call)
        with self._lock:
            if (
                call.calibration is not None and call.calibration is not self._calibration
            ):  # the times belong to other sources
                self._calibration = call.calibration
                self._restart()
            was_off = self._times.of(length).is_off
            if call.n_searched:
                n_hits = sum(hit.answer is not None and hit.source != "" for hit in call.hits.values())
                self._times.looked_up(length, call.search_s, call.n_searched, n_hits)
            if call.computed:
                self._times.computed(length, call.computing_s, len(call.computed))
            if (times := self._times.of(length)).is_off == was_off:
                return
        logger.warning(
            "llmcache: approximate reuse %s of up to %d tokens: %.1f %% of %d requests hit, a search takes %.2f ms, "
            "computing %.2f ms (auto_bypass=False searches always)",
            "is searched for in 1 of 64 calls" if times.is_off else "is searched for in all calls again",
            1 << length.bit_length(),
            100 * times.hit_rate.value,
            times.hit_rate.n,
            1e3 * times.look_up_s.value,
            1e3 * times.computing_s.value,
        )


def _length_of(call: Call) -> int:
    """Return the tokens per row of a call, padding included, less 1: a power of two then ends its group."""
    return int(call.arguments["input_ids"].shape[1]) - 1
