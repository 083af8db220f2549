"""The figures of the ways that were tried, and which of them to use."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

MARGIN = 1.05  # a way is recommended if it is at least that many times as fast as every simpler one
_MOST_NOISE = 1.25  # ratio of two passes of the model alone, above which only large differences decide


@dataclass(frozen=True, slots=True)
class Way:
    """A way to answer, and its figures over the served requests.

    Attributes:
        name: What answers.
        code: The line to copy.
        mean_ms: Time of a request, in a whole pass, until the audit's queue is empty; None: it was not tried.
        p50_ms: Median time of a call, divided by its requests.
        p99_ms: The same, 99th percentile; None: there were fewer than 200 calls.
        changed: Share of answers that differ from the model's own, 0 to 1.
        bound: Upper bound of that share at a confidence of 1 - `delta`, of the calibration, or else of the replay; 0
            where answers are the model's own and none differed; None: it has none.
        hit_rate: Share of requests that were not computed in full, 0 to 1.
        nbytes: Bytes of all copies of the weights, and of the cache at the end.
        learning_s: Seconds of computing and calibrating on the first half.
        problem: Why it was not tried, reuses nothing, or has no bound; "" if none of these.
        n_rows: Requests of a call.
    """

    name: str
    code: str
    mean_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    changed: float = 0.0
    bound: float | None = None
    hit_rate: float = 0.0
    nbytes: int = 0
    learning_s: float = 0.0
    problem: str = ""
    n_rows: int = 1


@dataclass(frozen=True, slots=True)
class Advice:
    """All ways that were tried, from the simplest on, and which to use. `str` makes a table of it.

    Attributes:
        ways: The first one is the model alone.
        max_drop: Largest share of answers that may change, of the recommendation.
        n_learned: Requests learned from; 0 for a decoder.
        n_served: N.
        margin: A way counts as faster than a simpler one if it is at least that many times as fast: 1.05, or the ratio
            of two passes of the model alone.
        is_partial: The replay was interrupted, so ways are missing.
    """

    ways: tuple[Way, ...]
    max_drop: float
    n_learned: int
    n_served: int
    margin: float = MARGIN
    is_partial: bool = False

    @property
    def best(self) -> Way:
        """The simplest way, one request a call, that no other one within `max_drop` beats by `margin`.

        A way is within it if its bound is, and the share that was seen.
        """
        return self._fastest([way for way in self.ways if way.n_rows == 1])

    def _fastest(self, ways: Sequence[Way]) -> Way:
        within = [(way, way.mean_ms) for way in ways if way.mean_ms and self._is_within(way)]
        least = min(ms for _, ms in within)
        return next(way for way, ms in within if ms <= self.margin * least)

    def _is_within(self, way: Way) -> bool:
        return way.bound is not None and max(way.bound, way.changed) <= self.max_drop

    @property
    def recommendation(self) -> str:
        """What to use, in a sentence, and the line to copy; "" while ways are missing."""
        best, alone = self.best, self.ways[0]
        if self.is_partial:
            return ""
        if self.margin > _MOST_NOISE and (self._speedup(best) or 1) < 2 * self.margin:
            return (
                f"No recommendation: two passes of {alone.name} differ by {self.margin - 1:.0%}. Let nothing else run, "
                "or serve more requests (seconds)."
            )
        if best is alone:
            return (
                f"Do not use llmcache here: nothing that was tried is {self.margin - 1:.0%} faster and shown to change "
                f"at most {self.max_drop:.1%} of the answers.{self._beyond}{self._in_batches}"
            )
        told = f"Use {best.name}"
        others = self._fastest([way for way in self.ways if way.n_rows == 1 and not _is_ours(way)])
        times = f"{self._speedup(best):.1f} times as fast as {alone.name}"
        if not _is_ours(best):
            told += " without llmcache"
        elif others is not alone and others.mean_ms and best.mean_ms:
            times += f", {others.mean_ms / best.mean_ms:.1f} times as fast as {others.name}"
        changes = f", at most {best.bound:.2%} of answers changed" if best.bound else ""
        imports = "from llmcache import LLMCache\n    " if _is_ours(best) else ""
        return f"{told}: {times}{changes}.{self._beyond}{self._in_batches}\n\n    {imports}{best.code}"

    @property
    def _beyond(self) -> str:
        """The fastest way that may change more answers than `max_drop`, if it is faster than the best one."""
        bounded = [way for way in self.ways if way.n_rows == 1 and way.bound is not None and way.changed <= way.bound]
        ways = [way for way in bounded if not self._is_within(way)]
        fastest = min(ways, key=lambda way: way.mean_ms or inf, default=None)
        if fastest is None or self.margin * (fastest.mean_ms or inf) > (self.best.mean_ms or 0):
            return ""
        times = f"{self._speedup(fastest):.1f} times as fast as {self.ways[0].name}"
        return f" With a larger max_drop, {fastest.name}: {times}, at most {fastest.bound:.2%} of answers changed."

    @property
    def _in_batches(self) -> str:
        """What to use for several requests a call, if it was tried."""
        ways = [way for way in self.ways if way.n_rows > 1 and self._is_within(way)]
        best = min(ways, key=lambda way: way.mean_ms or inf, default=None)
        if best is None or not ways[0].mean_ms or not best.mean_ms or best is ways[0]:
            return ""
        times = f"{ways[0].mean_ms / best.mean_ms:.1f} times as fast as {ways[0].name}"
        return f" Of several requests a call, {best.name}: {times}."

    def __str__(self) -> str:
        rows = [self._cells(way) for way in self.ways]
        table = [[*rows[0]], *([*row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for name, *figures in table:
            cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
        notes = [f"{way.name}: {way.problem}" for way in self.ways if way.problem]
        part = "; interrupted, so ways are missing" if self.is_partial else ""
        learned = f"{self.n_learned:,} requests learned from, " if self.n_learned else ""
        head = f"{learned}{self.n_served:,} served by each way{part}"
        parts = (head, "\n".join(lines), "\n".join(notes), self.recommendation)
        return "\n\n".join(part for part in parts if part)

    def _cells(self, way: Way) -> dict[str, str]:
        speedup = self._speedup(way)
        numbers = {f"{name} ms": getattr(way, f"{name}_ms") for name in ("mean", "p50", "p99")}
        is_tried = way.mean_ms is not None
        return {
            "way": way.name,
            **{name: "" if value is None else f"{value:.2f}" for name, value in numbers.items()},
            "times as fast": "" if speedup is None else f"{speedup:.2f}",
            "changed": f"{way.changed:.2%}" if is_tried else "",
            "at most": "" if way.bound is None else f"{way.bound:.2%}",
            "hits": f"{way.hit_rate:.1%}" if is_tried else "",
            "MB": f"{way.nbytes / 1e6:.0f}" if is_tried else "",
            "learning s": f"{way.learning_s:.0f}" if way.learning_s else "",
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the recommendation and the `speedup` of each way that was tried."""
        ways = [{**asdict(way), "speedup": self._speedup(way)} for way in self.ways]
        return {**asdict(self), "ways": ways, "best": self.best.name, "recommendation": self.recommendation}

    def _speedup(self, way: Way) -> float | None:
        """Return how many times as fast as the model alone a way is."""
        alone = self.ways[0].mean_ms
        return alone / way.mean_ms if alone and way.mean_ms else None


def _is_ours(way: Way) -> bool:
    return way.name.startswith("llmcache")
