"""Whether the cache itself works: which share of the latest calls and looks failed in it, and what failed.

A failure is computed around, so nobody sees it in an answer. But a cache that fails does not know what it would have
known, and that must not pass for good news: while many calls fail, nothing is reused approximately under a calibration
(`trust.py`); hits that could not be looked into count as changed (`audit/auditor.py`).
"""

from collections import Counter
from dataclasses import dataclass, field

N_LATEST = 64  # calls, or looks, over which the share of failed ones is averaged; older ones fade
_AT_FIRST = 16  # successes that it begins with: one failure among the first calls is no tenth of them
_FAILING = 0.1  # share of failed ones from which it is failing
_RECOVERED = 0.05  # share below which it works again: after some 45 calls without failure, or 192 if all had failed


@dataclass(frozen=True, slots=True)
class Health:
    """How the cache stands.

    Attributes:
        is_failing: A tenth of the latest calls or looks failed, and the share has not fallen to half of that since.
        failed_calls: Share of the latest calls in which something of the cache failed and was computed around: reading,
            lookup, draw or storing; 0 to 1, over some 64 calls.
        failed_looks: Share of the latest looks of the audit that failed, over some 64 looks.
        failures: Failures since wrapping, by what failed and the kind of error.
    """

    is_failing: bool = False
    failed_calls: float = 0.0
    failed_looks: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """`good`, or `failing` with the shares and what failed most often."""
        if not self.is_failing:
            return "good"
        often = ", ".join(f"{what} ({n})" for what, n in Counter(self.failures).most_common(3))
        return f"failing: {self.failed_calls:.0%} of calls, {self.failed_looks:.0%} of looks; since wrapping: {often}"


class Share:
    """A share of failed ones that fades, and whether it is too large. The caller holds a lock."""

    def __init__(self) -> None:
        """Begin with none that failed."""
        self.value: float = 0.0
        self.is_large: bool = False
        self._n = _AT_FIRST

    def add(self, has_failed: bool) -> bool:
        """Take in one; whether `is_large` has turned."""
        self._n = min(self._n + 1, N_LATEST)
        self.value += (has_failed - self.value) / self._n
        was_large = self.is_large
        self.is_large = self.value >= (_RECOVERED if was_large else _FAILING)
        return self.is_large is not was_large


def is_told(n: int) -> bool:
    """Whether the `n`-th failure of a kind is logged: the first, the 10th, the 100th and so on."""
    return str(n).rstrip("0") == "1"
