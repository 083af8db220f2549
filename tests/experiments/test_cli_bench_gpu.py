"""The commands of `make bench-gpu`, run with tiny models on the CPU."""

import itertools
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from experiments.runs.grid import load_experiments
from tests.experiments.commands import Commands
from tests.experiments.test_measure_latency import save_gpt2

ROOT = Path(__file__).parents[2]
SHORT = {"BATCH_SIZES": "1,2", "ROUNDS": "10", "SEQUENCES": "8", "ENTRIES": "64", "LENGTHS": "16"}
QUICKLY = {"DEVICE": "cpu", "BACKEND": "eager", "MODES": "null", "SERVICE_ROUNDS": "1", "GENERATIONS": "3"}
DTYPES, BANKS = ("float32", "bfloat16"), ("host", "device")


def commands_of_target(**variables: str | Path) -> list[list[str]]:
    """Return the arguments of the target's commands, from make's dry run."""
    given = [f"{name}={value}" for name, value in (SHORT | variables).items()]
    make = ["make", "--dry-run", "--no-print-directory", "bench-device", *given]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in printed.replace("\\\n", "").splitlines()]
    return [words[1:] for words in lines if words and words[0].endswith("/llmcache")]


def calls_of(results: Path, group: str) -> list[dict[str, Any]]:
    """Return the calls of an experiment's runs; each batch size has one run."""
    metrics = [json.loads(path.read_text()) for path in sorted(results.glob(f"{group}/*/metrics.json"))]
    assert len(metrics) == 2
    return [row for one in metrics for row in one["calls"]]


@pytest.mark.slow
def test_all_is_measured_that_is_asked(tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype and batch size, with banks on host and device, eager and compiled."""
    monkeypatch.chdir(ROOT)  # the target's config paths start here
    model, results = save_gpt2(tmp_path / "tiny", layers=1, positions=192), tmp_path / "gpu"
    asked = commands_of_target(**QUICKLY, MODELS=model, GENERATE=model, COMPILED=model, GPU_RESULTS=results)
    changes = [change for option, change in itertools.pairwise(asked[0]) if option == "--set"]
    settings = [run.experiment.to_dict() for run in load_experiments(Path(asked[0][1]), changes)]
    entries = {"as the paper": 8, "all tokens": 8, "pooled": 64}
    for number, found in enumerate(settings, start=1):
        assert (found["batch_sizes"], found["dtypes"], found["banks"]) == ([number], [*DTYPES], [*BANKS])
        assert (found["entries"], found["kept"]) == (entries, [*entries]) and found["token_heads"] == [str(model)]
    asked[0] += ["--set", "kept=[pooled]", "--set", "token_heads=[]"]  # faster; so are the next two
    asked[1] += ["--set", "dtypes=[bfloat16]"]
    asked[2] += ["--set", "new_tokens=2"]
    assert [command(*words) for words in asked] == [0, 0, 0]
    expected = set(itertools.product(DTYPES, (1, 2), BANKS))

    calls = calls_of(results, "table1_latency")
    assert len(calls) == len(expected)
    assert {(row["dtype"], row["batch_size"], row["banks"]) for row in calls} == expected
    assert {(row["kept"], row["entries"]) for row in calls} == {("pooled", 64)}
    assert all(row["exact_hit_is_equal"] for row in calls)
    assert {row["detail"]["nocache_ms"]["n"] for row in calls} == {10}
    assert {row["detail"]["service"]["nocache_ms"]["n"] for row in calls} == {10}
    assert {row["clock"] for row in calls} == {"perf_counter"}

    compiled = calls_of(results, "compiled")
    found = {(row["dtype"], row["rows"], row["banks"]) for row in compiled}
    assert found == set(itertools.product(DTYPES[1:], (1, 2), BANKS))
    assert all(row["not_run"] == "" and row["miss_compiled_ms"] > 0 for row in compiled)

    (path,) = results.glob("prefix_decode/*/metrics.json")
    generated = json.loads(path.read_text())["generation"]
    assert [(row["dtype"], row["banks"]) for row in generated] == list(itertools.product(DTYPES, BANKS))
    assert all(row["prefix_hit_ms"]["n"] == 3 for row in generated)
