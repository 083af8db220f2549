"""`llmcache report` reads the results that each measure writes."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from llmcache.cli.main import app
from tests.experiments.commands import Commands
from tests.experiments.test_measure_latency import save_gpt2

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
TEXT = {"name": "wikitext", "model": "untrained", "limit": 12, "data": "made", "window": 16}
LABELS = {"name": "stream", "model": "untrained", "limit": 20, "data": {"path": "support_desk", "limit": 300}}
TAU = {"method": "llmcache", "tau": 0.8, "allow_unsafe": True}


CACHED = {"max_entries": [8, 16], "compression": [{"name": "none"}, {"name": "int8"}], "tau": 0.8}
ENTRIES = {"as the paper": 8, "all tokens": 8, "pooled": 64}
LATENCY = {"measure": "latency", "seq_len": 16, "rounds": 10, "entries": ENTRIES}
GENERATION = {"new_tokens": 2, "generate_rounds": 3}
TAUS = {"taus": [0.82, 0.9], "live_taus": [0.9], "methods": ["llmcache", "doccache"], "cache": {"allow_unsafe": True}}

#: One experiment of each kind, under names that the report judges.
CONFIGS: dict[str, dict[str, object]] = {
    "table1_latency": LATENCY | GENERATION | {name: ["gpt2-tiny"] for name in ("models", "token_heads", "generate")},
    "table2_accuracy": {"measure": "serve", "task": TEXT, "methods": [TAU], "rounds": 1, "warmup": 0},
    "fig3_hit_rate_by_layer": {"measure": "layers", "task": TEXT},
    "fig4_memory": {"measure": "observe", "task": LABELS, "cache": CACHED},
    "fig5_tau": {"measure": "sweep", "task": TEXT, "rounds": 1, **TAUS},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    save_gpt2(folder / "gpt2-tiny", layers=1)
    for name, config in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    options = ["--results-dir", str(folder / "results"), "--models-dir", str(folder)]
    swept = CliRunner().invoke(app, ["sweep", *map(str, sorted(folder.glob("*.yaml"))), *options])
    assert swept.exit_code == 0, swept.output
    assert "3 pictures" in swept.output
    return folder / "results"


def test_report_reads_what_every_measure_writes(results: Path, command: Commands) -> None:
    assert all(len(list(results.glob(f"{name}*/**/*.png"))) == 1 for name in ("fig3", "fig4", "fig5"))
    assert command("report", *sorted(results.parent.glob("*.yaml")), "--results-dir", results) == 0
    assert "REPORT.md and 3 pictures" in command.out
    text = (results / "REPORT.md").read_text()
    assert all(f"## {name}" in text for name in ("table1_latency", "table2_accuracy", "fig3_hit_rate_by_layer"))


def test_results_of_other_settings_are_told_apart(results: Path, command: Commands) -> None:
    changed = results.parent / "changed" / "fig4_memory.yaml"
    changed.parent.mkdir()
    changed.write_text((results.parent / "fig4_memory.yaml").read_text() + "seed: 7\n")
    refused = command.refused("report", changed, "--results-dir", results)
    assert "no results with the settings of these files, but 4 with others" in refused


def test_report_without_results_says_what_to_do(tmp_path: Path, command: Commands) -> None:
    assert "measure first" in command.refused("report", SMOKE, "--results-dir", tmp_path)
