"""What was found: a table of ways, and the one to use."""

from dataclasses import asdict, dataclass
from typing import Any

_MARGIN = 1.05  # a way is recommended if it is that many times as fast as every simpler one


@dataclass(frozen=True, slots=True)
class Way:
    """A way to answer, and its figures over the served requests.

    Attributes:
        name: What answers.
        code: The line to copy.
        mean_ms: Time of a request, in a whole pass, until the audit's queue is empty; None: it was not tried.
        p50_ms: Median time of a call, divided by its requests.
        p99_ms: The same, 99th percentile.
        changed: Share of answers that differ from the model's own, 0 to 1.
        bound: Upper bound of that share at a confidence of 1 - `delta`; 0 where answers are the model's own.
        hit_rate: Share of requests that were not computed in full, 0 to 1.
        nbytes: Bytes of all copies of the weights, and of the cache at the end.
        learning_s: Seconds of computing and calibrating on the first half.
        problem: Why it was not tried, or reuses nothing; "" if neither.
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


@dataclass(frozen=True, slots=True)
class Advice:
    """All ways that were tried, from the simplest on, and which to use. `str` makes a table of it.

    Attributes:
        ways: The first one is the model alone.
        max_drop: Largest share of answers that may change, of the recommendation.
        n_learned: Requests learned from.
        n_served: N.
        is_partial: The replay was interrupted, so ways are missing.
    """

    ways: tuple[Way, ...]
    max_drop: float
    n_learned: int
    n_served: int
    is_partial: bool = False

    @property
    def best(self) -> Way:
        """The simplest way that no other one within `max_drop` beats by more than a twentieth."""
        tried = [way for way in self.ways if way.mean_ms and way.bound is not None and way.bound <= self.max_drop]
        fastest = min(way.mean_ms for way in tried if way.mean_ms)
        return next(way for way in tried if way.mean_ms and way.mean_ms <= _MARGIN * fastest)

    @property
    def recommendation(self) -> str:
        """What to use, in a sentence, and the line to copy."""
        best, alone = self.best, self.ways[0]
        if best is alone:
            return f"Do not use llmcache here: nothing else keeps within {self.max_drop:.1%} and is 5 % faster."
        times = f"{self._speedup(best):.1f} times as fast as {alone.name}"
        changes = f", at most {best.bound:.2%} of answers changed" if best.bound else ""
        without = "" if best.name.startswith("llmcache") else " without llmcache"
        return f"Use {best.name}{without}: {times}{changes}.\n\n    {best.code}"

    def __str__(self) -> str:
        rows = [self._cells(way) for way in self.ways]
        widths = [max(len(row[name]) for row in (*rows, dict(zip(rows[0], rows[0], strict=True)))) for name in rows[0]]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in ([*rows[0]], *([*row.values()] for row in rows))
        ]
        notes = [f"{way.name}: {way.problem}" for way in self.ways if way.problem]
        part = "; interrupted, so ways are missing" if self.is_partial else ""
        head = f"{self.n_learned:,} requests learned from, {self.n_served:,} served by each way{part}"
        return "\n".join(
            [head, "", *(line.rstrip() for line in lines), *([""] * bool(notes)), *notes, "", self.recommendation]
        )

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
