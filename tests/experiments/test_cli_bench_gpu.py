"""The commands of `make bench-gpu` ask for all that the Makefile says; each measure has its own tests."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.experiments.commands import Commands
from tests.experiments.test_cli_run import fake

ROOT = Path(__file__).parents[2]
ASKED = [
    *("DEVICE=cpu", "BACKEND=eager", "MODES=null", "LENGTHS=16", "SERVICE_ROUNDS=1"),
    *("BATCH_SIZES=1,2", "ROUNDS=10", "SEQUENCES=8", "ENTRIES=64", "GENERATIONS=3"),
]


def commands_of_target(**variables: str | Path) -> list[list[str]]:
    """Return the arguments of the target's commands, from make's dry run."""
    given = (f"{name}={value}" for name, value in variables.items())
    make = ["make", "--dry-run", "--no-print-directory", "bench-device", *ASKED, *given]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in printed.replace("\\\n", "").splitlines()]
    return [words[1:] for words in lines if words and words[0].endswith("/llmcache")]


def test_all_is_measured_that_is_asked(tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype, with banks on host and device, eager and compiled; each batch size is a run of its own."""
    monkeypatch.chdir(ROOT)  # the target's config paths start here
    ran = fake(monkeypatch, {"summary": []})
    for words in commands_of_target(MODELS="a,b", GENERATE="b", COMPILED="a", GPU_RESULTS=tmp_path):
        assert command(*words) == 0
    asked = [experiment.to_dict() for experiment in ran]
    assert [one["measure"] for one in asked] == ["latency"] * 2 + ["compiled"] * 2 + ["decode"]
    for one in asked:
        assert (one["device"], one["dtypes"], one["banks"]) == ("cpu", ["float32", "bfloat16"], ["host", "device"])
    *latency, one, two, decode = asked
    for number, found in enumerate(latency, start=1):
        assert (found["models"], found["batch_sizes"], found["token_heads"]) == (["a", "b"], [number], ["b"])
        assert found["entries"] == {"as the paper": 8, "all tokens": 8, "pooled": 64}
        assert (found["kept"], found["rounds"], found["service_rounds"]) == ([*found["entries"]], 10, 1)
    for number, found in enumerate((one, two), start=1):
        assert (found["models"], found["batch_sizes"], found["seq_lens"]) == (["a"], [number], [16])
        assert (found["buckets"], found["mode"], found["backend"]) == ([16], None, "eager")
    assert (decode["models"], decode["rounds"]) == (["b"], 3)
