"""Arrival times: drawn, or taken from a trace."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.data.streams.arrivals import azure, fixed, mooncake, poisson
from experiments.data.traces import AZURE, MOONCAKE, azure_arrivals
from llmcache.errors import ConfigError


def write_trace(folder: Path, *lines: str) -> Path:
    path = folder / AZURE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return folder


def test_arrivals_have_a_mean_distance_of_one_and_those_of_the_trace_its_bursts(tmp_path: Path) -> None:
    seconds = [0, 1, 3, 4, 50, 51]
    write_trace(tmp_path, *(f"2023-11-16 18:15:{second:02}.1234567,1,2" for second in reversed(seconds)))
    assert azure_arrivals(tmp_path) == seconds
    assert azure(6, tmp_path, np.random.default_rng(0)) == pytest.approx(np.array(seconds) * 5 / 51)
    for times in (azure(4, tmp_path, np.random.default_rng(1)), poisson(1000, None, np.random.default_rng(1))):
        assert times[0] == 0 and np.diff(times).mean() == pytest.approx(1) and (np.diff(times) >= 0).all()
    gaps = np.diff(poisson(5000, None, np.random.default_rng(2)))
    assert gaps.std() == pytest.approx(1, abs=0.05)
    again = [poisson(50, None, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert (again[0] == again[1]).all() and not (again[0] == again[2]).all()


def test_arrivals_at_equal_distances_and_within_the_steps_of_a_trace(tmp_path: Path) -> None:
    assert fixed(3, None, np.random.default_rng(0)).tolist() == [0, 1, 2]
    path = tmp_path / MOONCAKE
    path.parent.mkdir()
    times = [0, 0, 0, 3000, 6000, 6000]
    path.write_text("\n".join(json.dumps({"timestamp": time, "hash_ids": [0]}) for time in times))
    found = mooncake(6, tmp_path, np.random.default_rng(0))
    assert found[0] == 0 and np.diff(found).mean() == pytest.approx(1) and (np.diff(found) > 0).all()
    with pytest.raises(ConfigError, match="the trace of mooncake has 6 arrivals"):
        mooncake(7, tmp_path, np.random.default_rng(0))
