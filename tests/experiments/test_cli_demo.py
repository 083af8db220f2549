"""`llmcache demo`: the whole chain on a tiny model, and its concluding sentences."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.measures import demo
from experiments.measures.demo import conclude, ways
from experiments.measures.service import Pass
from experiments.models import loading as models
from experiments.models.loading import FIGURES, SMOLLM2, Loaded
from tests.experiments.commands import Commands
from tests.experiments.test_models import save_tiny
from tests.experiments.test_smollm2 import tiny as tiny_decoder

LEARN, N = 150, 260


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the real models by tiny ones, and learns from fewer requests; returns the working folder."""
    loaded = models.load(str(save_tiny(tmp_path / "tiny")))

    def load(name: str, kind: str = "states", models_dir: Path | None = None) -> Loaded:
        return tiny_decoder() if name == SMOLLM2 else loaded

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(demo, "LEARN", LEARN)
    monkeypatch.setattr(demo, "N_FIT", 200)
    monkeypatch.setattr(demo, "MAX_DROPS", (0.1, 0.3))
    monkeypatch.delenv("LLMCACHE_MODELS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # names are not folded
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_whole_chain(tiny: Path, command: Commands) -> None:
    options = ("--json", "figures.json", "--plot", "p.png", "--results-dir", "kept")
    assert command("demo", "--n", str(N), *options) == 0
    shown = command.out
    report: dict[str, Any] = json.loads((tiny / "figures.json").read_text())
    assert (tiny / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (report["n"], report["n_fit"]) == (N, 200)
    assert LEARN < report["learn"] < N  # repeats are served, not learned from
    nocache, *rows = report["settings"]
    assert nocache["name"] == "no cache" and len(nocache["seconds"]) == 2
    assert [row["name"] for row in rows] == list(ways())
    for row in report["settings"]:
        assert row["name"] in shown and row["latency_ms"]["median"] > 0
    for row, options in zip(rows, ways().values(), strict=True):
        assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
        assert (row["bound"] is None) == (row["calibration_s"] is None) == ("max_drop" not in options)
        assert row["bound"] is None or 0 < row["bound"] <= options["max_drop"]
        assert row["paid_back_at"] is None or row["paid_back_at"] >= report["learn"]
    assert rows[0]["changed_answers"] == 0
    for sentence in report["conclusion"]:
        assert sentence in shown
    assert report["decoder"] is None
    assert "is left out: no smollm2 in models. Get it: llmcache prepare smollm2 --models-dir models\n" in shown
    folder = tiny / "kept" / "demo"
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "env.json", "metrics.json"}
    kept, env = (json.loads((folder / name).read_text()) for name in ("metrics.json", "env.json"))
    assert kept | {"environment": env} == report
    assert env["load_average"] >= 0 and len(env["git"]) == 40
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"model": "minilm", "n": N}


def test_the_decoder_is_part_of_it_where_it_was_prepared(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, command: Commands
) -> None:
    (tiny / "mine" / SMOLLM2).mkdir(parents=True)
    (tiny / "mine" / SMOLLM2 / FIGURES).touch()
    settings = [{"name": "no cache", "latency_ms": {"median": 1.0, "p99": None}}]
    busy = {"load_average": 9, "n_cpus": 2}
    report = {"settings": settings, "conclusion": [], "n": 2, "learn": 1, "environment": busy}
    monkeypatch.setattr(demo, "run_demo", lambda loaded, n: dict(report))
    assert command("demo", "--models-dir", "mine", "--json", "figures.json") == 0
    assert command.out.startswith("The machine was busy")
    assert "5 of 5 answers are the same, token for token." in command.out
    assert len(json.loads((tiny / "figures.json").read_text())["decoder"]["users"]) == 5


def test_speed_is_of_whole_passes() -> None:
    def one(ms: list[float], drained_s: float) -> Pass:
        return Pass("x", 0, 0.0, drained_s, np.array(ms), np.array(["computed"] * len(ms)), [0] * len(ms))

    base = [one([1000.0, 2000.0], 0.0), one([3000.0, 4000.0], 0.0)]
    taken = one([500.0, 1000.0], 0.5)
    for first, least, median, most in ((0, 1.5, 2.5, 3.5), (1, 4 / 3, 2.0, 8 / 3)):
        expected = {"speedup": median, "speedup_min": least, "speedup_max": most}
        assert demo._speedup(base, taken, first) == pytest.approx(expected)


def test_the_sentences_follow_the_rows() -> None:
    def row(name: str, changed: float, bound: float | None, **options: Any) -> dict[str, Any]:
        figures = {"hit_rate": 0.4, "speedup": 1.5, "changed_answers": changed, "bound": bound}
        return {"name": name, "options": options, **figures}

    rows = [row("exact", 0.0, None), row("tau", 0.02, None, tau=0.85), row("default", 0.003, 0.005, max_drop=0.005)]
    tau, default = conclude(rows)
    assert "tau 0.85" in tau and "no bound" in tau and "2.00% of the answers changed" in tau
    assert "at most 0.5% of all answers may change" in default and "0.30% of the answers changed" in default
    (told,) = conclude([row("both", 0.003, 0.005, max_drop=0.005, draft="int8")])
    assert told.startswith("With ONNX Runtime and an int8 draft") and "40% not computed, 1.50 times as fast" in told
    (told,) = conclude([row("loose", 0.03, 0.02, max_drop=0.02)])
    assert told.startswith("loose: 3.00% of the answers changed, more than its bound")
