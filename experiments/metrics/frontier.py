"""The best point of a curve in hindsight: an upper limit on any choice in advance."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.metrics import paper

#: Figures of a curve at one threshold.
Point = Mapping[str, Any]

#: Method and fingerprint; None for methods without fingerprints to choose from.
Curve = tuple[str, str | None]


def curves(points: Sequence[Point]) -> list[Curve]:
    return list(dict.fromkeys((point["method"], point["fingerprint"]) for point in points))


def of_curve(points: Sequence[Point], curve: Curve) -> list[Point]:
    return [point for point in points if (point["method"], point["fingerprint"]) == curve]


def best(points: Sequence[Point], curve: Curve, loss: str = "accuracy_drop", limit: float = paper.DROP) -> Point | None:
    """Return the curve's point with most hits that loses at most `limit`; None if there is none."""
    allowed = [point for point in of_curve(points, curve) if point[loss] <= limit]
    return max(allowed, key=lambda point: point["hit_rate"], default=None)


def at_tau(points: Sequence[Point], curve: Curve, tau: float) -> Point | None:
    return next((point for point in of_curve(points, curve) if point["tau"] == tau), None)
