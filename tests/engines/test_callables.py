"""Models without a trunk: ONNX Runtime sessions, stand-ins of Optimum's models, and other callables."""

import inspect
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from llmcache import CalibrationError, ConfigError, LLMCache, UnfitBankError, UnsafeReuseError, UnsupportedModelError
from llmcache.generation import generate
from llmcache.models import callables
from llmcache.models.structure import fields_of
from tests.contract.streams import ask, batched, classifier, requests
from tests.inside import keep_quiet
from tests.tiny_models import TOKEN_HEADS, VOCABULARY, build, padded, save_bert, tokenizer, tokens

CLASSIFY = classifier()


def answer(input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None) -> Any:
    """A callable of torch: a classifier's output."""
    return CLASSIFY(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)


def arrays(input_ids: Any, attention_mask: Any) -> Any:
    """A callable of NumPy, which takes nothing else."""
    assert type(input_ids) is type(attention_mask) is np.ndarray
    with torch.no_grad():
        made = CLASSIFY(input_ids=torch.from_numpy(input_ids), attention_mask=torch.from_numpy(attention_mask)).logits
    return {"labels": made.argmax(dim=1).numpy(), "logits": made.numpy()}


def rungs(cache: LLMCache) -> list[str | None]:
    return [one.rung for one in cache.last]


class Counted:
    """Counts the rows that a callable computes, those of trials left out."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.n_rows, self.__signature__ = call, 0, inspect.signature(call)

    def __call__(self, **inputs: Any) -> Any:
        self.n_rows += len(inputs["input_ids"])
        return self.call(**inputs)

    def wrap(self, **settings: Any) -> LLMCache:
        cache = LLMCache.wrap(self, **{"digest": "one", "tokenizer": tokenizer(), **settings})
        self.n_rows = 0
        return cache


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """Return a graph written as text, with its weights in float32."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    held = [onnx.numpy_helper.from_array(one.astype(np.float32), name) for name, one in weights.items()]
    model.graph.initializer.extend(held)
    return model


def save_graph(path: Path, is_pooled: bool = True, sizes: str = "rows, tokens") -> Path:
    """Save a graph with its weights in another file: token vectors (B, T, D), or logits (B, C) of their masked mean."""
    rng = np.random.default_rng(0)
    output = "float[rows, 5] logits" if is_pooled else "float[rows, tokens, 32] last_hidden_state"
    model = parsed(
        f"""graph (int64[{sizes}] input_ids, int64[{sizes}] attention_mask) => ({output})
        <int64[1] second = {{1}}, int64[1] third = {{2}}> {{
            last_hidden_state = Gather(table, input_ids)
            cast = Cast<to = 1>(attention_mask)
            mask = Unsqueeze(cast, third)
            valid = Mul(last_hidden_state, mask)
            sums = ReduceSum<keepdims = 0>(valid, second)
            counts = ReduceSum<keepdims = 0>(mask, second)
            means = Div(sums, counts)
            logits = MatMul(means, weight)
        }}""",
        table=rng.standard_normal((VOCABULARY, 32)),
        weight=rng.standard_normal((32, 5)),
    )
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=64)
    return path


def save_dynamic(path: Path) -> Path:
    """Save a classifier that rounds by the largest value of a call: ids from 64 on, which no trial has, are large."""
    rng = np.random.default_rng(0)
    model = parsed(
        """graph (int64[rows, tokens] input_ids) => (float[rows, 5] logits)
        <int64[1] second = {1}, bool[8] small = {1, 1, 1, 1, 0, 0, 0, 0}> {
            signs = Gather(table, input_ids)
            values = Where(small, near, signs)
            rounded, scale, zero = DynamicQuantizeLinear(values)
            again = DequantizeLinear(rounded, scale, zero)
            means = ReduceMean<keepdims = 0>(again, second)
            logits = MatMul(means, weight)
        }""",
        table=np.sign(rng.standard_normal((VOCABULARY, 8))) * np.where(np.arange(VOCABULARY) < 64, 1.0, 9.7)[:, None],
        weight=rng.standard_normal((8, 5)),
        near=rng.uniform(0.5, 1, 8),
    )
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier's file."""
    return save_graph(tmp_path_factory.mktemp("graph") / "model.onnx")


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_answers_by_the_names_of_its_outputs(graph: Path) -> None:
    session = onnxruntime.InferenceSession(graph)
    cache = LLMCache.wrap(session)
    ids = tokens(3, 9).numpy()
    expected = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
    for rung in (None, "exact"):
        found = cache(input_ids=ids)  # a mask of ones is added
        assert type(found) is dict and type(found["logits"]) is np.ndarray
        np.testing.assert_array_equal(found["logits"], expected)
        assert rungs(cache) == [rung] * 3
    found = cache(input_ids=torch.from_numpy(ids[:1]), token_type_ids=torch.zeros(1, 9, dtype=torch.int64))
    assert type(found["logits"]) is np.ndarray  # types of zeros are left out
    assert cache.unwrap() is session


def test_a_batch_is_partly_served_and_padding_has_no_part_in_a_key(graph: Path) -> None:
    cache = LLMCache.wrap(onnxruntime.InferenceSession(graph))
    whole = padded([7, 4, 6])
    expected = cache(**whole)["logits"]
    short = {name: one[1:2, :4].numpy() for name, one in whole.items()}
    np.testing.assert_allclose(cache(**short)["logits"], expected[1:2], atol=1e-5)
    assert rungs(cache) == ["exact"]
    again = {name: torch.cat([one[2:], padded([7], seed=9)[name]]) for name, one in whole.items()}
    np.testing.assert_array_equal(cache(**again)["logits"][:1], expected[2:])
    assert rungs(cache) == ["exact", None]


def test_a_session_of_one_shape_is_tried_in_this_shape(tmp_path: Path) -> None:
    cache = LLMCache.wrap(onnxruntime.InferenceSession(save_graph(tmp_path / "model.onnx", sizes="1, 12")))
    for rung in (None, "exact"):
        assert cache(input_ids=tokens(1, 12))["logits"].shape == (1, 5) and rungs(cache) == [rung]
    with pytest.raises(Exception, match="Got: 9 Expected: 12"):
        cache(input_ids=tokens(1, 9))


def test_the_digest_of_a_session_is_that_of_its_files(graph: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("model.onnx", "model.onnx.data"):
        copied = shutil.copytree(graph.parent, tmp_path / name)
        session = onnxruntime.InferenceSession(copied / "model.onnx")
        digests.append(callables._digest_of(session))
        data = bytearray((copied / name).read_bytes())
        data[-1] ^= 1
        (copied / name).write_bytes(data)
        digests.append(callables._digest_of(session))
    assert digests[0] == digests[2] and len(set(digests)) == 3


# -- callables ---------------------------------------------------------------------------------------------------------


@dataclass
class Plain:
    logits: Tensor
    rest: Any = None


Named = namedtuple("Named", ["logits", "score"])

STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda logits: logits,
    "array": lambda logits: logits.numpy(),
    "tuple": lambda logits: (logits.argmax(dim=1), logits, None),
    "list": lambda logits: [logits, logits[:, :, None].expand(-1, -1, 3)],
    "named tuple": lambda logits: Named(logits, logits[:, 0].double()),
    "dict": lambda logits: {"score": logits[:, 0].half().numpy(), "logits": logits},
    "dataclass": Plain,
    "model output": lambda logits: SequenceClassifierOutput(logits=logits),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_hit_has_type_and_structure_of_the_callables_output(structure: str) -> None:
    def call(input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return STRUCTURES[structure](answer(input_ids, attention_mask).logits)

    counted = Counted(call)
    cache = counted.wrap()
    for inputs in (padded([5, 9]), {"input_ids": tokens(1, 1)}):
        expected, found = cache(**inputs), cache(**inputs)
        assert rungs(cache) == ["exact"] * len(inputs["input_ids"])
        assert type(found) is type(expected)
        assert list(fields_of(found)) == list(fields_of(expected))
        for one, other in zip(fields_of(found).values(), fields_of(expected).values(), strict=True):
            assert type(one) is type(other)
            assert one is None or (one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all()))
    assert counted.n_rows == 3


def test_arrays_and_tensors_go_in_and_the_callable_gets_what_it_takes() -> None:
    counted = Counted(arrays)
    cache, inputs = counted.wrap(), padded([5, 9])
    found = cache(**{name: one.numpy() for name, one in inputs.items()})
    assert {name: type(one) for name, one in found.items()} == {"labels": np.ndarray, "logits": np.ndarray}
    cache(**inputs)
    assert (counted.n_rows, rungs(cache)) == (2, ["exact"] * 2)


SPANS = build(TOKEN_HEADS["span"])
#: Callables whose answer for a row depends on its padding, or on the rows beside it.
WHOLE: dict[str, Callable[..., Any]] = {
    "answers by token": lambda input_ids, attention_mask: SPANS(input_ids, attention_mask),
    "heeds no mask": lambda input_ids, attention_mask: input_ids[:, :2].float() + input_ids.float().mean(1)[:, None],
    "mixes rows": lambda input_ids: functional.one_hot(input_ids % 7, 8).float().mean((0, 1)).expand(len(input_ids), 8),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_depends_on_the_rest_of_a_call_is_served_to_its_repeat_alone(name: str) -> None:
    cache, inputs = Counted(WHOLE[name]).wrap(), padded([5, 9])
    if name == "mixes rows":
        inputs = {"input_ids": tokens(2, 5)}
    expected, found = cache(**inputs), cache(**inputs)
    assert rungs(cache) == ["exact"] * 2
    assert all(torch.equal(*pair) for pair in zip(fields_of(found).values(), fields_of(expected).values(), strict=True))
    cache(**{name: one[:1, :5] for name, one in inputs.items()})
    assert rungs(cache) == [None]
    if name == "mixes rows":
        with pytest.raises(CalibrationError, match=r"request 0 has 2 rows, and rows .*: .* float"):
            cache.calibrate([inputs])
    if name == "answers by token":
        assert cache(**padded([3, 4], seed=4)).start_logits.shape == (2, 4)
        with pytest.raises(UnsafeReuseError, match="answers by token"):
            cache.calibrate([inputs])


@pytest.mark.parametrize("is_read", [str, Path.read_bytes], ids=["file", "bytes"])
def test_a_graph_with_one_scale_a_call_is_known_by_its_operators(tmp_path: Path, is_read: Any) -> None:
    session = onnxruntime.InferenceSession(is_read(save_dynamic(tmp_path / "model.onnx")))
    cache = LLMCache.wrap(session, digest="one")
    small, large = tokens(1, 5) % 50, tokens(1, 5) % 20 + 64
    for ids in (small, torch.cat([small, large]), small):
        np.testing.assert_array_equal(cache(input_ids=ids)["logits"], session.run(None, {"input_ids": ids.numpy()})[0])
    assert rungs(cache) == ["exact"]


def test_a_callable_that_fills_the_same_memory_again_is_tried_on_copies() -> None:
    """Else a trial compares an output with itself, and neither padding nor the rows beside seem to matter."""
    held = torch.zeros(64, 5)

    def fill(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        made = CLASSIFY(input_ids=input_ids).logits  # heeds no mask
        held[: len(made)] = made
        return held[: len(made)]

    cache, inputs = LLMCache.wrap(fill, digest="one", tokenizer=tokenizer()), padded([6, 8])
    with torch.inference_mode():
        cache(input_ids=inputs["input_ids"][:1, :6])
        row = {name: one[:1] for name, one in inputs.items()}
        torch.testing.assert_close(cache(**row).clone(), CLASSIFY(input_ids=row["input_ids"]).logits)


def test_a_module_in_training_mode_is_computed() -> None:
    model = nn.Module().eval()
    model.forward = lambda input_ids: CLASSIFY(input_ids=input_ids).logits
    cache = LLMCache.wrap(model, digest="one", tokenizer=tokenizer())
    for is_training, rung in ((False, None), (False, "exact"), (True, None)):
        model.train(is_training)
        cache(input_ids=tokens(1, 6, 1))
        assert rungs(cache) == [rung]
    assert cache.stats().bypassed == {"training": 1}


# -- what is not served ------------------------------------------------------------------------------------------------


def test_an_output_without_a_row_per_request_is_computed_and_counted() -> None:
    counted = Counted(lambda input_ids: {"logits": input_ids.float(), "loss": torch.tensor(1.0)})
    cache = counted.wrap()
    for _ in range(2):
        assert cache(input_ids=tokens(2, 5))["loss"] == 1
    assert (counted.n_rows, cache.stats().bypassed) == (4, {"more_output": 4})
    with pytest.raises(UnsafeReuseError, match="no logits"):
        cache.calibrate([{"input_ids": tokens(2, 5)}])


def test_an_output_of_another_structure_than_at_wrapping_is_returned_as_it_is() -> None:
    kinds: list[type] = [tuple]
    cache = Counted(lambda input_ids: kinds[-1]([answer(input_ids).logits])).wrap()
    cache(input_ids=tokens(1, 5))
    kinds.append(list)
    assert type(cache(input_ids=tokens(2, 5, seed=3))) is list
    assert type(cache(input_ids=torch.cat([tokens(1, 5), tokens(1, 5, seed=4)]))) is list
    assert type(cache(input_ids=tokens(1, 5))) is tuple


def test_other_arguments_reach_the_callable_and_are_computed() -> None:
    seen: list[Any] = []

    def call(input_ids: Tensor, **more: Any) -> Any:
        seen.append(more)
        return answer(input_ids)

    cache = Counted(call).wrap()
    for _ in range(2):
        cache(input_ids=tokens(1, 5), options={"a": []}, return_dict=False)
    assert seen[-2:] == [{"options": {"a": []}, "return_dict": False}] * 2
    assert cache.stats().bypassed == {"unknown_argument": 2}


def test_errors_of_the_callable_reach_the_caller(graph: Path) -> None:
    class Broken(Exception):
        pass

    def call(input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        if bool((input_ids == 5).all()):
            raise Broken
        return answer(input_ids, attention_mask)

    cache = Counted(call).wrap()
    with pytest.raises(Broken):
        cache(input_ids=torch.full((1, 4), 5))
    assert (cache.stats().health.failures, cache.last) == ({}, ())
    with pytest.raises(Exception, match="position_ids"):
        LLMCache.wrap(onnxruntime.InferenceSession(graph))(input_ids=tokens(1, 4), position_ids=torch.arange(4)[None])
    with pytest.raises(UnsupportedModelError, match=r"made-up tokens.*Broken") as raised:
        LLMCache.wrap(lambda input_ids: (_ for _ in ()).throw(Broken()), digest="one")
    assert "\n" not in str(raised.value)


NEEDS_LAYERS = ({"tau": 0.9}, {"draft": "int8"}, {"engine": "onnxruntime"}, {"adapter": "bert"}, {"payload": "cls"})
WITH_TOKENIZER = {"digest": "one", "tokenizer": tokenizer()}
WITHOUT_PATH = SimpleNamespace(**{name: lambda *args: [] for name in ("run", "get_inputs", "get_outputs")})


def holder(graph: Path) -> Any:
    """Return a callable that holds a session, but may use it as it likes."""
    made = type("Holder", (), {"__call__": lambda self, input_ids: input_ids})()
    made.session = onnxruntime.InferenceSession(graph)
    return made


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        *((answer, {"digest": "one", **settings}, "not with a callable") for settings in NEEDS_LAYERS),
        (answer, {**WITH_TOKENIZER, "embeddings": np.ones((5, 2))}, "5 rows"),
        (answer, {**WITH_TOKENIZER, "embeddings": np.ones(5)}, "for each token"),
        (answer, {**WITH_TOKENIZER, "embeddings": np.full((99, 2), np.nan)}, "finite"),
        (CLASSIFY, {"embeddings": np.ones((99, 2))}, "only with a callable"),
        (nn.Linear(2, 2), {}, r"give wrap\(\) a digest"),
        (holder, {}, "does not tell its weights apart from others: give digest="),
        (WITHOUT_PATH, {}, r"give digest='...'"),
        (answer, {}, r"give digest='...'"),
        ("model.onnx", {}, "a str cannot be wrapped"),
        (answer, {"digest": ""}, "digest=''"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(
    model: Any, settings: dict[str, Any], message: str, graph: Path
) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message) as raised:
        LLMCache.wrap(model(graph) if model is holder else model, **settings)
    assert "\n" not in str(raised.value)


def test_a_callable_is_neither_compiled_nor_continues_a_text() -> None:
    cache = LLMCache.wrap(answer, digest="one")
    with pytest.raises(ConfigError, match="no modules to compile"):
        cache.compile()
    with pytest.raises(UnsupportedModelError, match="cannot continue a text"):
        generate(cache.model, tokens(1, 4))


# -- the rest of the cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_table", [True, False])
def test_calibrated_reuse_is_audited_by_the_same_callable_and_saved(tmp_path: Path, has_table: bool) -> None:
    more = {"embeddings": CLASSIFY.get_input_embeddings().weight if has_table else None}
    counted = Counted(arrays)
    cache = keep_quiet(counted.wrap(audit={"rate": 1.0, "share": 1.0}, **more))
    ids, _ = requests(500, seed=1, noise=0.05)
    made = cache.calibrate(batched(ids[:400]), max_drop=0.05)
    assert made.chosen is not None and made.chosen.hit_rate > 0.5
    counted.n_rows = 0
    asked = ask(cache, ids[400:])
    n_served = asked.count("semantic")
    assert n_served > 25 and counted.n_rows == len(asked) - n_served - asked.count("exact")
    assert "semantic" in ask(cache, requests(40, seed=2, n_words=9, noise=0.0)[0])  # of another length
    cache.drain()
    audit = cache.stats().audit
    assert audit is not None and audit.n_recomputed == audit.n_drawn >= n_served
    cache.save(tmp_path / "saved")
    cache.unwrap()
    for other in ({"digest": "two", **more}, {"digest": "one", "embeddings": np.ones((VOCABULARY, 3))}):
        with pytest.raises(UnfitBankError, match="other weights"):
            LLMCache.load(counted, tmp_path / "saved", tokenizer=tokenizer(), **other)
    with LLMCache.load(counted, tmp_path / "saved", tokenizer=tokenizer(), digest="one", **more) as loaded:
        assert ask(loaded, ids[400:410]) == ["exact"] * 10
        assert "semantic" in ask(loaded, requests(20, seed=7, noise=0.05)[0])


def test_one_column_is_a_score_and_an_embedding_is_what_the_caller_says() -> None:
    cache = Counted(lambda input_ids: answer(input_ids).logits[:, :1]).wrap()
    assert cache._core.learn().reuse.calibrated.fitter.answers.name == "score"
    cache = Counted(lambda input_ids: answer(input_ids).logits).wrap(answer="embedding", audit=0)
    (case,) = cache.observe([{"input_ids": tokens(1, 5)}])
    logits = answer(tokens(1, 5)).logits[0].detach()
    np.testing.assert_allclose(case.answer, logits / logits.norm(), atol=1e-5)


def test_a_shared_store_serves_another_callable_of_the_same_digest(tmp_path: Path) -> None:
    store = {"name": "disk", "folder": str(tmp_path), "least_tokens": 0}
    for digest, n_computed in (("one", 2), ("one", 0), ("two", 2)):
        counted = Counted(arrays)
        with counted.wrap(digest=digest, store=store) as cache:
            assert list(cache(input_ids=tokens(2, 5))) == ["labels", "logits"]
            assert counted.n_rows == n_computed
            cache.drain()


# -- Optimum -----------------------------------------------------------------------------------------------------------


class OrtModel:
    """As Optimum's models are: no module, with a session, a config and a forward."""

    def __init__(self, path: Path, config: Any, output: Callable[[Tensor], Any]) -> None:
        self.session = onnxruntime.InferenceSession(path)
        self.config, self.output = config, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, **more: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        (made,) = self.session.run(None, {"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()})
        return self.output(torch.from_numpy(made))


def test_a_model_of_optimum_is_wrapped_as_it_is(graph: Path) -> None:
    model = OrtModel(graph, CLASSIFY.config, lambda logits: SequenceClassifierOutput(logits=logits))
    cache, inputs = LLMCache.wrap(model), padded([5, 9])
    expected, found = cache(**inputs, return_dict=True), cache(**inputs)
    assert type(found) is SequenceClassifierOutput and torch.equal(found.logits, expected.logits)
    assert rungs(cache) == ["exact"] * 2
    assert cache.model.config is model.config
    assert cache.unwrap() is model


def test_sentence_transformers_on_onnx_keep_one_vector_per_text(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert", "the parcel came late today thank you very much")
    parts = [modules.Transformer(str(tmp_path / "bert")), modules.Pooling(32, pooling_mode="mean")]
    model = SentenceTransformer(modules=parts, device="cpu")
    ort = OrtModel(save_graph(tmp_path / "model.onnx", is_pooled=False), parts[0].model.config, BaseModelOutput)
    del parts[0].model
    parts[0].model = ort
    texts = ["the parcel came late", "thank you very much"]
    expected = model.encode(texts)
    cache = LLMCache.wrap(model)
    assert cache.payload == "mean"
    for rung in (None, "exact"):
        np.testing.assert_allclose(model.encode(texts), expected, atol=1e-6)
        assert rungs(cache) == [rung] * 2
    assert cache.unwrap() is model and parts[0].model is ort
    with pytest.raises(ConfigError, match="draft"):
        LLMCache.wrap(model, draft="int8")
    assert parts[0].model is ort
