"""The measure `latency` and the benchmark of generation: their figures, and settings refused before measuring.

Defines the tiny GPT-2 that both measure.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from experiments.measures.bench import generation, latency, rounds
from experiments.measures.latency import SHOWN
from experiments.models import architectures as bench_models
from experiments.support.clock import Clock
from experiments.support.files import Folders
from llmcache import ConfigError
from tests.experiments.measuring import measured, told
from tests.tiny_models import BARE, PAD, VOCABULARY, build

WIDTH, LAYERS, TOKENS = 32, 3, 16
ENTRIES = {"as the paper": 64, "all tokens": 72, "pooled": 80}
TOO_FEW = {"as the paper": 64, "pooled": 64}
DTYPES = ["float32", "bfloat16"]
SMALL = {"measure": "latency", "models": ["tiny"], "seq_len": TOKENS, "rounds": 10, "entries": ENTRIES}
SHORT = {"prompt_tokens": 4, "new_tokens": 2, "rounds": 1}


def save_gpt2(folder: Path, layers: int = LAYERS, positions: int = 128) -> Path:
    """Save a tiny language model, no tokenizer."""
    shape = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": layers, "n_head": 4, "n_positions": positions}
    config = tf.GPT2Config(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=PAD)
    build(lambda: tf.GPT2LMHeadModel(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Two prepared models: `tiny`, which generates, and `encoder`, which does not."""
    path = tmp_path_factory.mktemp("models")
    save_gpt2(path / "tiny")
    build(BARE["bert"]).save_pretrained(path / "encoder")
    return Folders(models=path)


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if weights are loaded."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(latency, "build", fail)
    monkeypatch.setattr(generation, "build", fail)


class Counting:
    """A fake GPU on which every call takes 7 ms."""

    def __init__(self) -> None:
        self.synchronize = self.current_stream = lambda device: None

    def Event(self, enable_timing: bool) -> Any:
        return SimpleNamespace(record=lambda _: None, synchronize=lambda: None, elapsed_time=lambda _: 7.0)


def settings_of(folders: Folders, **more: Any) -> latency.Settings:
    return latency.Settings(str(folders.models / "tiny"), seq_len=TOKENS, entries=64, service_rounds=0, **more)


def measure_calls(folders: Folders, **more: Any) -> Any:
    return latency.measure(latency.Settings(**more))


def measure_all(folders: Folders, **more: Any) -> Any:
    return measured(SMALL, folders, **more)


def generate(folders: Folders, model: str = "tiny", **more: Any) -> Any:
    return generation.measure(str(folders.models / model), **{**SHORT, **more})


def remember(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """Record the results of a module's function or class from now on; return the list."""
    made, make = [], getattr(module, name)

    def remembered(*args: Any, **more: Any) -> Any:
        made.append(make(*args, **more))
        return made[-1]

    monkeypatch.setattr(module, name, remembered)
    return made


def test_rows_say_what_was_measured_and_its_bytes(folders: Folders) -> None:
    several = measured(SMALL, folders, dtypes=DTYPES, batch_sizes=[2]).rows
    rows = [*several, *measured(SMALL, folders, dtypes=DTYPES[:1], batch_sizes=[1], kept=["pooled"]).rows]
    named = [(row["kept"], row["batch_size"], row["dtype"]) for row in rows]
    assert named == [*((kept, 2, dtype) for kept in ENTRIES for dtype in DTYPES), ("pooled", 1, "float32")]
    classifier = tf.AutoModelForSequenceClassification.from_pretrained(folders.models / "tiny")
    n_weights = sum(parameter.numel() for parameter in classifier.parameters())
    for row in rows:
        itemsize = 4 if row["dtype"] == "float32" else 2
        n_numbers = WIDTH * {"pooled": 1, "all tokens": TOKENS}.get(row["kept"], LAYERS * TOKENS)
        assert row["model_mb"] == n_weights * itemsize / 1e6
        states = n_numbers * itemsize / 1e3
        assert states + WIDTH * 4 / 1e3 <= row["entry_kb"] < 2 * states + 1  # plus fingerprints
        assert row["entries"] == ENTRIES[row["kept"]]
        assert row["cache_mb"] == pytest.approx(row["entry_kb"] * row["entries"] / 1e3)
        assert row["hit_speedup"] == row["nocache_ms"] / row["hit_ms"]
        assert (row["model"], row["weights"], row["exact_hit_is_equal"]) == ("tiny", "tiny", True)
        assert (row["mixed_ms"] is None) == (row["batch_size"] == 1)
        assert row.keys() == rows[0].keys()


def test_only_as_the_paper_every_layer_is_searched_and_serves(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    benches = remember(monkeypatch, latency, "Bench")
    rows = measured(SMALL, folders, token_heads=["tiny"]).rows
    paper, tokens, pooled = ENTRIES
    assert [row["head"] for row in rows] == ["class"] * 3 + ["token"] * 2
    assert [row["kept"] for row in rows] == [paper, tokens, pooled, paper, tokens]
    for row, bench in zip(rows, benches, strict=True):
        stats = bench.cache.stats()
        is_paper = row["kept"] == "as the paper"
        assert set(stats.hits) == {"paper"}
        assert stats.reuses_by_layer == dict.fromkeys(range(LAYERS) if is_paper else [LAYERS - 1], stats.n_hits)
        assert stats.n_layers_skipped == LAYERS * stats.n_hits


def test_a_hit_that_runs_layers_stops_the_benchmark(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(folders, payload="sequence", layers="all")
    bench = latency.Bench(settings, bench_models.build(settings.model, 0, "cpu"))
    bench.fill()
    honest = bench.cache.stats
    monkeypatch.setattr(bench.cache, "stats", lambda: replace(honest(), n_layers_skipped=0))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"hits \{'paper': 1, 'layers run': 3\}"):
        bench.run()


def test_a_block_whose_calls_are_of_another_kind_stops_the_benchmark(folders: Folders) -> None:
    settings = settings_of(folders, payload="last")
    bench = latency.Bench(settings, bench_models.build(settings.model, 0, "cpu"))
    bench.fill()
    with torch.inference_mode():
        fresh = [bench.fresh() for _ in range(10)]
        assert len(bench.block("miss", fresh)) == 10
        with pytest.raises(RuntimeError, match="10 of 10 calls in a block were not the miss"):
            bench.block("miss", fresh)  # stored by now


def test_metrics_hold_the_rows_with_their_percentiles(folders: Folders) -> None:
    outcome = measured(SMALL, folders, kept=["pooled"])
    (row,), (call,) = outcome.rows, outcome.metrics["calls"]
    assert outcome.metrics["summary"] == [{name: row[name] for name in SHOWN}]
    assert row == {name: value for name, value in call.items() if name != "detail"}
    kinds = {"nocache", "miss", "hit", "exact_hit", "floor"}
    assert set(call["detail"]) == {*(f"{kind}_ms" for kind in kinds), "ratios", "service", "host"}
    assert (row["banks"], row["clock"], call["detail"]["host"]) == ("host", "perf_counter", None)
    assert call["detail"]["service"] is None and {row[f"service_{kind}_ms"] for kind in kinds} == {None}
    for kind in kinds:
        assert row[f"{kind}_ms"] == call["detail"][f"{kind}_ms"]["median"]
        assert call["detail"][f"{kind}_ms"]["n"] == 10
    assert row["miss_ratio"] == call["detail"]["ratios"]["miss/nocache"]["median"]
    assert outcome.metrics["generation"] == []
    assert outcome.metrics["threads"] == torch.get_num_threads()
    json.dumps(outcome.metrics, allow_nan=False)


def test_a_service_round_asks_whole_blocks_in_alternating_order() -> None:
    """The plain model gets the requests of the misses; ratios compare blocks of one round."""
    asked, numbers = [], itertools.count()
    taken = {"exact_hit": 1.0, "hit": 2.0, "miss": 12.0, "nocache": 10.0, "floor": 0.5}

    def ask(kind: str, calls: Sequence[int]) -> list[float]:
        asked.append((kind, list(calls)))
        return [taken[kind] * (2 if calls[0] else 1)] * len(calls)

    blocks = rounds.service(ask, lambda: next(numbers), 2, 3)
    with_cache, without = list(rounds.WITH), list(rounds.WITHOUT)
    assert [kind for kind, _ in asked] == [*with_cache, *without, *without[::-1], *with_cache[::-1]]
    assert [calls for _, calls in asked] == [[0, 1, 2]] * 5 + [[3, 4, 5]] * 5
    found = rounds.service_figures(blocks)
    assert found["ratios"]["miss/nocache"] == {"median": 1.2, "min": 1.2, "max": 1.2}
    assert (found["hit_ms"]["min"], found["hit_ms"]["max"], found["hit_ms"]["n"]) == (2.0, 4.0, 6)
    assert rounds.service_figures(rounds.service(ask, lambda: next(numbers), 0, 3)) is None


def test_banks_are_where_they_are_asked_to_be(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU. Times by its events are reported beside the host clock's."""
    made = remember(monkeypatch, latency, "Bench")
    wrapped = remember(monkeypatch, generation.LLMCache, "wrap")
    monkeypatch.setattr(latency, "Clock", lambda device: Clock("cuda", Counting()))
    asked = {"banks": ["host", "device"], "generate": ["tiny"], "new_tokens": 4, "generate_rounds": 3}
    outcome = measured(SMALL, folders, kept=["pooled"], **asked)
    assert [row["banks"] for row in outcome.rows] == ["host", "device"]
    assert [bench.cache.config.device for bench in made] == ["cpu", "model"]
    assert [row["banks"] for row in outcome.metrics["generation"]] == ["host", "device"]
    assert [cache.config.device for cache in wrapped] == ["cpu", "model"] * 2
    for row, call in zip(outcome.rows, outcome.metrics["calls"], strict=True):
        assert (row["clock"], row["nocache_ms"]) == ("CUDA events", 7.0)
        assert 0 < call["detail"]["host"]["nocache_ms"]["median"] != 7.0
    text = told(SMALL, outcome)
    assert "| banks |" in text and "| device |" in text and "Times are by CUDA events." in text


def test_a_hit_with_other_tokens_stops_the_benchmark(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = generation._Ways.generate

    def other_tokens(ways: Any, kind: str, *args: Any) -> torch.Tensor:
        return honest(ways, kind, *args) + (kind == "exact_hit")

    monkeypatch.setattr(generation._Ways, "generate", other_tokens)
    with pytest.raises(RuntimeError, match="exact_hit had 1 hits, or other tokens"):
        generate(folders)


@pytest.mark.usefixtures("_unmeasured")
@pytest.mark.parametrize(
    ("measure", "change", "part"),
    [
        (measure_all, {"kept": ["pooled", "everything"]}, "kept: 'everything' is not known; known: as the paper"),
        (measure_all, {"dtypes": ["float32", "float64"]}, r"dtypes\.1: .*'float32' or 'bfloat16' \(got 'float64'\)"),
        (measure_all, {"device": "abacus"}, r"device: .*\(got 'abacus'\)"),
        (measure_all, {"batch_sizes": [1, 17]}, r"entries: 'as the paper' needs 68 or more.*\(got 64\)"),
        (measure_all, {"entries": TOO_FEW}, r"entries: 'all tokens' needs 4 or more.*\(got None\)"),
        (measure_all, {"models": ["tiny", "nowhere"]}, r"model: nowhere is none of bert-base, distilbert, gpt2"),
        (measure_all, {"seq_len": 129}, r"seq_len: .*at most 128 tokens \(got 129\)"),
        (measure_all, {"generate": ["tiny", "encoder"], "new_tokens": 4}, r"encoder is no causal language model"),
        (measure_all, {"generate": ["tiny"], "new_tokens": 16}, r"new_tokens: .*some of the 16 tokens \(got 16\)"),
        (generate, {"dtype": "int8"}, r"dtype: give float32 or bfloat16 \(got 'int8'\)"),
        (measure_calls, {"batch_size": 16, "entries": 63}, r"entries: give at least 64.*\(got 63\)"),
        (measure_calls, {"layers": "some"}, r"layers: give last or all \(got 'some'\)"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_are_loaded(
    folders: Folders, measure: Callable[..., Any], change: dict[str, Any], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        measure(folders, **change)
