"""Decides whether searching for approximate hits pays, from measured times of searching and computing.

Calls are grouped by length. If searches cost more than their hits save, most calls of that length are no longer
searched; one in 64 still is, so that searching resumes once it pays. Exact repeats are always looked up, and every miss
is stored. On accelerators searching is never turned off: computing times are unknown without waiting for the device.
"""

import logging
import threading
from dataclasses import dataclass
from math import sqrt

from llmcache.reuse.call import Call
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

_LEAST = 512  # searched requests before searching may be turned off
_WINDOW = 4096  # requests; older ones fade
_SELDOM = 64  # one call in 64 is searched while searching does not pay
_SURE = 1.645  # standard deviations: a one-sided upper limit of 95 %


@dataclass(slots=True)
class _Length:
    """Sums over the calls of one length group; older calls fade."""

    n_rows: float = 0.0  # searched requests
    n_hits: float = 0.0
    search_s: float = 0.0
    n_computed: float = 0.0
    computing_s: float = 0.0
    n_skipped: int = 0  # consecutive calls without a search
    is_off: bool = False

    @property
    def search_ms(self) -> float:
        """Mean time of a search, in milliseconds per request."""
        return 1e3 * self.search_s / self.n_rows

    @property
    def computing_ms(self) -> float:
        """Mean time of computing, in milliseconds per request."""
        return 1e3 * self.computing_s / self.n_computed

    def pays(self) -> bool:
        """Whether the largest likely hit rate saves more time than searches take; True while data are too few."""
        if self.n_rows < _LEAST or self.n_computed < _LEAST / 8:
            return True
        share = (self.n_hits + 1) / (self.n_rows + 2)
        most = share + _SURE * sqrt(share * (1 - share) / self.n_rows)
        return most * self.computing_ms > self.search_ms


class Account:
    """Times of searching and computing of one wrapped model. Thread-safe."""

    def __init__(self) -> None:
        """Start without times: all calls are searched."""
        self._lengths: dict[int, _Length] = {}  # by `_length_of`
        self._made: object = None  # the calibration that the times belong to
        self._lock = forkable(threading.Lock())

    def pays(self, call: Call) -> bool:
        """Whether to search a call for approximate hits."""
        length = self._lengths.get(_length_of(call))
        if length is None or not length.is_off:
            return True
        with self._lock:
            length.n_skipped = (length.n_skipped + 1) % _SELDOM
            return length.n_skipped == 0

    def took(self, call: Call) -> None:
        """Add `search_s` and `computing_s` of a call that has ended."""
        if call.arguments["input_ids"].device.type != "cpu":
            return
        name = _length_of(call)
        with self._lock:
            if call.calibration is not None and call.calibration is not self._made:  # the times belong to other sources
                self._lengths, self._made = {}, call.calibration
            length = self._lengths.setdefault(name, _Length())
            if call.n_searched:
                length.n_rows += call.n_searched
                for hit in call.hits.values():
                    length.n_hits += hit.answer is not None and hit.source != ""
                length.search_s += call.search_s
            length.n_computed += len(call.computed)
            length.computing_s += call.computing_s
            if length.n_rows > _WINDOW or length.n_computed > _WINDOW:
                for field in ("n_rows", "n_hits", "search_s", "n_computed", "computing_s"):
                    setattr(length, field, getattr(length, field) / 2)
            has_turned = length.is_off is length.pays()
            length.is_off ^= has_turned
        if has_turned:
            self._log_switch(name, length)

    def _log_switch(self, name: int, length: _Length) -> None:
        what = "is searched for in 1 of 64 calls" if length.is_off else "is searched for in all calls again"
        logger.warning(
            "llmcache: approximate reuse %s of up to %d tokens: %.1f %% of %d requests hit, a search takes %.2f ms, "
            "computing %.2f ms (auto_bypass=False searches always)",
            what,
            1 << name,
            100 * length.n_hits / length.n_rows,
            length.n_rows,
            length.search_ms,
            length.computing_ms,
        )


def _length_of(call: Call) -> int:
    """Return the length group of a call: log2 of the tokens per row, padding included, rounded up."""
    return int(call.arguments["input_ids"].shape[1] - 1).bit_length()
