"""Counts requests, hits and times, and the failures of the cache itself.

After a failure the model computes, so no answer shows it. But missing evidence must not look like good evidence: while
many calls fail, nothing is reused approximately under a calibration (`calibration/calibrated_reuse.py`), and hits that
could not be audited count as changed (`audit/account.py`).
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from llmcache.errors import StoreError
from llmcache.request.bypass import CURES
from llmcache.request.outcome import Outcome
from llmcache.stats import Health, Stats
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

N_LATEST = 64  # calls or recomputations over which the share of failures is averaged; older ones fade
_AT_FIRST = 16  # successes assumed at the start, so that one early failure is less than a tenth
_FAILING = 0.1  # share of failures from which the cache is failing
_LOG_EVERY_S = 60.0  # failures of a store, which may occur in every call
_RECOVERED = 0.05  # share below which the cache works again: some 45 calls without failure, or 192 if all had failed
_WANTED = ("disabled", "other_encoder")  # bypasses that need no cure, or whose cure `wrap` has logged
_LOGGED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by model: reasons that any cache of it logged


class Counters:
    """The counters of one cache, updated as calls end. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = monotonic, model: Any = None) -> None:
        """Start at zero; `clock` returns monotonic seconds. Bypasses are logged once for a `model` and reason."""
        self._clock = clock
        self._store_logged_s = -_LOG_EVERY_S
        self._lock = forkable(threading.RLock())  # reentrant: a signal handler may call stats()
        self._hits, self._bypassed, self._failures = (Counter[str]() for _ in range(3))
        self._totals = Counter[str]()  # by the name of their field in `Stats`
        self._lookup_s = self._computing_s = self._storing_s = 0.0
        self._logged: set[str] = set() if model is None else _LOGGED.setdefault(model, set())
        self._calls, self._recomputes = Share(), Share()
        self._has_failed = False  # a failure since the last call ended
        self._n_turns = 0

    @property
    def is_failing(self) -> bool:
        """Whether so many of the latest calls failed in the cache that no bound can be relied on."""
        return self._calls.is_large

    def restart(self) -> None:
        """Reset the counts, except failures and health. Messages that are logged once are not logged again."""
        with self._lock:
            self._hits.clear()
            self._bypassed.clear()
            self._totals = Counter(errors=self._totals["errors"])
            self._lookup_s = self._computing_s = self._storing_s = 0.0

    def bypass(self, reason: str, n_rows: int) -> None:
        """Count bypassed rows, decode steps apart; log the first bypass of each reason with its cure."""
        with self._lock:
            if reason == "decode":  # a normal part of generation
                self._totals["n_decode_steps"] += n_rows
                return
            self._bypassed[reason] += n_rows
            self._totals["n_requests"] += n_rows
            is_first = reason not in self._logged
            self._logged.add(reason)
            has_turned = reason == "error" and self._end_call()
        if has_turned:
            self._log_turn()
        if is_first:
            level = logging.DEBUG if reason in _WANTED else logging.WARNING
            logger.log(level, "llmcache is bypassed (%s): %s", reason, CURES[reason])

    def error(self, what: str, error: Exception, is_of_call: bool = True) -> None:
        """Count a failure to do `what`, of the call under way or (not `is_of_call`) of background work.

        For each kind the first, the 10th, the 100th and so on are logged with a traceback. Failures of a store have
        their cause elsewhere: they share one line a minute, without a traceback.
        """
        kind = f"{what}: {type(error).__name__}"
        with self._lock:
            self._has_failed |= is_of_call
            self._totals["errors"] += 1
            self._failures[kind] += 1
            n, now, is_of_store = self._failures[kind], self._clock(), isinstance(error, StoreError)
            if is_due := is_of_store and now - self._store_logged_s >= _LOG_EVERY_S:
                self._store_logged_s = now
        if is_due:
            often = "" if n == 1 else f" ({n:,} times by now)"
            logger.warning("llmcache failed to %s%s: %s; computing instead", what, often, error)
        elif is_logged(n) and not is_of_store:
            often = "" if n == 1 else f" for the {n:,}th time"
            logger.warning("llmcache failed to %s%s; computing instead", what, often, exc_info=error)

    def guard(self, what: str) -> "Guard":
        """Return a context manager that counts and suppresses a failure to do `what` within it: the call goes on."""
        return Guard(self, what)

    def find_reason(self, what: str, step: Callable[..., str | None], *args: Any) -> str | None:
        """Return the bypass reason that `step(*args)` returns, or `error` if it raises."""
        with Guard(self, what):
            return step(*args)
        return "error"

    def look(self, error: Exception | None = None) -> None:
        """Count a recomputation by the audit that succeeded or failed; log failures as `error` does."""
        with self._lock:
            self._recomputes.add(error is not None)
        if error is not None:
            self.error("audit a hit", error, is_of_call=False)

    def _end_call(self) -> bool:
        """Count a call as failed or not; return whether `is_failing` changed."""
        has_failed, self._has_failed = self._has_failed, False
        has_turned = self._calls.add(has_failed)
        self._n_turns += has_turned and self._calls.is_large
        return has_turned

    def _log_turn(self) -> None:
        """Log a change of `is_failing`, at the first, the 10th, the 100th time and so on."""
        if not is_logged(self._n_turns):
            return
        with self._lock:
            health = self._health()
        if self._calls.is_large:
            logger.warning("llmcache: the cache is %s; nothing is reused under a calibration meanwhile", health)
        else:
            logger.warning("llmcache: calls no longer fail in the cache; approximate reuse resumes")

    def _health(self) -> Health:
        is_failing = self._calls.is_large or self._recomputes.is_large
        return Health(is_failing, self._calls.value, self._recomputes.value, dict(self._failures))

    def too_large(self, n: int) -> None:
        """Count `n` requests, 1 or more, that do not fit; log the first."""
        with self._lock:
            is_first = not self._totals["n_too_large"]
            self._totals["n_too_large"] += n
        if is_first:
            logger.warning("llmcache: a request is larger than its budget and was not stored; raise max_bytes")

    def done(
        self,
        outcomes: Sequence[Outcome],
        depth: int,
        lookup_s: float,
        computing_s: float,
        storing_s: float,
        n_prompt_tokens: int = 0,
        n_computed_tokens: int = 0,
    ) -> None:
        """Count the rows' outcomes and the seconds of a call that was not bypassed.

        A hit skips `depth` layers. The tokens are those of a call that keeps K/V.
        """
        with self._lock:
            for outcome in outcomes:
                if outcome.bypassed is not None:
                    self._bypassed[outcome.bypassed] += 1
                elif outcome.rung is None:
                    self._totals["n_misses"] += 1
                else:
                    self._hits[outcome.rung] += 1
                    self._totals["n_layers_skipped"] += 0 if outcome.n_prefix else depth
                    self._totals["n_prefix_tokens"] += outcome.n_prefix
            self._totals["n_prompt_tokens"] += n_prompt_tokens
            self._totals["n_computed_tokens"] += n_computed_tokens
            self._totals["n_requests"] += len(outcomes)
            self._lookup_s += lookup_s
            self._computing_s += computing_s
            self._storing_s += storing_s
            has_turned = self._end_call()
        if has_turned:
            self._log_turn()
        for outcome in outcomes:
            if outcome.bypassed is not None and outcome.bypassed not in self._logged:
                self.bypass(outcome.bypassed, 0)

    def snapshot(self, **held: Any) -> Stats:
        """Return the counts, joined with other fields of `Stats`."""
        with self._lock:
            return Stats(
                hits=dict(+self._hits),
                bypassed=dict(+self._bypassed),
                lookup_ms=self._lookup_s * 1e3,
                computing_ms=self._computing_s * 1e3,
                storing_ms=self._storing_s * 1e3,
                health=self._health(),
                **{**self._totals, **held},
            )


class Guard:
    """Counts an `Exception` within its block and suppresses it; `has_failed` says whether there was one."""

    __slots__ = ("_counters", "_what", "has_failed")

    def __init__(self, counters: Counters, what: str) -> None:
        self._counters, self._what, self.has_failed = counters, what, False

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.has_failed = True
        self._counters.error(self._what, error)
        return True


class Share:
    """A moving share of failures, and whether it is too large. The caller holds a lock."""

    def __init__(self) -> None:
        self.value, self.is_large, self._n = 0.0, False, _AT_FIRST

    def add(self, has_failed: bool) -> bool:
        """Add a success or failure; return whether `is_large` changed."""
        self._n = min(self._n + 1, N_LATEST)
        self.value += (has_failed - self.value) / self._n
        was_large = self.is_large
        self.is_large = self.value >= (_RECOVERED if was_large else _FAILING)
        return self.is_large is not was_large


def is_logged(n: int) -> bool:
    """Whether the `n`-th failure is logged: the first, the 10th, the 100th and so on."""
    return str(n).rstrip("0") == "1"
