"""The benchmarks on a tiny model: they write every figure, and refuse bad input."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.measures.bench import latency, memory
from tests.experiments.commands import Commands
from tests.tiny_models import CLASSIFIERS, build

KINDS = ("nocache_ms", "miss_ms", "hit_ms", "exact_hit_ms", "floor_ms")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build(CLASSIFIERS["bert"]).save_pretrained(path)
    return path


@pytest.mark.parametrize("kept", [{"payload": "cls"}, {"payload": "sequence", "layers": "all"}])
def test_latency_writes_every_figure(folder: Path, tmp_path: Path, kept: dict[str, str], command: Commands) -> None:
    path = tmp_path / "figures.json"
    options = (
        f"--seq-len 32 --entries 64 --rounds 10 --block 10 --json {path} --results-dir {tmp_path / 'kept'}".split()
    )
    options += [word for name, value in kept.items() for word in (f"--{name}", value)]
    assert command("bench", "latency", "--model", str(folder), *options) == 0
    assert "10 calls of each kind: too few for p90 and p99" in command.out
    assert "nan" not in command.out.lower() and "None" not in command.out
    figures = json.loads(path.read_text())
    for kind in KINDS:
        assert figures[kind]["n"] == 10
        assert figures[kind]["median"] > 0
        assert figures[kind]["p90"] is figures[kind]["p99"] is None
    assert ({"batch_size": 1, "seq_len": 32, "entries": 64, "device": "cpu"} | kept).items() <= figures.items()
    assert figures["weights"] == folder.name
    written = tmp_path / "kept" / "bench_latency"
    metrics, env = (json.loads((written / name).read_text()) for name in ("metrics.json", "env.json"))
    assert metrics | {"environment": env} == figures
    config = yaml.safe_load((written / "config.yaml").read_text())
    assert config["entries"] == 64 and config["model"] == folder.name
    assert figures["service"]["rounds"] == 2 and {figures["service"][kind]["n"] for kind in KINDS} == {20}
    assert "2 service rounds of 10 calls" in command.out and "Interleaved" in command.out
    assert set(figures["ratios"]) == {f"{kind.removesuffix('_ms')}/nocache" for kind in KINDS if kind != "nocache_ms"}


def test_banks_are_full_so_every_miss_evicts(folder: Path) -> None:
    settings = latency.Settings(model=str(folder), seq_len=32, entries=64, rounds=10, batch_size=2)
    bench = latency.Bench(settings, latency.build(settings.model, 0, "cpu"))
    bench.fill()
    assert bench.cache.stats().n_stored == 64
    before = bench.cache.stats()
    with latency.torch.inference_mode():
        times = bench.run()
    after = bench.cache.stats()
    assert set(times) == {*(kind.removesuffix("_ms") for kind in KINDS), "mixed"}
    assert sum(after.n_evicted.values()) - sum(before.n_evicted.values()) == after.n_misses - before.n_misses > 0
    assert after.n_stored == 64


def test_memory_counts_what_was_stored() -> None:
    figures = memory.measure(memory.Settings(entries=200, width=32, seq_len=8))
    assert figures["n_stored"] >= 200
    assert figures["payload_bytes_per_entry"] == 32 * 2
    assert figures["storing_entries_per_s"] > figures["calls_entries_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("latency --model nowhere", "bert-base"),
        ("latency --model gpt2-wikitext", "make it: llmcache prepare gpt2-wikitext --models-dir models"),
        ("latency --device cuda:99", "(got 'cuda:99')"),
        ("latency --model {folder} --seq-len 500", "at most 64"),
        ("latency --json {folder}/none/figures.json", "folder that exists"),
        ("memory --width 20", "multiple of 8"),
        ("memory --seq-len 1000", "at most 512"),
    ],
)
def test_bad_input_is_one_line(folder: Path, options: str, part: str, command: Commands) -> None:
    assert part in command.refused("bench", *options.format(folder=folder).split())
