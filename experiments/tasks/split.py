"""A seeded part of labelled data, to fit on, and the rest, to stream."""

import random
from collections.abc import Sequence

from experiments.data.labelled import Labelled
from llmcache import ConfigError


def split(data: Sequence[Labelled], share: float, seed: int) -> tuple[list[Labelled], list[Labelled]]:
    """Divide the data; both parts in data order. Which record goes where depends on its id alone, not on the order."""
    n_fit = round(len(data) * share)
    if not 0 < n_fit < len(data):
        raise ConfigError(
            f"head.fit_share: {share} of {len(data)} records leaves nothing to fit on or nothing to stream; "
            "give more records or another share"
        )
    chosen = set(random.Random(seed).sample(sorted(record.id for record in data), n_fit))
    return [record for record in data if record.id in chosen], [record for record in data if record.id not in chosen]
