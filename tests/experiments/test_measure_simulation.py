"""The measure `simulation`, on tiny models, small traces and a real Redis; real workers are what it is held against."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.data import azure, mooncake
from experiments.report.pages import lines_of
from experiments.report.plots import PLOTS
from experiments.runs.folder import write_figures
from experiments.runs.grid import make_experiment
from experiments.runs.read import Run, read_runs
from experiments.simulation.scaling import Limits
from experiments.simulation.streams import of_azure, of_mooncake
from experiments.support.folders import Folders
from llmcache.errors import ConfigError
from tests.experiments.measuring import learning, measured, told
from tests.redis_server import redis_server

SIMULATION: dict[str, Any] = {
    "workers": [2],
    "checked": 60,
    "clocked": 12,
    "decoder": "qwen3-small",
    "prompts": 3,
    "prompt_blocks": [1, 3],
    "requests": 8,
    "simulated": [1, 4],
}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Traces of eight requests: two conversations that grow, and lengths of one to three blocks."""
    chains = [[0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [0, 2, 4, 6], [0, 7], [0, 8]]
    lines = [json.dumps({"timestamp": 3000 * i, "hash_ids": chain}) for i, chain in enumerate(chains)]
    for file in (mooncake.FILE, azure.FILE):
        (tmp_path / file).parent.mkdir()
    (tmp_path / mooncake.FILE).write_text("\n".join(lines))
    rows = [f"2023-11-16 18:15:{46 + i}.6805900,{tokens},44" for i, tokens in enumerate([1, 17, 40, 48, 16, 32, 99, 5])]
    (tmp_path / azure.FILE).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return Folders(data=tmp_path)


def values() -> dict[str, Any]:
    made = learning("simulation", **SIMULATION)
    return {**made, "task": {**made["task"], "data": {"path": "support_desk", "limit": 700}}}


def test_simulated_workers_find_what_real_ones_find(folders: Folders, tmp_path: Path) -> None:
    with redis_server(tmp_path):  # skips where there is none
        pass
    outcome = measured(values(), folders)
    checked = {row["way"]: row for row in outcome.metrics["check"]}
    assert list(checked) == ["one", "shared", "separate", "routed"]
    for way in ("one", "separate", "routed"):  # nothing in them depends on times
        assert checked[way]["hit_rate"] == checked[way]["real_hit_rate"]
    assert 0.3 < checked["one"]["hit_rate"] < 1
    points = {(row["stream"], row["design"], row["workers"]): row for row in outcome.metrics["summary"]}
    assert len(points) == 3 * 3 * 2
    for stream in ("support_desk", "Mooncake", "Azure"):
        rates = {points[stream, design, 1]["hit_rate"] for design in ("separate", "routed", "shared")}
        assert len(rates) == 1
    assert points["Mooncake", "separate", 1]["hit_rate"] == 13 / 20  # of prompts of three blocks at most
    assert points["Mooncake", "shared", 4]["redis_ops_s"] > 0 == points["Mooncake", "routed", 4]["redis_ops_s"]
    assert {row["figure"] for row in outcome.metrics["stops"]} == set(Limits.model_fields)
    _shown(outcome, tmp_path)


def _shown(outcome: Any, folder: Path) -> None:
    """The tables and the picture."""
    assert "| Mooncake | shared | 4 |" in told(values(), outcome)
    write_figures(
        folder / "results" / "simulation" / "a",
        make_experiment(values()).to_dict(),
        {"n_cpus": 2},
        {**json.loads(json.dumps(outcome.metrics)), "seconds": 1.0},
    )
    results = folder / "results"
    assert "| Azure | routed | 4 |" in lines_of("simulation", results)
    assert "| shared | 2 | 60 |" in lines_of("simulation_check", results)
    assert "| Azure | separate |" in lines_of("simulation_stops", results)
    assert "a value written" in lines_of("simulation_times", results)
    runs: list[Run] = read_runs([results / "simulation" / "a"])
    assert all(path.is_file() for path in PLOTS["simulation"](runs))


def test_traces_become_chains_of_blocks(folders: Folders) -> None:
    rng = np.random.default_rng(0)
    name, mooncakes, arrivals, sizes = of_mooncake(folders.data, 8, 3, rng)
    assert (name, sizes) == ("Mooncake", [2, 2, 3, 3, 3, 3, 2, 2])
    assert mooncakes.route(0) == mooncakes.route(2) == mooncakes.route(4) != mooncakes.route(1)
    assert arrivals[0] == 0 and np.diff(arrivals).mean() == pytest.approx(1) and (np.diff(arrivals) >= 0).all()
    name, azures, arrivals, sizes = of_azure(folders.data, 8, 3, rng)
    assert (name, sizes) == ("Azure", [1, 2, 3, 3, 1, 2, 3, 1])  # blocks of 16 tokens, three at most
    assert azures.chains[2] == ((0, 0), (1, 0), (3, 0)) and azures.chains[1] == ((0, 0), (2, 0))
    assert azures.chains[6] == ((0, 0), (7, 0), ("own", 6, 0))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"simulated": [2, 4]}, "simulated=\\[2, 4\\]: begin with 1"),
        ({"simulated": [1, 4, 2]}, "simulated=\\[1, 4, 2\\]: .* go up"),
        ({"designs": ["mirrored"]}, "designs"),
        ({"load": 0}, "load"),
        ({"limits": {"redis_busy": 0}}, "limits.redis_busy"),
        ({"limits": {"colour": 1}}, "limits.colour"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_experiment({**values(), **changes})
