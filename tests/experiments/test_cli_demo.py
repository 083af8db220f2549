"""`llmcache demo`: the whole chain on a tiny model, and what its sentences say."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.measures import demo
from experiments.measures.demo import NOCACHE, PAPER_TAU, SETTINGS, conclude
from experiments.models import loading as models
from experiments.models.loading import Loaded
from llmcache.cli import main as cli
from tests.experiments.test_models import save_tiny


def run_main(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(arg) for arg in args])
    return int(exit_info.value.code or 0)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """A tiny model in place of the real one, and one round."""
    loaded = models.load(str(save_tiny(tmp_path / "tiny")))
    monkeypatch.setattr(models, "load", lambda name: loaded)
    monkeypatch.setattr(demo, "BUDGET_S", 0.0)
    monkeypatch.chdir(tmp_path)
    return loaded


@pytest.mark.slow
def test_the_whole_chain(tiny: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("demo", "--n", "600", "--json", "figures.json", "--plot", "p.png", "--results-dir", "kept") == 0
    shown = capsys.readouterr().out
    report: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (report["n"], report["n_fit"]) == (420, 180)
    assert [row["name"] for row in report["settings"]] == [NOCACHE, *(setting.name for setting in SETTINGS)]
    for setting, row in zip(SETTINGS, report["settings"][1:], strict=True):
        assert setting.name in shown
        assert (row["speedup"] is not None) == (row["latency_ms"] is not None) == setting.is_live
        assert row.get("replay_differs", 0) == 0
    exact, *approximate = report["settings"][1:]
    assert exact["changed_answers"] == 0 and exact["hit_rate"] > 0
    assert [row["hit_rate"] for row in approximate] == sorted(row["hit_rate"] for row in approximate)
    for sentence in report["conclusion"]:
        assert sentence in shown
    folder = tmp_path / "kept" / "demo"
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "env.json", "metrics.json"}
    kept, env = (json.loads((folder / name).read_text()) for name in ("metrics.json", "env.json"))
    assert kept | {"environment": env} == report
    assert env["load_average"] >= 0 and len(env["git"]) == 40
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"model": "minilm", "n": 600}


def test_a_folder_of_results_that_cannot_be_made_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_main("demo", "--results-dir", tmp_path / "file", "--plot", tmp_path / "p.png") == 2
    assert "cannot be made a folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_folder_that_is_not_there_is_told_at_once(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("demo", option, "/no/such/folder/file") == 2
    assert capsys.readouterr().err == (
        "llmcache: /no/such/folder/file: cannot be written; give a file in a folder that exists\n"
    )


def row(tau: float | None, speedup: float | None, changed: float) -> dict[str, Any]:
    return {
        "name": f"tau {tau}",
        "tau": tau,
        "speedup": speedup,
        "hit_rate": 0.4,
        "changed_answers": changed,
        "accuracy_drop": changed / 2,
    }


def test_the_sentences_follow_the_rows() -> None:
    rows = [row(None, 1.0, 0.0), row(0.95, None, 0.0), row(0.9, 1.2, 0.005), row(PAPER_TAU, 1.5, 0.02)]
    safe, paper, caution = conclude(rows)
    assert "'tau 0.9'" in safe and "1.20 times" in safe and "0.50% changed" in safe
    assert "tau 0.85" in paper and "2.00% of all answers" in paper and "1.00 points" in paper
    assert "hindsight" in caution
    assert len(conclude([row(PAPER_TAU, 1.5, 0.02)])) == 2
