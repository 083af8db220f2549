"""What one account has counted: of its own cache, or as another cache that shares the calibration reported it.

Two tallies are added up, so what several caches counted is known from the latest report of each, whatever order they
come in and however often. A report has a few numbers a kind: epochs grow with what came before (`alarm.epoch_of`).

Sizes: K kinds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

_MOST_EPOCHS = 10_000
FIGURES = ("n_drawn", "n_recomputed", "n_lost", "n_changed")


@dataclass(slots=True)
class Tally:
    """Counts of an account.

    Attributes:
        by_epoch: Requests, by the epoch that the alarm was in when they came.
        by_ease: Requests, by what their least probability was multiplied by.
        open: Samples without a verdict, by weight and ease.
        found: Samples whose answer changed, likewise.
        struck: Samples that count as changed for the alarm, by epoch and weight.
        figures: `n_drawn`, `n_recomputed`, `n_lost` and `n_changed`, as of `AuditStats`.
    """

    by_epoch: Counter[int] = field(default_factory=Counter)
    by_ease: Counter[float] = field(default_factory=Counter)
    open: Counter[tuple[float, float]] = field(default_factory=Counter)
    found: Counter[tuple[float, float]] = field(default_factory=Counter)
    struck: Counter[tuple[int, float]] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def n(self) -> int:
        """Requests."""
        return self.by_ease.total()

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> Self:
        """All of several."""
        total = cls()
        for one in tallies:
            for name in cls.__slots__:
                getattr(total, name).update(getattr(one, name))
        return total

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Named tensors, each row what is counted and how often (K, 2) or (K, 3), and plain values."""
        flat = {
            "by_epoch": [(epoch, n) for epoch, n in self.by_epoch.items()],
            "by_ease": [(ease, n) for ease, n in self.by_ease.items()],
            "open": [(*kind, n) for kind, n in self.open.items() if n],
            "found": [(*kind, n) for kind, n in self.found.items() if n],
            "struck": [(*kind, n) for kind, n in self.struck.items()],
        }
        tensors = {name: torch.tensor(rows, dtype=torch.float32) for name, rows in flat.items()}
        return tensors, {name: self.figures[name] for name in FIGURES}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], about: Mapping[str, Any], floor: float) -> Self:
        """Take up what was packed by an account of the same `floor`.

        Raises:
            KeyError, TypeError, ValueError: It is no tally, or none of such an account.
        """
        rows = {name: tensors[name].tolist() for name in ("by_epoch", "by_ease", "open", "found", "struck")}
        if not all(tensors[name].isfinite().all() and (tensors[name] >= 0).all() for name in rows):
            raise ValueError("a count is no number, or less than nothing")
        samples = [(weight, ease) for name in ("open", "found") for weight, ease, _ in rows[name]]
        if not all(0 < ease <= 1 and 1 <= weight <= 1.0001 / (floor * ease) for weight, ease in samples):
            raise ValueError("a sample has a weight that no draw gives")
        if not all(0 < ease <= 1 for ease, _ in rows["by_ease"]):
            raise ValueError("no draw is eased so")
        epochs = [row[0] for name in ("by_epoch", "struck") for row in rows[name]]
        if max(epochs, default=0) > _MOST_EPOCHS:
            raise ValueError(f"{max(epochs):g} epochs")
        return cls(
            Counter({int(epoch): int(n) for epoch, n in rows["by_epoch"]}),
            Counter({ease: int(n) for ease, n in rows["by_ease"]}),
            Counter({(weight, ease): int(n) for weight, ease, n in rows["open"]}),
            Counter({(weight, ease): int(n) for weight, ease, n in rows["found"]}),
            Counter({(int(epoch), weight): int(n) for epoch, weight, n in rows["struck"]}),
            Counter({name: int(about[name]) for name in FIGURES}),
        )
