"""`llmcache run`: results in their place, nothing measured twice, wrong input in one line."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import runner
from experiments.streams.support_desk import support_desk
from llmcache import cli
from tests.unit.test_experiments_models import save_tiny

KNOWN = {"accuracy", "accuracy_nocache", "accuracy_drop", "changed_answers", "changed_per_hit", "hit_rate", "speedup"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LLMCACHE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    requests = support_desk(120, intents=("order_status", "cancel_order"))
    for number, part in enumerate((requests[:50], requests[50:])):
        with (tmp_path / f"part{number}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["question", "intent"])
            writer.writerows((request.text, request.label) for request in part)
    values = {
        "task": "stream",
        "data": {"path": ["part0.csv", "part1.csv"], "text": "question", "label": "intent"},
        "model": str(save_tiny(tmp_path / "tiny")),
        "cache": {"tau": 0.8},
        "rounds": 2,
        "warmup": 2,
    }
    path = tmp_path / "tiny_stream.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run_main(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(arg) for arg in args])
    return int(exit_info.value.code or 0)


def run_config(config: Path, *args: str) -> int:
    return run_main("run", config, "--data-dir", config.parent, "--results-dir", config.parent / "out", *args)


def folders(config: Path) -> list[Path]:
    return sorted((config.parent / "out" / "tiny_stream").iterdir())


def test_results_are_complete(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config(config) == 0
    (folder,) = folders(config)
    assert str(folder) in capsys.readouterr().out.replace("\n", "")
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "env.json", "rows.csv", "metrics.json"}
    metrics = json.loads((folder / "metrics.json").read_text())
    rows = list(csv.DictReader((folder / "rows.csv").read_text(encoding="utf-8").splitlines()))
    assert metrics.keys() >= KNOWN
    assert (metrics["n"], metrics["n_fit"], metrics["n_data"], metrics["limit"]) == (60, 60, 120, None)
    assert len(rows) == 60
    assert metrics["nocache_ms"]["n"] == metrics["cache_ms"]["n"] == 120  # both rounds
    served = [row["rung"] for row in rows]
    assert metrics["hit_rate"] == pytest.approx(1 - served.count("computed") / 60)
    assert {"semantic", "computed"} <= set(served)
    changed = sum(row["answer_cache"] != row["answer_nocache"] for row in rows)
    assert metrics["changed_answers"] == pytest.approx(changed / 60)
    drop = sum((row["answer_nocache"] == row["label"]) - (row["answer_cache"] == row["label"]) for row in rows)
    assert metrics["accuracy_drop"] == pytest.approx(drop / 60)
    env = json.loads((folder / "env.json").read_text())
    assert env.keys() >= {"git", "versions", "cpu", "threads", "seed"}


def test_a_finished_run_is_kept_until_forced(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config(config) == 0
    metrics = folders(config)[0] / "metrics.json"
    before = metrics.read_text()
    assert "measured: " in capsys.readouterr().out
    assert run_config(config) == 0
    assert metrics.read_text() == before
    assert "kept from before: " in capsys.readouterr().out
    assert run_config(config, "--force") == 0
    assert metrics.read_text() != before  # times are never the same twice
    metrics.unlink()  # as if it had been interrupted
    assert run_config(config) == 0
    assert metrics.is_file() and len(folders(config)) == 1


def test_an_interrupted_run_leaves_no_figures(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_config(config) == 0

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner, "TASKS", {"stream": interrupted})
        assert run_config(config, "--force") != 0
    assert {path.name for path in folders(config)[0].iterdir()} == {"config.yaml", "env.json", "rows.csv"}


def test_a_grid_runs_once_a_point(config: Path) -> None:
    assert run_config(config, "--set", "cache.tau=[0.5, 0.99]", "--set", "rounds=1") == 0
    rates = {}
    for folder in folders(config):
        assert folder.name.startswith("tiny-tau=")
        rates[folder.name.split("=")[1].split("-")[0]] = json.loads((folder / "metrics.json").read_text())["hit_rate"]
    assert rates["0.5"] > rates["0.99"]


def test_the_data_folder_comes_from_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCACHE_DATA", str(config.parent))
    monkeypatch.chdir(config.parent / "tiny")
    assert run_main("run", config, "--results-dir", config.parent / "out", "--set", "rounds=1") == 0


def test_a_ready_model_needs_no_fit(config: Path) -> None:
    model = save_tiny(config.parent / "ready", labels=("order_status", "cancel_order"))
    assert run_config(config, "--set", f"model={model}", "--set", "head.kind=ready", "--set", "rounds=1") == 0
    metrics = json.loads((folders(config)[0] / "metrics.json").read_text())
    assert (metrics["n"], metrics["n_fit"]) == (120, 0)
    assert metrics["hit_rate"] > 0


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--set", "data.text=txt"], "has no column 'txt'; columns found: question, intent"),
        (["--set", "data.path=none.csv"], "no file"),
        (["--set", "data.pth=x"], "data.pth: unknown setting; did you mean 'path'?"),
        (["--set", "model=no/such"], "model: 'no/such' could not be loaded"),
        (["--set", "max_length=999"], "max_length: 999 is more than this model's 128 positions"),
        (["--set", "limit=1"], "head.fit_share: "),
        (["--set", "data.path=empty.csv"], "no records, so there is nothing to stream"),
        (["--set", "data.path=rare.csv"], "occurs in the stream but not among"),
        (["--set", "data.path=same.csv"], "only one label ('x')"),
    ],
)
def test_bad_input_is_one_line(args: list[str], error: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents: dict[str, Any] = {
        "empty": [],
        "rare": [f"t{i},x{i}" for i in range(8)],
        "same": [f"t{i},x" for i in range(8)],
    }
    for name, lines in contents.items():
        text = "\n".join(["question,intent", *lines])
        (config.parent / f"{name}.csv").write_text(text + "\n", encoding="utf-8")
    assert run_config(config, *args) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_config_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("run", tmp_path / "none.yaml") == 2
    assert capsys.readouterr().err.endswith("none.yaml: No such file or directory\n")
