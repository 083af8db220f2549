"""What `make bench-gpu` runs, on tiny models and the CPU."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from experiments.measures.bench.at_hand import NOT_RUN, why_not
from tests.experiments.commands import Commands
from tests.experiments.test_measure_latency import save_gpt2

ROOT = Path(__file__).parents[2]
SHORT = {"BATCH_SIZES": "1,2", "ROUNDS": "10", "SEQUENCES": "8", "ENTRIES": "64"}


def commands_of_target(**variables: str | Path) -> list[list[str]]:
    """Arguments of the target's commands, as make would print them."""
    given = [f"{name}={value}" for name, value in (SHORT | variables).items()]
    make = ["make", "--dry-run", "--no-print-directory", "bench-device", *given]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in printed.replace("\\\n", "").splitlines()]
    return [words[1:] for words in lines if words and words[0].endswith("/llmcache")]


def test_every_dtype_and_batch_size_is_measured(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the target names its config from here
    model, results = save_gpt2(tmp_path / "tiny", layers=1), tmp_path / "gpu"
    commands = commands_of_target(DEVICE="cpu", MODELS=model, GENERATE=model, GPU_RESULTS=results)
    assert [command(*words) for words in commands] == [0] * 5
    expected = {(dtype, rows) for dtype in ("float32", "bfloat16") for rows in (1, 2)}

    singles = [json.loads(path.read_text()) for path in results.glob("latency-*.json")]
    assert {(single["dtype"], single["batch_size"]) for single in singles} == expected
    assert all(single["exact_hit_is_equal"] and single["nocache_ms"]["n"] == 10 for single in singles)
    assert all(single["environment"]["versions"]["torch"] for single in singles)

    (path,) = results.glob("table1_latency/*/metrics.json")
    metrics = json.loads(path.read_text())
    assert len(metrics["calls"]) == 5 * len(expected)  # three ways to keep entries, and another head with two of them
    assert {(row["dtype"], row["batch_size"]) for row in metrics["calls"]} == expected
    kept = {"as the paper": 8, "all tokens": 8, "pooled": 64}
    assert {(row["kept"], row["entries"]) for row in metrics["calls"]} == set(kept.items())
    assert all(row["exact_hit_is_equal"] for row in metrics["calls"])
    assert [figures["dtype"] for figures in metrics["generation"]] == ["float32", "bfloat16"]
    assert all(figures["exact_hit_ms"]["n"] == 10 for figures in metrics["generation"])


def test_without_the_device_one_line_and_a_file_say_that_it_was_not_run(tmp_path: Path) -> None:
    said = why_not("cuda:99", tmp_path / "gpu")
    told = json.loads((tmp_path / "gpu" / NOT_RUN).read_text())
    assert said.startswith("Not run: device: ") and "\n" not in said
    assert told["was_run"] is False and told["device"] == "cuda:99" and told["reason"] in said
    assert told["environment"]
    assert why_not("cpu", tmp_path / "gpu") == ""
    assert not (tmp_path / "gpu" / NOT_RUN).exists()


def test_what_a_gpu_is_asked_is_what_the_project_says_of_it() -> None:
    (run, *singles) = commands_of_target(BATCH_SIZES="1,8,32,128")
    (models,) = (word for word in run if word.startswith("models="))
    assert {"bert-base", "minilm-l6", "gpt2", "smollm2-135m"} <= set(models[len("models=[") : -1].split(","))
    assert {word for words in singles for word in words if "bfloat16" in word and word != "bfloat16"} == {
        f"results/gpu/latency-bfloat16-{rows}.json" for rows in (1, 8, 32, 128)
    }
