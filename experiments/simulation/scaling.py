"""Where a design stops to scale: the fewest workers at which a figure passes a limit that was set before."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from experiments.support.section import Section


class Limits(Section):
    """What a design may do at most, to be said to scale."""

    redis_busy: float = Field(default=0.7, gt=0)  # share of the time in which its thread works
    link_busy: float = Field(default=0.7, gt=0)  # likewise of its link
    hear_share: float = Field(default=0.1, gt=0)  # of a worker's time that goes into hearing of others
    p99_ratio: float = Field(default=2.0, gt=1)  # p99 of latency over that of one worker
    points_lost: float = Field(default=1.0, gt=0)  # of the hit rate of one worker


REASONS: Mapping[str, str] = {
    "points_lost": "hits lost, points",
    "redis_busy": "Redis busy",
    "link_busy": "its link busy",
    "hear_share": "time spent hearing",
    "p99_ratio": "p99, times that of one worker",
}


def with_ratios(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Points of one stream and design, by workers, with what they lose to the first, which is of one worker."""
    one = points[0]
    return [
        {
            **point,
            "points_lost": 100 * (one["hit_rate"] - point["hit_rate"]),
            "p99_ratio": point["p99_ms"] / one["p99_ms"],
        }
        for point in points
    ]


def stops(points: Sequence[Mapping[str, Any]], limits: Limits) -> Iterator[dict[str, Any]]:
    """For each limit the first of such points that passes it; None for one that none passes."""
    for name in REASONS:
        limit = getattr(limits, name)
        first = next((point for point in points if point[name] > limit), None)
        yield {
            "stream": points[0]["stream"],
            "design": points[0]["design"],
            "figure": name,
            "limit": limit,
            "workers": None if first is None else first["workers"],
            "value": None if first is None else first[name],
            "most_workers": points[-1]["workers"],
            "at_most": points[-1][name],
        }
