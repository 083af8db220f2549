"""What one account has counted: of its own cache, or as another cache that shares the calibration reported it.

Tallies are added up, so what several caches counted is known from the latest report of each, whatever order they come
in and however often. Reports stay small however long an account lasts: epochs grow with what came before
(`alarm.epoch_of`), old ones are told together, and weights are few (`AuditAccount.see`).

Sizes: K kinds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

RECENT, THINNED = 128, 16  # of older epochs, so many are told as one
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

    @property
    def latest(self) -> int:
        """The latest epoch."""
        return max([*self.by_epoch, *(epoch for epoch, _ in self.struck)], default=0)

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Named tensors, each row what is counted and how often (K, 2) or (K, 3), and plain values."""
        by_epoch, struck, latest = Counter[int](), Counter[tuple[int, float]](), self.latest
        for epoch, n in self.by_epoch.items():
            by_epoch[_told_as(epoch, latest)] += n
        for (epoch, weight), n in self.struck.items():
            struck[_told_as(epoch, latest), weight] += n
        flat = {"by_epoch": list(by_epoch.items()), "by_ease": list(self.by_ease.items())}
        tensors = {name: torch.tensor(rows, dtype=torch.float64, device="cpu") for name, rows in flat.items()}
        for name, counts in (("open", self.open), ("found", self.found), ("struck", struck)):
            tensors[name] = torch.tensor(
                [(*kind, n) for kind, n in counts.items() if n], dtype=torch.float32, device="cpu"
            )
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


def _told_as(epoch: int, latest: int) -> int:
    """The epoch that requests of another one are told to be of. Only gamblers who set out in between miss them."""
    return epoch if is_told(epoch, latest) else epoch - epoch % THINNED


def is_told(epoch: int, latest: int) -> bool:
    """Whether an epoch is told by itself, once a later one has begun."""
    return epoch > latest - RECENT or epoch % THINNED == 0
