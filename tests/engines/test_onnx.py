"""`engine="onnxruntime"`: graphs that are exported, kept and compared, and calls that they do not cover."""

import ctypes
import functools
import inspect
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import CacheConfig, CalibrationError, ConfigError, LLMCache, WrapError
from llmcache.engines import onnx
from llmcache.models import causal, causal_trial
from llmcache.support import threads
from tests.contract.models import fresh, plain
from tests.contract.streams import ask, batched, calibrated, classifier, requests
from tests.contract.test_heads import Around
from tests.engines.support import agree, figures
from tests.forks import in_child, needs_fork
from tests.tiny_models import padded, tokens

EXPORT = onnx._export


@pytest.fixture(autouse=True)
def exports(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Digests of the weights that were exported. Of equal weights, a run exports the first and copies its graph."""
    digests: list[str] = []
    base = tmp_path_factory.getbasetemp()
    copies = (base if worker_id == "master" else base.parent) / "graphs"
    copies.mkdir(exist_ok=True)

    def export(twin: Any, path: Path) -> None:
        digests.append(twin.digest)
        if not (copies / twin.digest).exists():
            made = tmp_path / f"made-{len(digests)}"
            made.mkdir()
            EXPORT(twin, made / path.name)
            with suppress(OSError):  # another worker was faster
                made.rename(copies / twin.digest)
        shutil.copytree(copies / twin.digest, path.parent, dirs_exist_ok=True)

    monkeypatch.setattr(onnx, "_export", export)
    return digests


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, Any]:
    """The engine's setting; its graphs are kept in a folder of the test."""
    return {"name": "onnxruntime", "folder": tmp_path / "kept"}


@pytest.fixture
def wrap(engine: dict[str, Any]) -> Any:
    """Wraps a tiny model."""
    return lambda family="bert", kind="classifier": LLMCache.wrap(fresh(family, kind), engine=engine)


def fail(message: str) -> Any:
    """Return a function that raises."""

    def act(*given: Any) -> Any:
        raise RuntimeError(message)

    return act


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "bare"),
        ("deberta-v2", "classifier"),
        ("modernbert", "classifier"),
        ("gpt2", "classifier"),
        ("qwen2", "bare"),
    ],
)
def test_families_compute_within_1e_4_of_the_model(wrap: Any, family: str, kind: str) -> None:
    cache, alone = wrap(family, kind), plain(family, kind)
    more = {} if family not in ("gpt2", "qwen2") else {"use_cache": False}
    calls = [
        padded([7, 4, 6]),
        padded([5, 9], seed=3, left=True),
        {"input_ids": tokens(2, 11, seed=5)},
        padded([1], seed=8),
        {**padded([20, 3], seed=11), "return_dict": False},
    ]
    for inputs in calls + calls:
        agree(cache, alone, **inputs, **more)
    stats = cache.stats()
    # With padding on the left, the head or pooler of some reads the first column, whose state is not promised.
    reads_padding, has_pooler = stats.bypassed == {"head_reads_padding": 2}, hasattr(cache.model, "pooler")
    assert reads_padding or stats.bypassed == {}
    n_eager = 3 if reads_padding else 2 if has_pooler else 0
    assert figures(cache).n_requests == (8 if n_eager else 10)
    assert figures(cache).eager == ({"padding": n_eager} if n_eager else {})
    assert (stats.hits, stats.errors) == ({"exact": 9 if reads_padding else 10}, 0)


@pytest.mark.parametrize("damage", ["none", "cut off", "another model's", "gone", "anyone may write"])
def test_a_kept_graph_is_made_anew_if_it_does_not_fit(
    wrap: Any, engine: dict[str, Any], damage: str, exports: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path, kept = wrap()._core.forward.engine.path, engine["folder"]
    assert len(exports) == 1 and not list(kept.glob(".new-*"))
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "another model's":
        other = wrap("gpt2", "classifier")._core.forward.engine.path
        shutil.copytree(other.parent, path.parent, dirs_exist_ok=True)
    elif damage == "gone":
        shutil.rmtree(path.parent)
    elif damage == "anyone may write":
        kept.chmod(0o777)
    exports.clear()
    agree(cache := wrap(), **padded([5, 3]))
    assert (figures(cache).n_requests, len(exports)) == (2, damage != "none")
    assert sum("is not used" in one.message for one in caplog.records) == (damage not in ("none", "gone"))
    kept.chmod(0o755)
    caplog.clear()
    assert figures(wrap()).name.startswith("onnxruntime ") and not caplog.records


@pytest.mark.parametrize("trouble", ["export", "output", "training", "half", "unknown family"])
def test_a_model_without_a_graph_runs_eagerly_with_one_warning(
    trouble: str, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = fresh("megatron" if trouble == "unknown family" else "bert", "bare")
    if trouble == "training":
        model.train()
    elif trouble == "half":
        model.bfloat16()
    elif trouble == "unknown family":  # whose padding a trial does not show
        monkeypatch.setattr(causal_trial, "look_at", lambda trunk: causal.UNTRIED)
    elif trouble == "export":
        monkeypatch.setattr(onnx, "_export", fail("no such operator"))
    elif trouble == "output":
        compute = onnx.OnnxGraph.compute
        monkeypatch.setattr(onnx.OnnxGraph, "compute", lambda *given: [one + 1 for one in compute(*given)])
    cache = LLMCache.wrap(model, engine=engine)
    why = {"export": "no such operator", "output": "off for", "training": "eval()"}
    why |= {"half": "float32", "unknown family": "register an adapter"}
    messages = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(messages) == 1 and why[trouble] in messages[0] and "run eagerly" in messages[0]
    model.eval()
    for _ in range(2):
        cache(**padded([6]))
    assert (figures(cache).name, figures(cache).n_graphs, figures(cache).n_failed) == ("eager", 0, 1)
    assert cache.stats().hits == {"exact": 1}


# -- calls that a graph does not cover ---------------------------------------------------------------------------------


def test_what_a_graph_does_not_cover_runs_eagerly_under_the_keys_of_the_model(wrap: Any) -> None:
    cache, alone = wrap(), plain("bert", "classifier")
    plain_call, odd = padded([6], seed=1), {**padded([6], seed=1), "position_ids": torch.arange(6)[None] + 1}
    for inputs in (plain_call, odd, plain_call, odd):
        agree(cache, **inputs)
    scopes = {entry.scope.engine for entry in cache._core.bank._entries.values()}
    assert len(scopes) == 2 and "" in scopes
    unmasked = {"input_ids": tokens(2, 5, seed=4), "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])}
    with torch.inference_mode():
        torch.testing.assert_close(cache.model(**unmasked).logits, alone(**unmasked).logits)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        cache.model(**padded([6], seed=6))
    assert cache.model(**padded([6], seed=7), output_hidden_states=True).hidden_states is not None
    cache.model(**padded([6], seed=8)).logits.sum().backward()
    assert figures(cache).eager == {"arguments": 1, "padding": 2, "torch_settings": 1}
    assert (figures(cache).n_requests, cache.stats().hits, cache.stats().errors) == (1, {"exact": 2}, 0)


def test_edited_weights_run_eagerly_until_the_engine_is_built_again(wrap: Any) -> None:
    cache, alone = wrap(), fresh("bert", "classifier")
    agree(cache, **padded([6]))
    layers = [one.bert.encoder.layer[0].output.dense for one in (cache.model, alone)]
    before = layers[0].weight.detach().clone()
    with torch.no_grad():
        for one in layers:
            one.weight.mul_(1.5)
    agree(cache, alone, **padded([6], seed=1))
    assert (figures(cache).eager, figures(cache).n_requests) == ({"weights": 1}, 1)
    cache.build_engine()
    agree(cache, alone, **padded([6], seed=1))
    assert (figures(cache).eager, figures(cache).n_requests) == ({}, 1)
    with torch.no_grad():
        layers[0].weight.copy_(before)
    agree(cache, **padded([6], seed=2))
    assert figures(cache).eager == {"weights": 1}


def test_after_clear_an_edit_that_left_no_trace_runs_eagerly(wrap: Any) -> None:
    cache, alone = wrap(), fresh("bert", "classifier")
    agree(cache, **padded([6]))
    (edited,) = tokens(1, 1, seed=0)[0].tolist()
    for model in (cache.model, alone):
        model.bert.embeddings.word_embeddings.weight.data[edited, 7] += 3
    cache.clear()
    agree(cache, alone, input_ids=torch.full((1, 6), edited))
    assert (figures(cache).eager, figures(cache).n_requests) == ({"weights": 1}, 1)


def test_padded_rows_run_eagerly_where_a_head_may_read_their_padding(engine: dict[str, Any]) -> None:
    model, calls = Around().eval(), (padded([6, 3]), padded([6]))
    model.model = fresh("bert", "classifier")  # whose graph other tests have made
    with torch.inference_mode():
        expected = [model(**inputs) for inputs in calls]
        cache = LLMCache.wrap(model, engine=engine)
        for inputs, logits in zip(calls, expected, strict=True):
            torch.testing.assert_close(cache.model(**inputs), logits, atol=1e-4, rtol=0)
    assert (figures(cache).eager, figures(cache).n_requests) == ({"padding": 2}, 1)


def test_a_graph_that_fails_in_service_is_not_used_again(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = wrap()
    with pytest.raises(IndexError), torch.inference_mode():
        cache.model(input_ids=tokens(1, 6), token_type_ids=torch.full((1, 6), 9))
    assert (figures(cache).n_graphs, figures(cache).n_failed) == (1, 0)

    monkeypatch.setattr(cache._core.forward.engine, "compute", fail("out of memory"))
    for seed in range(3):
        agree(cache, **padded([6], seed=seed))
    assert (figures(cache).n_graphs, figures(cache).n_failed, figures(cache).eager) == (0, 1, {"failed": 1})
    assert sum("graph of ONNX Runtime failed" in one.message for one in caplog.records) == 1
    assert cache.stats().errors == 0


# -- settings, copies, processes, threads ------------------------------------------------------------------------------


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxscript" else object())
    model = fresh("bert", "bare")
    with pytest.raises(ConfigError, match=r"needs onnxscript: pip install 'llmcache-torch\[onnx\]'"):
        LLMCache.wrap(model, engine="onnxruntime")
    cache = LLMCache.wrap(model, engine="auto")  # the failed wrap left nothing behind
    assert cache.stats().engine is None


def test_settings_are_checked_and_homes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, match in (("openvino", "eager"), ({"name": "auto", "precision": 8}, "unknown setting")):
        with pytest.raises(ConfigError, match=match):
            CacheConfig.make(None, engine=wrong)
    with pytest.raises(ConfigError, match="engine with tau"):
        CacheConfig.make(None, engine="onnxruntime", tau=0.9)
    assert CacheConfig.make(None, engine="eager", tau=0.9).engine.name == "eager"
    monkeypatch.setenv("LLMCACHE_HOME", str(tmp_path))
    with LLMCache.wrap(fresh("bert", "classifier"), engine="onnxruntime") as cache:
        assert isinstance(onnx.is_faster(cache._core.forward.engine), bool)
    with pytest.raises(WrapError):
        cache.build_engine()
    assert len(list((tmp_path / "engines").iterdir())) == 1


@needs_fork
def test_a_forked_process_and_each_number_of_threads_have_a_session_of_their_own(wrap: Any) -> None:
    cache, before = wrap(), torch.get_num_threads()
    try:
        for n_threads in (2, 1):
            torch.set_num_threads(n_threads)
            agree(cache, **padded([6], seed=n_threads))
    finally:
        torch.set_num_threads(before)
    sessions = cache._core.forward.engine._sessions
    asked = {n: one.get_session_options().intra_op_num_threads for (_, n), one in sessions.items()}
    assert asked == {1: 1, 2: 2}

    def compute() -> tuple[int, int]:
        agree(cache, **padded([5], seed=3))
        return figures(cache).n_requests, len(sessions)

    assert in_child(compute) == (3, 3)


@pytest.fixture
def n_products() -> Iterator[Callable[[], int]]:
    """Returns how many threads a product of MKL would take now; torch has two."""
    if inspect.isfunction(threads.limit_products):
        pytest.skip("torch has no MKL")
    library = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield library.MKL_Get_Max_Threads
    finally:
        torch.set_num_threads(before)


def test_products_of_a_head_take_one_thread_after_a_graph_and_no_others(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, n_products: Callable[[], int]
) -> None:
    cache, seen, linear = wrap(), [], nn.functional.linear

    def see(states: Any, weight: Any, bias: Any = None) -> Any:
        seen.append((len(weight) == cache.model.config.num_labels, n_products()))
        return linear(states, weight, bias)

    cache(**padded([4], seed=2))  # the first call tries the head
    monkeypatch.setattr(nn.functional, "linear", see)
    inputs = padded([6])
    for _ in range(2):  # computed by the graph; an exact hit
        cache(**inputs)
        assert seen == [(True, 1)] and n_products() == 2
        seen.clear()
    with torch.inference_mode():
        cache.model.bert(**padded([5], seed=1))  # without its head
    assert not seen and n_products() == 2
    cache(**inputs, position_ids=torch.arange(6)[None])  # the trunk runs eagerly, and so does its head
    assert {n for _, n in seen} == {2}
    seen.clear()
    monkeypatch.setattr(cache.model.classifier, "forward", fail("the head"))
    with pytest.raises(RuntimeError, match="the head"):
        cache(**inputs)
    assert n_products() == 2
    cache.unwrap()
    assert "forward" not in vars(cache.model)


def test_products_of_a_fingerprint_take_one_thread(
    monkeypatch: pytest.MonkeyPatch, n_products: Callable[[], int]
) -> None:
    seen, addmm = [], torch.addmm

    def see(*given: Any, **more: Any) -> Any:
        seen.append(n_products())
        return addmm(*given, **more)

    with calibrated() as cache:
        monkeypatch.setattr(torch, "addmm", see)
        ask(cache, requests(3, seed=5)[0])
    assert {*seen} == {1} and n_products() == 2


# -- saves and calibrations --------------------------------------------------------------------------------------------


def test_saves_hold_entries_of_the_engine_and_may_be_loaded_with_another(wrap: Any, tmp_path: Path) -> None:
    cache, both = wrap(), padded([6, 3])
    cache(**both)
    inputs = {name: one[1:, :3] for name, one in both.items()}  # a row of a batch serves the row alone
    agree(cache, **inputs)
    assert cache.stats().hits == {"exact": 1}
    cache.save(tmp_path / "saved")
    for given, hits in ((None, {"exact": 1}), ({"engine": "eager"}, {})):
        again = LLMCache.load(fresh("bert", "classifier"), tmp_path / "saved", config=given)
        agree(again, **inputs)
        assert again.stats().hits == hits


def test_calibrated_reuse_learns_from_the_engine_and_is_audited(engine: dict[str, Any]) -> None:
    settings = {"max_drop": 0.05, "audit": {"rate": 1.0, "in_background": False}}
    cache = LLMCache.wrap(classifier(), engine=engine, **settings)
    assert cache.calibrate(batched(requests(300)[0])).chosen is not None
    rungs = ask(cache, requests(60, seed=1)[0])
    n_before = figures(cache).n_requests
    cache.drain()
    audit = cache.stats().audit
    assert rungs.count("semantic") > 5 and audit is not None and audit.n_recomputed >= rungs.count("semantic")
    assert figures(cache).eager == {} and n_before >= 300
    assert figures(cache).n_requests - n_before >= audit.n_recomputed  # by the engine; batches are tried beside rows


@pytest.mark.parametrize("was_faster", [True, False])
def test_auto_keeps_the_engine_of_a_saved_calibration(
    tmp_path: Path, engine: dict[str, Any], was_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcache.calls.core.is_faster", lambda engine: was_faster)
    cache = LLMCache.wrap(classifier(), engine=engine | {"name": "auto"}, max_drop=0.2, audit=0)
    made = cache.calibrate(batched(requests(300)[0]))
    assert bool(made.engine) == was_faster
    cache.save(tmp_path / "saved")
    monkeypatch.setattr("llmcache.calls.core.is_faster", lambda engine: not was_faster)
    again = LLMCache.load(classifier(), tmp_path / "saved")
    assert again.calibration == made and (again.stats().engine is not None) == was_faster
    assert "semantic" in ask(again, requests(60, seed=1)[0])


def test_what_the_engine_changes_counts_in_the_bound(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LLMCache.wrap(classifier(), engine=engine, max_drop=0.2, audit=0, auto_bypass=False)
    compute = onnx.OnnxGraph.compute
    monkeypatch.setattr(onnx.OnnxGraph, "compute", lambda self, arguments: [-one for one in compute(self, arguments)])
    made = cache.calibrate(batched(requests(300, seed=2)[0]))
    assert made.chosen is None and made.curve[0].loss > 0.5 > made.curve[0].hit_rate


def test_what_an_engine_changes_is_measured_or_nothing_is_claimed(engine: dict[str, Any]) -> None:
    """A replaced forward leaves no twin, so the model itself cannot be computed beside its engine."""
    model = classifier()
    model.classifier.forward = functools.partial(nn.Linear.forward, model.classifier)
    cache = LLMCache.wrap(model, engine=engine, max_drop=0.2)
    with pytest.raises(CalibrationError, match="cannot be measured"):
        cache.calibrate(batched(requests(300)[0]))
