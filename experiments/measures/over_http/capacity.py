"""The largest rate that is held: by doubling until one is not, then by halving the distance."""

from collections.abc import Callable
from dataclasses import dataclass

from llmcache import ConfigError

MOST_RATES = 40


@dataclass(frozen=True, slots=True)
class Found:
    """Where a search ended."""

    held: float  # the largest rate that was held
    broken: float  # the least that was not


def largest_rate(is_held: Callable[[float], bool], first: float, precision: float) -> Found:
    """Search from `first` on until the least rate that broke is at most `1 + precision` times the largest held one."""
    held, broken = 0.0, 0.0
    rate = first
    for _ in range(MOST_RATES):
        if is_held(rate):
            held = rate
        else:
            broken = rate
        if held and broken and broken <= held * (1 + precision):
            return Found(held, broken)
        rate = (held + broken) / 2 if held and broken else 2 * held or broken / 2
    raise ConfigError(
        f"first_rate={first:g}: no rate was found in {MOST_RATES} trials that is held, beside one that is not"
    )
