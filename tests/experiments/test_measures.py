"""Every measure, on tiny models: it runs, its rows have the same columns, and its figures agree with each other."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.data.streams.prompts import BLOCK
from experiments.measures import MEASURES
from experiments.measures import engines as engine_ways
from experiments.measures import ray_replicas as replicas
from experiments.measures import serve_load as load
from experiments.measures.audit import RULES
from experiments.measures.harness import WITH, WITHOUT
from experiments.measures.over_http.servers import free_port, is_ready
from experiments.measures.over_http.traffic import texts_of
from experiments.measures.overhead import LATER
from experiments.measures.policies import BEST
from experiments.measures.ray_replicas import PHASES
from experiments.methods.base import COMPUTED
from experiments.metrics.frontier import curves
from experiments.models.loading import encode
from experiments.report.pictures import PICTURES, draw_all
from experiments.report.write import write_report
from experiments.runs.grid import Named, make_experiment
from experiments.runs.runner import RunFolder
from experiments.support.environment import describe
from experiments.support.files import Folders
from experiments.support.redis_server import wait_until
from llmcache import LLMCacheError
from llmcache.calls.kv_fill import Pieces, fill
from llmcache.lab import load_served
from llmcache.reuse.audit.account import AuditAccount
from tests.experiments.helpers import LEARN, TASK, N, measured
from tests.redis_server import redis_server

Rows = Sequence[Any]
HERE = Path(__file__).parent
STUB = f"{{python}} {HERE / 'stub_server.py'} --port {{port}}"
LOADED = yaml.safe_load((HERE / "measures.yaml").read_text(encoding="utf-8"))
SETTINGS: dict[str, Any] = json.loads(json.dumps(LOADED).replace("STUB", STUB))
del SETTINGS["templates"]
ORT = "onnxruntime"
ALONE, CACHED = (ORT, "int8"), ("wrapped", "engine", "draft", "all")
NEEDS = {
    "lm_eval": "lm_eval",
    "engines": ORT,
    "engine_parity": ORT,
    "overhead": ORT,
    "second_pass": "sentence_transformers",
    "ray_replicas": "ray.serve",
}
SHARED = ("ray_replicas", "store_faults")  # they run a Redis


class StandIn:
    """Stands in for replicas on Ray, which tests/serving starts: a server whose answers are one text's vector."""

    def __init__(self, settings: Any) -> None:
        served = load_served(settings.model)
        vector = served.forward(encode(served.tokenizer, next(texts_of(0)), served.max_length))[0].tolist()
        self.port = free_port()
        options = ["--port", f"{self.port}", "--rung", "exact", "--ms", "4", "--reply", json.dumps([vector])]
        self._command = [sys.executable, str(HERE / "stub_server.py"), *options]
        self._process = subprocess.Popen(self._command)
        wait_until(lambda: is_ready(self.port))

    def pids(self) -> list[int]:
        return [self._process.pid]

    def replaced(self, pid: int, longest_s: float) -> None:
        self._process.wait()
        time.sleep(1)  # requests come meanwhile
        self._process = subprocess.Popen(self._command)
        wait_until(lambda: is_ready(self.port))

    def deploy(self) -> None:
        """Leave the server as it is."""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Exported:
    """Stands in for exported models, which test_tasks has: PyTorch's own, by the path of the graph."""

    def __init__(self) -> None:
        self.of: dict[Path, Any] = {}

    def export(self, module: Any, inputs: Any, path: Path) -> Path:
        self.of[path] = module
        path.write_bytes(bytes(4000))
        return path

    def quantise(self, graph: Path, path: Path) -> Path:
        self.of[path] = self.of[graph]
        path.write_bytes(bytes(1000))
        return path


def serve(rows: Rows, metrics: Any) -> None:
    alone, near, documents = metrics["methods"].values()
    assert list(metrics["methods"]) == ["nocache", "llmcache-tau=0.8", "documents"] and len(rows) == 3 * 40
    assert alone["speedup"] == 1.0 and alone["bytes"] is None and near["hit_rate"] > 0 < documents["bytes"]
    assert documents["cache_ms"]["n"] == 2 * 40 and (near["method"], near["options"]) == ("llmcache", {"tau": 0.8})


def observe(rows: Rows, metrics: Any) -> None:
    assert len(rows) == 40 and 0 < metrics["hit_rate"] < 1 and metrics["errors"] == 0 < metrics["state_bytes"]
    n_computed = round(40 * (1 - metrics["hit_rate"]))  # an entry lives for five requests
    assert 0 < metrics["entries"] <= 5 < metrics["expelled"] + metrics["evicted"] == n_computed - metrics["entries"]


def sweep(rows: Rows, metrics: Any) -> None:
    assert [(point["fingerprint"], point["tau"]) for point in rows] == [("mean", None), ("mean", 0.8)]
    ((live, replayed),) = zip(metrics["live"], rows[1:], strict=True)
    assert live["hit_rate_all"] == replayed["hit_rate"] >= rows[0]["hit_rate"] and live["speedup_all"] > 0


def layers(rows: Rows, metrics: Any) -> None:
    one, other = rows
    assert list(metrics["runs"]) == ["as_written", "per_layer", "own_tau"]
    assert one["hit_rate_as_written"] == other["hit_rate_as_written"] > 0  # all layers are hit alike
    assert one["hit_rate_per_layer"] <= other["hit_rate_per_layer"]  # a row that hits once, hits in later layers
    assert all(0 <= row["alike_by_layer"] <= 1 and -1 <= row["own_tau"] <= 1 for row in rows)


def latency(rows: Rows, metrics: Any) -> None:
    assert [(row["kept"], row["entries"]) for row in rows] == [("as the paper", 64), ("pooled", 80)]
    kinds = {*WITH, *WITHOUT}
    for row, call in zip(rows, metrics["calls"], strict=True):
        n_numbers = 32 * (3 * 16 if row["kept"] == "as the paper" else 1)
        assert 4 * (n_numbers + 32) / 1e3 <= row["entry_kb"] < 2 * 4 * n_numbers / 1e3 + 1
        assert row["hit_speedup"] == row["nocache_ms"] / row["hit_ms"] and row["exact_hit_is_equal"]
        assert {call["detail"][f"{kind}_ms"]["n"] for kind in (*kinds, "mixed")} == {10}
        assert {call["detail"]["service"][f"{kind}_ms"]["n"] for kind in kinds} == {2 * 10}
    (figures,) = metrics["generation"]
    assert figures["exact_hit_ms"]["n"] == 3 and "prefix_hit_ms" not in figures


def compiled(rows: Rows, metrics: Any) -> None:
    ((row,), (call,)) = rows, metrics["calls"]
    assert (row["rows"], row["tokens"], row["bucket"], row["not_run"]) == (2, 12, 16, "")
    assert row["miss_compiled_ratio"] == call["detail"]["ratios"]["miss_compiled/nocache"]["median"]
    assert call["detail"]["hit_compiled_ms"]["n"] == 10 and row["compile_s"] > 0


def trust(rows: Rows, metrics: Any) -> None:
    others = [(name, None) for name in ("paper", "doccache", "exact_response", "semantic_response")]
    assert curves(rows) == [("llmcache", "growing"), ("llmcache", "frozen"), ("student", "frozen"), *others]
    assert (metrics["learn"], metrics["n_counted"], metrics["n"]) == (LEARN, N - LEARN, N)
    for row in metrics["calibrated"]:
        assert row["is_certified"] == (row["sources"] == "frozen" and row["limit"] is not None)
        assert row["bound"] is None or row["bound"] <= row["max_drop"]
        assert row["by_intent"]["worst"]["changed"] >= row["changed_answers"]
    assert any(row["hits_by_rung"].get("semantic") for row in metrics["calibrated"])
    assert all(None in (row["hindsight hits"], row["calibrated hits"]) for row in metrics["summary"])


def bound(rows: Rows, metrics: Any) -> None:
    drops = [claim["max_drop"] for claim in metrics["claims"]]
    draws = 1 if metrics["arrival"] else 3
    assert [(row["part"], row["draw"], row["max_drop"]) for row in rows] == [
        (part, draw, drop) for part in range(2) for draw in range(draws) for drop in drops
    ]
    for row in rows:
        assert row["hit_rate"] * metrics["n_population"] == pytest.approx(
            round(row["hit_rate"] * metrics["n_population"])
        )
        assert row["rungs"] == "semantic"
        assert row["is_beyond_chance"] <= row["is_violated"] == (row["changed_answers"] > row["max_drop"])
        assert row["bound"] is None or row["bound"] <= row["max_drop"]
    assert metrics["n_population"] == N - (LEARN if metrics["arrival"] else metrics["n_sources"])
    assert all(claim["n_calibrations"] == 2 * draws for claim in metrics["claims"])


def service(rows: Rows, metrics: Any) -> None:
    assert [row["who"] for row in rows] == ["nocache", "llmcache"] * 3
    computed = {row["computed"] for row in rows if row["who"] == "llmcache"}
    assert len(computed) == 1 and 0 < computed.pop() < 1  # each pass begins from what was learned alone
    (way,) = metrics["ways"]
    assert way["hit_ms"]["n"] + way["miss_ms"]["n"] == way["plain_ms"]["n"] == 3 * metrics["n_counted"]
    assert way["audit"]["n_waiting"] == 0 and way["speedup_min"] <= way["speedup"] <= way["speedup_max"]


def set_rates(rows: Rows, metrics: Any) -> None:
    (way,) = metrics["ways"]
    assert metrics["n_counted"] == 200 and len(rows) == 3 and way["hit_rate_set"] == 0.6
    assert way["share_of_bound"] == way["speedup"] * (1 - way["hit_rate"])
    assert metrics["learn"] or way["hit_rate"] == pytest.approx(0.6, abs=0.01)


def engines(rows: Rows, metrics: Any) -> None:
    ways = {way["way"]: way for way in metrics["ways"]}
    assert [row["way"] for row in rows] == ["eager", *ways] == ["eager", *SETTINGS["engines"]["ways"]]
    assert ways["onnxruntime"]["changed_answers"] == 0 < ways["all"]["engine"]["n_requests"]
    assert {name for name in ways if ways[name]["bound"] is not None} <= {"draft", "all"}
    assert "semantic" not in ways["draft"]["hits_by_rung"] and ways["semantic"]["cache_mb"] > 0
    mb = {name: way["weights_mb"] for name, way in ways.items()}
    assert mb["int8"] < mb["onnxruntime"] < mb["draft"] == mb["all"] and ways["eager"]["cache_mb"] == 0


def engine_parity(rows: Rows, metrics: Any) -> None:
    assert len(rows) == 40 and metrics["n_by_engine"] == metrics["n_misses"] == metrics["n_beyond"] > 0
    assert metrics["n_changed"] == 0 < metrics["difference_most"] < 1e-4


def serve_load(rows: Rows, metrics: Any) -> None:
    cache, plain = metrics["points"]
    assert (cache["server"], plain["server"]) == ("cache", "no_cache") and cache["goodput"] > plain["goodput"]
    assert plain["gain"] == pytest.approx(cache["goodput"] / plain["goodput"]) and cache["gain"] is None
    assert cache["hit_rate"] == 1 and plain["hit_rate"] is None and plain["changed_answers"] == 1


def serve_soak(rows: Rows, metrics: Any) -> None:
    assert metrics["rate"] == pytest.approx(1.2 * metrics["capacity"]) and metrics["waiting_max"] == 3 and rows
    assert metrics["n_unequal"] == metrics["n_checked"] >= metrics["n"] // 100 and metrics["n_failed"] > 0


def serve_streams(rows: Rows, metrics: Any) -> None:
    cold, warm, beside = metrics["summary"]
    assert (cold["tokens"], warm["tokens"], beside["tokens"]) == (15, 15, 12 + 4)  # of three streams; of two
    assert (cold["cached_tokens"], beside["cached_tokens"]) == (3 * 2, 2 * 2) and metrics["same_answers"] == 1 + 6 + 2
    for row in rows:
        assert 0.005 < row["ttft_s"] <= row["ttft_max_s"] < row["wall_s"] and row["longest_gap_s"] > 0.004
        assert row["tokens_per_s"] == row["tokens"] / row["wall_s"]


def ray_replicas(rows: Rows, metrics: Any) -> None:
    before, missing, after, _ = metrics["points"]
    assert [point["phase"] for point in metrics["points"]] == list(PHASES) and metrics["n_kills"] == 1
    assert missing["n"] > 0 < metrics["missing_s"] and not any(point["n_wrong"] for point in metrics["points"])
    assert max(row["n_tries"] for row in rows) > 1  # what failed is asked again
    assert before["n_failed_in_hands"] > 0 == before["n_failed_others"] == after["n_lost"] and after["hit_rate"] == 1


def second_pass(rows: Rows, metrics: Any) -> None:
    assert [(row["known"], row["hit_rate"], row["bypassed"]) for row in rows] == [(0, 0, 0), (0.5, 0.5, 0)]
    assert all(row["largest_difference"] < 1e-5 for row in rows) and len(metrics["ways"]) == 2
    assert all(way["dict_speedup"] > 0 for way in metrics["ways"])


def prefix(rows: Rows, metrics: Any) -> None:
    base, own = rows[:16], rows[16:]
    figures, known = metrics["methods"]["llmcache"], [row for row in own if row["n_known"]]
    alone, cached = (sum(row["ttft_ms"] for row in some) for some in (base, own))
    assert figures["speedup"] == pytest.approx(alone / cached, rel=1e-2) and figures["n_same"] == 16
    assert figures["known_ceiling"] == sum(row["n_tokens"] for row in known) / sum(
        row["n_tokens"] - row["n_reused"] for row in known
    )
    assert all(row["n_known"] <= row["n_reused"] < row["n_known"] + BLOCK for row in own)  # whole blocks are known
    assert figures["hits_by_rung"] == {"prefix": len(known) / 16} and figures["hit_ms"]["n"] == len(known)
    assert figures["share_reused"] >= metrics["facts"]["share_known"] > 0.4


def unshared(rows: Rows, metrics: Any) -> None:
    figures = metrics["methods"]["llmcache"]
    assert metrics["facts"]["ceiling"] == 1.0 and figures["known"] is figures["hit_ms"] is None


def policies(rows: Rows, metrics: Any) -> None:
    rates = {(row["policy"], row["share"]): row["hit_rate"] for row in rows}
    for name in ("lru", "s3_fifo", "w_tinylfu"):
        assert rates[name, 0.05] < rates[name, 0.3] <= rates[BEST, 0.3] and rates[name, 0.05] < rates[BEST, 0.05]
    assert rates["s3_fifo", 0.05] > rates["lru", 0.05]


def audit(rows: Rows, metrics: Any) -> None:
    """Each rule's alarm rings for gross faults and keeps still without one; the rule in use is the account's own."""
    assert all(row["n_rang"] == 8 for row in rows if row["times"] == 20)
    assert not any(row["n_rang"] for row in rows if row["scenario"] in ("right, a pass", "right"))
    former, *_, rule = RULES
    cost = {row["rule"]: row["recomputed"] for row in rows if row["scenario"] == "right"}
    assert 0 < cost[rule.name] < cost[former.name] / 2
    account = AuditAccount(0.005, rule.floor, 0.05)
    for share in (0.0, 0.3, 1.0):  # suspicious at first, not suspicious later
        for _ in range(2000):
            factor = rule.factor(account.alarm)
            if (sample := account.see(share)) is not None:
                assert 1 / sample.weight == pytest.approx(rule.chance(np.array(share), factor))


def prefix_limit(rows: Rows, metrics: Any) -> None:
    known, too_long = rows
    assert (known["n_known"], known["n_same"], known["not_run"]) == (32, 2, "") and known["max_diff"] < 1e-4
    assert min(known[f"{name}_ms"] for name in ("plain", "cache", "limit", "batching", "copy")) > 0
    assert too_long["limit_ms"] is None and "128 tokens (got 256)" in too_long["not_run"]


def store_faults(rows: Rows, metrics: Any) -> None:
    *kinds, total = metrics["summary"]
    assert total["n"] == 5 == sum(row["n"] for row in kinds) and total["hits"] > 0 < metrics["n_read"]
    assert (total["wrong"], total["stale"], total["crashed"]) == (0, 0, 0)


def decode(rows: Rows, metrics: Any) -> None:
    (figures,) = metrics["generation"]
    assert len(rows) == 5 == len(figures["times"]) and rows[1]["kv_cache_ratio"] == 1.0
    for times in figures["times"].values():
        assert [times[f"{name}_ms"]["n"] for name in ("ttft", "tpot", "itl", "e2el")] == [3, 3, 9, 3]
    assert all(0 < row["ttft_ms"] < row["e2el_ms"] for row in rows)


def parity(rows: Rows, metrics: Any) -> None:
    assert (metrics["n_same"], metrics["n_near_ties"], metrics["n_wrong"], metrics["errors"]) == (40, 0, 0, 0)
    assert metrics["n_evicted"] > metrics["memory"][4]["n_evicted"] and metrics["hits"]["prefix"] > 5
    assert metrics["max_bytes"] / 4 < metrics["most_bytes"] <= metrics["max_bytes"] and len(metrics["memory"]) == 10


def parity_of_batches(rows: Rows, metrics: Any) -> None:
    assert (metrics["n_same"], metrics["n_near_ties"], metrics["n_wrong"], metrics["errors"]) == (40, 0, 0, 0)
    assert metrics["n_prompts"] < 40 and metrics["n_first_tokens"] > 10 and 0 < metrics["logprob_difference"] < 1e-4
    assert {row["served"] for row in rows} == {"prefix", COMPUTED} and metrics["share_reused"] > 0.4


def lm_eval(rows: Rows, metrics: Any) -> None:
    assert (metrics["acc_cached"], metrics["acc_norm_cached"]) == (metrics["acc_plain"], metrics["acc_norm_plain"])
    assert metrics["logprob_difference"] < 1e-4 and (metrics["requests"], metrics["errors"]) == (12, 0)
    assert [row["columns"] for row in rows] == [metrics["columns_plain"], metrics["columns_cached"]]
    # The first layer runs on what the cache counts as computed; the search for a batch is left out of both.
    computed = 1 - metrics["token_hit_rate"]
    assert metrics["columns_cached"] == pytest.approx(computed * metrics["columns_plain"]) and computed < 0.8


def tree(rows: Rows, metrics: Any) -> None:
    by_case = {row["case"]: row for row in metrics["summary"]}
    assert all(row["same"] and row["max_diff"] < 1e-4 for row in by_case.values())
    assert by_case["8 equal rows of 500"]["ideal"] == 25 < by_case["8 equal rows of 500"]["plain"] == 200
    for name in ("8 equal rows of 500", "16 rows, 300 shared and 20 own", "num_beams=4"):
        assert by_case[name]["cached"] == by_case[name]["ideal"]


def turns(rows: Rows, metrics: Any) -> None:
    assert (metrics["same"], metrics["n"]) == (3, 3) and [row["n_tokens"] for row in rows] == [20, 34, 48]
    assert [row["n_computed"] for row in rows] == [row["n_new"] for row in rows] == [20, 11, 11]
    later = [row["limit_ttft_s"] / row["llmcache_ttft_s"] for row in rows[1:]]
    assert metrics["of_limit"] == pytest.approx(sum(later) / 2) and metrics["turns"] == 2


def commands(rows: Rows, metrics: Any) -> None:
    assert metrics["summary"] == [*rows, {"command": "all", "seconds": sum(row["seconds"] for row in rows)}]


def advise(rows: Rows, metrics: Any) -> None:
    alone, *others = rows
    assert (alone["speedup"], alone["changed"], alone["bound"]) == (1.0, 0.0, 0.0) and metrics["best"]
    assert {way["name"] for way in others} >= {"ONNX Runtime", "llmcache, exact repeats"}
    assert sum("needs" in way["problem"] for way in others if "reuse" in way["name"]) == 4  # not at 20 %


def beside(rows: Rows, metrics: Any) -> None:
    phases = {one["when"]: one["n"] for one in metrics["summary"]}
    assert phases["before"] >= 150 and sum(phases.values()) == len(rows) == 240
    assert all(one["p50_ms"] <= one["p99_ms"] for one in metrics["summary"])


def overhead(rows: Rows, metrics: Any) -> None:
    assert [row["way"] for row in rows] == [*ALONE, *(name for way in CACHED for name in (way, *ALONE))]
    by_way = {way: {one["served"]: one for one in metrics["summary"] if one["way"] == way} for way in CACHED}
    for name in ("wrapped", "engine"):  # each request is computed once, and repeats but for the last ones are hits
        assert [by_way[name][served]["n"] for served in (COMPUTED, "exact")] == [90, 90 - LATER]
    for own in by_way.values():
        assert sum(one["n"] for one in own.values()) == 2 * 90 - LATER
    for one in metrics["summary"]:
        if one["sessions"]:
            assert one["sessions_ms"] > 0
        else:
            assert one["served"] != COMPUTED and (one["sessions_ms"], one["beside_ms"]) == (0, one["ms"])


BATCHES = ("parity, of batches", "parity, padded on the right", "parity, without position ids")
CHECKS: dict[str, Callable[[Rows, Any], None]] = {
    **{name: globals()[name] for name in MEASURES},
    "set_rates, of repeats": set_rates,
    "bound, in an order": bound,
    **dict.fromkeys(BATCHES, parity_of_batches),
    "prefix, of unshared prompts": unshared,
}


@pytest.fixture(autouse=True)
def _stand_ins_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LEAST", 20)
    monkeypatch.setattr(replicas, "running_replicas", lambda settings, n: closing(StandIn(settings)))
    exported = Exported()
    for name in ("export", "quantise"):
        monkeypatch.setattr(engine_ways, name, getattr(exported, name))
    monkeypatch.setattr(engine_ways, "OnnxModel", exported.of.__getitem__)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_measure_runs_and_its_figures_agree(
    name: str, models: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = name.partition(",")[0]
    if measure in NEEDS:
        pytest.importorskip(NEEDS[measure])
    if measure in SHARED:  # skips the test without Redis
        with redis_server(tmp_path):
            pass
    monkeypatch.setenv("VIRTUAL_ENV", "/of/the/caller")
    values = {"measure": measure, **SETTINGS[name]}
    outcome = measured(values, models)
    assert len({tuple(row) for row in outcome.rows}) <= 1
    CHECKS[name](outcome.rows, json.loads(json.dumps(outcome.metrics, allow_nan=False)))
    folder = RunFolder(tmp_path, Named("trial", "run", make_experiment(values)))
    folder.write(describe(0), outcome.rows, {"seconds": 1.0, **outcome.metrics}, MEASURES[measure].details)
    text = write_report(tmp_path, [folder.path]).read_text()  # a report shows it
    assert "## trial\n" in text and "nan" not in text.lower() and "None" not in text
    for picture in draw_all([folder.path]):
        assert f"]({picture.relative_to(tmp_path)})" in text and "<svg" in picture.read_text()
    assert (measure in PICTURES) == ("![trial]" in text)


def test_every_measure_is_tried() -> None:
    assert {name.partition(",")[0] for name in SETTINGS} == set(MEASURES)


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("trust", {"max_drops": [0.001]}, "learn=150: 150 requests cannot show"),
        ("trust", {"cache": {"delta": 2}}, "cache.delta"),
        ("trust", {"task": TASK | {"limit": LEARN}}, "learn=150: the stream has 150 requests; learn from fewer"),
        ("bound", {"arrival": {"name": "repeats", "n": 150}}, "arrival.n=150: nothing would follow"),
        ("engines", {"ways": ["eager", "int8"]}, "ways: .* with eager and onnxruntime"),
        ("engines", {"batch": 2}, "ways: the semantic response cache takes one request at a time"),
        ("engines", {"task": TASK | {"name": "stream"}}, "task.name: the head is fitted here; take held_out"),
        ("serve_load", {"task": TASK | {"name": "stream"}}, "task.name: .*take held_out"),
        ("serve_load", {"servers": {"cache": f"{STUB} --fail-every 1"}}, r"cache: none of .* answered with 200.*503"),
        ("serve_soak", {"task": TASK | {"data": {"path": "a.csv"}}}, "task.data.path: .*a stream without an end"),
        ("latency", {"kept": ["everything"]}, "kept: 'everything' is not known; known: as the paper"),
        ("latency", {"batch_sizes": [17]}, "entries: 'as the paper' needs 68 or more"),
        ("latency", {"device": "abacus"}, r"device: .*\(got 'abacus'\)"),
        ("latency", {"models": ["nowhere"]}, "model: nowhere is none of bert-base, distilbert, gpt2"),
        ("latency", {"seq_len": 129}, r"seq_len: .*at most 128 tokens \(got 129\)"),
        ("latency", {"generate": ["bert"]}, ".*bert is no causal language model"),
        ("decode", {"shared_tokens": 40}, "shared_tokens: fewer than the prompt's 40"),
        ("parity", {"new_tokens": 500}, "max_length: .* is more than this model's 512 positions"),
        ("prefix", {"task": SETTINGS["layers"]["task"]}, "task.name: .*give the task prompts"),
        ("prefix", {"methods": [{"method": "doccache", "treshold": 1}]}, r"methods\[0\]\.treshold"),
        ("prefix_limit", {"shares": [1.0]}, "shares: 1.0 of 64 tokens are no whole blocks of 16, or all of it"),
        ("policies", {"policies": ["lruu"]}, "policy: unknown name 'lruu'"),
        (
            "observe",
            {"task": {"name": "squad_v2", "model": "untrained", "data": "made"}, "cache": {"tau": 0.8}},
            "tau=0.8 with a model that has a",
        ),
        ("second_pass", {"sizes": 101}, "sizes=.*different texts, not .*; ask for fewer"),
        (
            "commands",
            {"commands": {"one": "echo no such thing >&2; exit 3"}},
            "commands.one: exit status 3\nno such thing",
        ),
    ],
)
def test_what_cannot_be_measured_is_told(name: str, changes: Any, error: str, models: Folders) -> None:
    with pytest.raises(LLMCacheError, match=f"^{error}"):
        measured({"measure": name, **SETTINGS[name]}, models, **changes)


def test_wrong_tokens_are_seen(models: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of prefixes come back multiplied by -10."""

    def lie(kv_cache: Any, number: int, keys: Pieces, values: Pieces) -> None:
        fill(kv_cache, number, keys, [-10 * piece for piece in values])

    monkeypatch.setattr("llmcache.calls.columns.fill", lie)
    done = measured({"measure": "prefix", **SETTINGS["prefix"]}, models)
    figures = done.metrics["methods"]["llmcache"]
    assert figures["n_same"] == sum(row["is_same"] for row in done.rows[16:]) < 16 and not figures["is_same"]
    done = measured({"measure": "parity", **SETTINGS["parity"]}, models)
    assert done.metrics["n_wrong"] == sum(row["is_near_tie"] == 0 for row in done.rows) > 3
    monkeypatch.setattr("llmcache.calls.tree.fill", lie)
    for name in BATCHES:
        done = measured({"measure": "parity", **SETTINGS[name]}, models)
        assert done.metrics["n_wrong"] > 3 and done.metrics["logprob_difference"] > 0.1
