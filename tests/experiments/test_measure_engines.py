"""Measures `engines` and `engine_parity`, exported models, and the pages' tables of engines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.measures.engines import DRAFT, EAGER, INT8, WAYS, calls_of
from experiments.models.loading import encode, load
from experiments.models.onnx import OnnxModel, export, quantise
from experiments.report.pages import engines as pages
from experiments.report.pages import reuse
from experiments.report.pages.files import MISSING
from experiments.runs.folder import write_figures
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from experiments.tasks import build
from llmcache.errors import ConfigError
from tests.experiments.measuring import LEARN, TASK, N, learning, measured, told

pytest.importorskip("onnxruntime")
VALUES = learning("engines", threads=1, rounds=1, encoder="untrained")


def write(results: Path, group: str, **metrics: Any) -> None:
    write_figures(results / group / "run", {"measure": "engines", "seed": 0}, {}, {"n_counted": 1, **metrics})


def test_every_way_answers_the_same_requests_and_is_told_by_itself(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    outcome = measured(VALUES)
    assert torch.get_num_threads() == before
    assert [row["way"] for row in outcome.rows] == [EAGER, EAGER, *WAYS[1:]]  # the eager model is first and last
    metrics = json.loads(json.dumps(outcome.metrics, allow_nan=False))
    ways = {way["way"]: way for way in metrics["ways"]}
    assert tuple(ways) == WAYS and metrics["n_counted"] == N - LEARN
    assert all(way["ms"] > 0 and way["per_s"] == pytest.approx(1e3 / way["ms"]) for way in ways.values())
    assert ways["onnxruntime"]["changed_answers"] == ways["exact"]["changed_answers"] == 0
    assert {name for name in ways if ways[name]["bound"] is not None} <= {"reuse", "draft", "all"}
    assert "semantic" not in ways[DRAFT]["hits_by_rung"] and ways[DRAFT]["rungs"] in ("draft", "none")
    assert ways["reuse"]["rungs"] == "semantic" and "draft" not in ways["reuse"]["hits_by_rung"]
    assert ways["exact"]["engine"]["n_requests"] > 0 and not ways["exact"]["engine"]["eager"]
    weights = {name: way["weights_mb"] for name, way in ways.items()}
    assert weights[INT8] < weights["onnxruntime"] < weights["exact"] == weights["reuse"] < weights["draft"]
    assert weights["all"] == weights["draft"] and ways["semantic"]["cache_mb"] > 0 == ways[EAGER]["cache_mb"]
    assert told(VALUES, outcome).count("| support_desk | 0 |") == len(WAYS)


def test_calls_of_several_requests_are_padded_and_answered_by_row() -> None:
    ways = ["eager", "onnxruntime", "exact", "all"]
    outcome = measured(VALUES, batch=8, ways=ways)
    assert [way["way"] for way in outcome.metrics["ways"]] == ways
    assert [way["changed_answers"] for way in outcome.metrics["ways"]][1:3] == [0, 0]
    workload = build(make_experiment(VALUES).task, Folders(), 0)
    calls = calls_of(workload, 7)
    assert sum(call.n_rows for call in calls) == N and calls[1].first == 7
    longest = max(request.inputs["input_ids"].shape[1] for request in workload.requests[:7])
    assert calls[0].inputs["attention_mask"].shape == (7, longest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ways": ["eager", "int8"]}, "with eager and onnxruntime"),
        ({"ways": ["eager", "onnxruntime", "int4"]}, "wrong: int4"),
        ({"batch": 2}, "one request at a time"),
        ({"task": TASK | {"name": "stream"}}, "take held_out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_experiment(VALUES | changes)


def test_the_exported_model_is_the_model_and_its_head_stays_in_float32(tmp_path: Path) -> None:
    workload = build(make_experiment(VALUES).task, Folders(), 0)
    graph = export(workload.module, workload.requests[0].inputs, tmp_path / "model.onnx")
    whole, int8 = OnnxModel(graph), OnnxModel(quantise(graph, tmp_path / "int8.onnx"))
    inputs = dict(
        workload.tokenizer(["a card", "where is the card that I asked for"], padding=True, return_tensors="pt")
    )
    with torch.inference_mode():
        own = workload.module(**inputs)
        assert torch.allclose(whole(**inputs), own, atol=1e-4)
        assert (int8(**inputs) - own).abs().max() > 0
    import onnx

    kinds = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
    assert "DynamicQuantizeLinear" in kinds and kinds[-2:] == ["MatMul", "Add"]


def test_misses_of_the_engine_equal_the_model() -> None:
    values = {"measure": "engine_parity", "task": TASK | {"limit": 40}, "cache": {"engine": "onnxruntime"}}
    (figures,) = measured(values).metrics["summary"]
    assert figures["n_by_engine"] == figures["n_misses"] > 0
    assert figures["n_beyond"] == figures["n_changed"] == 0 < figures["difference_most"] < 1e-4
    (figures,) = measured(values, tolerance=1e-12).metrics["summary"]
    assert figures["n_beyond"] > 0


def test_each_claim_of_a_bound_with_a_draft_says_its_rungs(tmp_path: Path) -> None:
    options = {"answer": "class", "engine": "onnxruntime", "draft": "int8"}
    values = learning("bound", max_drops=[0.05, 0.2], parts=1, draws=5, cache=options)
    outcome = measured(values)
    metrics = json.loads(json.dumps(outcome.metrics, allow_nan=False))
    assert {row["rungs"] for row in outcome.rows} <= {"semantic", "draft", "semantic draft"}
    assert all(sum(claim["rungs"].values()) == claim["n_calibrations"] == 5 for claim in metrics["claims"])
    assert MISSING in reuse.bound_draft(tmp_path)
    write(tmp_path, "trust_bound_draft", task="desk", delta=0.05, claims=metrics["claims"])
    assert len(reuse.bound_draft(tmp_path).splitlines()) == 2 + 2


def test_a_filled_request_has_as_many_tokens_as_a_row_may_have() -> None:
    task = make_experiment(VALUES | {"task": TASK | {"is_filled": True, "max_length": 40}}).task
    assert {request.inputs["input_ids"].shape[1] for request in build(task, Folders(), 0).requests} == {40}


def test_an_architecture_is_a_trunk_with_random_weights() -> None:
    loaded = load("minilm-l6")
    with torch.inference_mode():
        states = loaded.model(**encode(loaded.tokenizer, "some text", 16)).last_hidden_state
    assert states.shape[-1] == 384 and torch.equal(
        next(loaded.model.parameters()), next(load("minilm-l6").model.parameters())
    )


def test_the_first_screen_has_one_stream_and_one_target(tmp_path: Path) -> None:
    assert MISSING in pages.first_screen(tmp_path)
    figures = {"ms": 2.0, "speedup": 4.0, "changed_answers": 0.002}
    rows = [
        {"threads": threads, "way": way, "max_drop": drop, **figures}
        for threads in (1, 2)
        for way, drop in ((EAGER, None), ("all", 0.005), ("all", 0.01))
    ]
    write(tmp_path, "engines", task=pages.FIRST[0], summary=rows)
    shown = pages.first_screen(tmp_path).splitlines()[2:]
    assert shown == [
        "| PyTorch, eager | 2.00 | 4.00 | 0.20 % |  |",
        "| llmcache, reuse and draft | 2.00 | 4.00 | 0.20 % | 0.5 % |",
    ]
