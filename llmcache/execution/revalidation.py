"""Checks of approximate reuses (policy `divergence`): a row is computed, and compared with what it would have got."""

import threading
from collections.abc import Sequence

from llmcache.banks.cache_banks import CacheBanks
from llmcache.counters import Counters
from llmcache.execution.old_call import Call, Reuse
from llmcache.request.rows import Row
from llmcache.threads import forkable

_MOST_DUE = 1024  # rows that were left out to be checked, and have not come back


class Revalidation:
    """Sets reuses aside, and compares them once their rows are computed. A failure is counted and costs the check."""

    def __init__(self, banks: CacheBanks, counters: Counters) -> None:
        """Remember whom to ask.

        Args:
            banks: Its policies choose what is checked, and are told how it came out.
            counters: Told of failures, and of rows that were checked.
        """
        self._banks = banks
        self._counters = counters
        self._due: dict[str, bool] = {}  # keys of those rows, the oldest first
        self._lock = forkable(threading.Lock())

    def select(self, call: Call, decided: Sequence[Reuse]) -> list[Reuse]:
        """Set aside what is to be checked: those rows are computed as if nothing had been found. Returns the others.

        A call that leaves such rows out computes none of them: whichever does checks them. What is found in a second
        namespace is not checked, since it would be computed in the first.
        """
        if call.inputs.may_leave_out and call.inputs.is_looked_up:
            return list(decided)
        withheld: set[int] = set()
        with self._counters.guard("choose what to check"):
            for reuse in decided:
                # A row that stands on another request's state would compute nothing to compare with.
                if reuse.row in call.plan.reused:
                    continue
                key = call.read.rows[reuse.row].key
                if not (self._is_noted(key) or self._banks.should_check(reuse.key, reuse.layer)):
                    continue
                withheld.add(reuse.row)
                if call.inputs.may_leave_out:
                    self._note(key)
                else:
                    call.plan.revalidated[reuse.row] = reuse
        return [reuse for reuse in decided if reuse.row not in withheld]

    def is_due(self, row: Row) -> bool:
        """Whether a row was left out so that it is checked."""
        return row.key in self._due

    def _note(self, key: str) -> None:
        with self._lock:
            self._due[key] = True
            if len(self._due) > _MOST_DUE:  # who asked has gone
                del self._due[next(iter(self._due))]

    def _is_noted(self, key: str) -> bool:
        """Whether a row was left out to be checked, which it is now."""
        with self._lock:
            return self._due.pop(key, False)

    def compare(self, call: Call) -> None:
        """Compare what such rows computed with what they would have got. They are not stored: a stored one is near.

        A row may be missing from what was captured, if that failed.
        """
        for number, reuse in call.plan.revalidated.items():
            fresh = call.progress.captured.pop(number, None)
            with self._counters.guard("check a reuse"):
                if fresh is not None:
                    self._banks.check(reuse.key, reuse.layer, fresh[reuse.layer]["hidden"], reuse.entry)
        self._counters.revalidated(len(call.plan.revalidated))
