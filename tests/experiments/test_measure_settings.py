"""Measures that learn refuse bad settings before they compute anything."""

from typing import Any

import pytest

from experiments.runs.grid import make_experiment
from llmcache import ConfigError
from tests.experiments.measuring import learning

TRUST = learning("trust", taus=[0.8])
OTHERS = map(learning, ("bound", "service"))


@pytest.mark.parametrize("values", [TRUST, *OTHERS], ids=lambda values: values["measure"])
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_drops": [0.2, 0.001]}, "learn=200: 200 requests cannot show a loss of at most 0.001"),
        ({"learn": 50, "max_drops": [0.05]}, "learn=50: 50 requests cannot show"),
        ({"cache": {"delta": 2}}, "cache.delta"),
    ],
)
def test_a_claim_that_cannot_be_shown(values: dict[str, Any], changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        make_experiment(values | changes)


@pytest.mark.parametrize(
    ("measure", "changes", "error"),
    [
        ("trust", {"taus": [0.8], "sources": ["thawed"]}, "sources"),
        ("trust", {"taus": []}, "taus"),
        ("bound", {"arrival": {"name": "repeats", "n": 200}}, "arrival.n=200: nothing would follow"),
        ("bound", {"arrival": {"name": "late"}}, "arrival.name"),
        ("bound", {"parts": 0}, "parts"),
        ("bound", {"draws": 0}, "draws"),
        ("service", {"rounds": 0}, "rounds"),
    ],
)
def test_settings_that_cannot_be_measured(measure: str, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        make_experiment(learning(measure) | changes)
