"""`llmcache report` reads what every measure really writes."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from llmcache.cli.main import app, main
from tests.experiments.test_measure_latency import save_gpt2

pytestmark = pytest.mark.slow

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
TEXT = {"name": "wikitext", "model": "untrained", "limit": 12, "data": "made", "window": 16}
LABELS = {"name": "stream", "model": "minilm", "limit": 20, "data": {"path": "support_desk", "limit": 300}}
TAU = {"method": "llmcache", "tau": 0.8, "allow_unsafe": True}


def configs(model: Path) -> dict[str, dict[str, object]]:
    """One experiment of each kind, under the names of those that are judged."""
    cached = {"max_entries": [8, 16], "compression": [{"name": "none"}, {"name": "int8"}], "tau": 0.8}
    return {
        "table1_latency": {
            "measure": "latency",
            "models": [str(model)],
            "seq_len": 16,
            "rounds": 10,
            "entries": {"as the paper": 8, "all tokens": 8, "pooled": 64},
            "token_heads": [str(model)],
            "generate": [str(model)],
            "new_tokens": 4,
            "generate_rounds": 3,
        },
        "table2_accuracy": {"measure": "serve", "task": TEXT, "methods": [TAU], "rounds": 1, "warmup": 0},
        "fig3_hit_rate_by_layer": {"measure": "layers", "task": TEXT},
        "fig4_memory": {"measure": "observe", "task": LABELS, "cache": cached},
        "fig5_tau": {
            "measure": "sweep",
            "task": TEXT,
            "taus": [0.82, 0.9],
            "methods": ["llmcache", "doccache"],
            "live_taus": [0.9],
            "rounds": 1,
            "cache": {"allow_unsafe": True},
        },
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    model = folder / "gpt2-tiny"
    save_gpt2(model)
    for name, config in configs(model).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    paths = [str(path) for path in sorted(folder.glob("*.yaml"))]
    swept = CliRunner().invoke(app, ["sweep", *paths, "--results-dir", str(folder / "results")])
    assert swept.exit_code == 0, swept.output
    assert "3 pictures" in swept.output
    return folder / "results"


def test_a_sweep_leaves_its_pictures(results: Path) -> None:
    assert all(len(list(results.glob(f"{name}*/**/*.png"))) == 1 for name in ("fig3", "fig4", "fig5"))


def test_report_reads_what_every_measure_writes(results: Path) -> None:
    paths = [str(path) for path in sorted(results.parent.glob("*.yaml"))]
    told = CliRunner().invoke(app, ["report", *paths, "--results-dir", str(results)])
    assert told.exit_code == 0, told.output
    assert "REPORT.md and 3 pictures" in told.output
    text = (results / "REPORT.md").read_text()
    assert all(f"## {name}" in text for name in ("table1_latency", "table2_accuracy", "fig3_hit_rate_by_layer"))


def test_results_of_other_settings_are_told_apart(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = results.parent / "changed" / "fig4_memory.yaml"
    changed.parent.mkdir()
    changed.write_text((results.parent / "fig4_memory.yaml").read_text() + "seed: 7\n")
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(changed), "--results-dir", str(results)])
    assert exit_info.value.code == 2
    assert "no results with the settings of these files, but 4 with others" in capsys.readouterr().err


def test_report_without_results_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(SMOKE), "--results-dir", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "measure first" in capsys.readouterr().err
