"""Libraries on top of models: sentence-transformers, pipelines, Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import LLMCache, NotCachedError
from tests.contract.judge import ask, check_same
from tests.contract.models import fresh, sentence_model
from tests.tiny_models import tokenizer, tokens

TEXTS = ["w5 w6 w7 w8 w9", "w9 w10", "w11 w12 w13", "w9 w10"]


def check_twice(cache: LLMCache, do: Callable[[], Any], expected: Any) -> None:
    """Check that cold and warm runs give the expected result, and the warm one has hits."""
    for turn in ("cold", "warm"):
        before = cache.stats().n_hits
        check_same(tensors(do()), expected, where=turn)
    assert cache.stats().n_hits > before
    assert cache.stats().errors == 0


def tensors(found: Any) -> Any:
    """Turn arrays and floats into tensors, which are compared within rounding."""
    if isinstance(found, list):
        return [tensors(one) for one in found]
    if isinstance(found, dict):
        return {name: tensors(one) for name, one in found.items()}
    if isinstance(found, float | np.floating):
        return torch.tensor(float(found))
    return torch.from_numpy(found) if isinstance(found, np.ndarray) else found


# -- sentence-transformers ---------------------------------------------------------------------------------------------


Embedder = Callable[..., Any]


@pytest.fixture
def embedder(tmp_path: Path) -> Embedder:
    prompts = {"query": "w1 w2 ", "passage": "w3 "}
    return lambda *after, **pooling: sentence_model(tmp_path, *after, prompts=prompts, **pooling)


ALIKE = {
    "to tensor": {"convert_to_tensor": True},
    "normalised": {"normalize_embeddings": True},
    "cut": {"truncate_dim": 8},
    "one at a time": {"batch_size": 1},
    "by name of a prompt": {"prompt_name": "query"},
    "by prompt": {"prompt": "w3 w4 "},
    "of tokens": {"output_value": "token_embeddings"},
    "of all": {"output_value": None},
    "in bits": {"precision": "binary"},
}


def test_ways_to_encode(embedder: Embedder) -> None:
    """docs/howto.md: a wrapped embedder is used as before, also for token embeddings."""
    model = embedder()
    ways = {name: lambda how=how: tensors(model.encode(TEXTS, **how)) for name, how in ALIKE.items()}
    ways |= {"query": lambda: tensors(model.encode_query(TEXTS)), "text": lambda: tensors(model.encode_document(TEXTS))}
    expected = {name: way() for name, way in ways.items()}
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        for name, way in ways.items():
            with cache.namespace(name):  # separately
                check_twice(cache, way, expected[name])
        for name, way in ways.items():  # in one namespace
            check_same(way(), expected[name], where=name)


def test_one_vector_a_text_is_kept_and_states_are_computed(embedder: Embedder) -> None:
    """By default an entry is one vector; token states that a caller reads are the model's own, however late."""
    model, whole, first = embedder(), embedder(), tokenised()
    expected = ask(whole, dict(first))
    with LLMCache.wrap(model) as cache:
        check_same(dict(ask(model, dict(first))), dict(expected))
        assert cache.stats().nbytes == 2 * 4 * (32 + 32)  # the pooled vector, and BERT's own pooler output
        found = ask(model, dict(first))
        assert isinstance(found, dict) and found.keys() == expected.keys()
        check_same({**found}, dict(expected))
        check_same(ask(model, dict(first)).pop("token_embeddings"), expected["token_embeddings"])
        assert cache.stats().hits == {"exact": 4}
        states = ask(model[0], dict(first))["token_embeddings"]  # before they are pooled
        check_same(states, ask(whole[0], dict(first))["token_embeddings"])
        assert cache.stats().bypassed == {"token_states": 2}
        features = ask(model, dict(first))
        for value in first.values():  # read after the caller has overwritten the inputs
            value.fill_(1)
        check_same(features["token_embeddings"], expected["token_embeddings"])


def tokenised() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(2, 7), "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])}


def dense() -> list[nn.Module]:
    from sentence_transformers.sentence_transformer import modules

    return [modules.Dense(32, 8), modules.Normalize()]


POOLINGS: dict[str, tuple[dict[str, Any], Callable[[], list[nn.Module]]]] = {
    "mean": ({"pooling_mode": "mean"}, list),
    "mean, one vector a text": ({"pooling_mode": "mean"}, list),
    "last": ({"pooling_mode": "lasttoken"}, list),
    "weighted": ({"pooling_mode": "weightedmean"}, list),
    "largest": ({"pooling_mode": "max"}, list),
    "two": ({"pooling_mode": ["mean", "cls"]}, list),
    "without the prompt": ({"include_prompt": False}, list),
    "dense and normalised": ({}, dense),
}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling(embedder: Embedder, pooling: str) -> None:
    """docs/howto.md: every pooling gives its own vectors; entries are one vector where that suffices."""
    settings, after = POOLINGS[pooling]
    torch.manual_seed(0)
    model = embedder(*after(), **settings)
    ways = [{"prompt_name": "query"}, {"prompt_name": "passage"}, {}] if "prompt" in pooling else [{}]
    expected = [tensors(model.encode(TEXTS, **how)) for how in ways]
    with LLMCache.wrap(model, payload="mean" if "one vector" in pooling else "auto", auto_bypass=False) as cache:
        for how, embeddings in zip(ways, expected, strict=True):
            check_twice(cache, lambda how=how: model.encode(TEXTS, **how), embeddings)
            check_same(tensors(model.encode(TEXTS[::-1], batch_size=3, **how)), embeddings.flip(0))
            check_alone(cache, lambda text, how=how: model.encode([text], **how), embeddings)


def check_alone(cache: LLMCache, encode: Callable[[str], Any], expected: Any) -> None:
    """Compare the vector of each text, encoded without padding: padding is not part of a pooled text's key."""
    for text, vector in zip(TEXTS, expected, strict=True):
        check_same(tensors(encode(text))[0], vector)
        assert [one.rung for one in cache.last] == ["exact"]


@pytest.mark.parametrize("pooling", [{"pooling_mode": "max"}, {"pooling_mode": ["cls", "mean"]}], ids=["max", "two"])
def test_texts_padded_on_the_left(embedder: Embedder, pooling: dict[str, Any]) -> None:
    """inside/reuse.md: where the first column may be read, padding there is part of the key, and repeats are served."""
    model = embedder(**pooling)
    model.tokenizer.padding_side = "left"
    expected = tensors(model.encode(TEXTS))
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        check_twice(cache, lambda: model.encode(TEXTS), expected)
        assert [one.rung for one in cache.last] == ["exact"] * len(TEXTS)


@pytest.mark.parametrize("settings", [{}, {"tau": 0.9999, "layers": "last"}], ids=["exact", "tau"])
def test_a_router_of_two_encoders(embedder: Embedder, settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """docs/howto.md: of several encoders one is cached, the others are named and counted; each route can be wrapped."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router

    model = SentenceTransformer(modules=[Router.for_query_document(embedder(), embedder())], device="cpu")

    def ask_both() -> None:
        for encode in (model.encode_query, model.encode_document):
            check_same(tensors(encode(texts)), expected)

    texts = TEXTS[:3]
    expected = tensors(model.encode_query(texts))
    with LLMCache.wrap(model, auto_bypass=False, **settings) as cache:
        for _ in range(2):
            ask_both()
            assert [one.bypassed for one in cache.last] == ["other_encoder"] * len(texts)
        stats = cache.stats()
        assert (stats.n_requests, stats.n_hits) == (4 * len(texts), len(texts))
        assert stats.bypassed == {"other_encoder": 2 * len(texts)}
        with cache.only_if_cached(), pytest.raises(NotCachedError):
            model.encode_document(texts)
    assert [one.message.split(":")[1] for one in caplog.records] == [" 0.sub_modules.document.0.model"]
    caches = [LLMCache.wrap(route, auto_bypass=False) for route in model[0].sub_modules.values()]
    for _ in range(2):
        ask_both()
    assert [cache.stats().n_hits for cache in caches] == [len(texts)] * 2
    assert len(caplog.records) == 1


def test_a_sparse_encoder(tmp_path: Path) -> None:
    """inside/reuse.md: SPLADE's pooling heeds the mask, so padding is not part of the key."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    fresh("bert", "masked").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    parts = [Transformer(str(tmp_path), transformer_task="fill-mask"), SpladePooling()]
    model = SparseEncoder(modules=parts, device="cpu")

    def encode(texts: list[str]) -> Any:
        return model.encode(texts, convert_to_sparse_tensor=False)

    expected = encode(TEXTS)
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        check_twice(cache, lambda: encode(TEXTS), expected)
        check_alone(cache, lambda text: encode([text]), expected)


def test_cross_encoders(tmp_path: Path) -> None:
    """docs/howto.md: wrap the `CrossEncoder` itself; `predict` and `rank` give the same results."""
    from sentence_transformers import CrossEncoder

    model = fresh("bert", "classifier")
    model.config.num_labels, model.config.problem_type, model.classifier = 1, None, nn.Linear(32, 1)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    ranker = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [("w5 w6", text) for text in TEXTS]
    expected, ranks = tensors(ranker.predict(pairs)), ranker.rank("w5 w6", TEXTS)
    logits = tensors(ranker.predict(pairs, activation_fn=nn.Identity(), batch_size=2))
    with LLMCache.wrap(ranker, auto_bypass=False) as cache:
        check_twice(cache, lambda: ranker.predict(pairs), expected)
        check_same(tensors(ranker.rank("w5 w6", TEXTS)), tensors(ranks))
        check_same(tensors(ranker.predict(pairs, activation_fn=nn.Identity(), batch_size=2)), logits)


# -- pipelines ---------------------------------------------------------------------------------------------------------

PIPELINES: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "text-classification, in batches": ("distilbert", "classifier", TEXTS, {"batch_size": 2, "top_k": None}),
    "feature-extraction": ("roberta", "bare", TEXTS, {"return_tensors": False}),
    "fill-mask": ("bert", "masked", ["w5 [MASK] w7", "[MASK] w8"], {"top_k": 3}),
    "zero-shot-classification": ("bert", "classifier", TEXTS[:2], {"candidate_labels": ["w20", "w30", "w40"]}),
    "text-generation, in batches": (
        "gpt2",
        "causal",
        TEXTS,
        {"max_new_tokens": 4, "do_sample": False, "batch_size": 2},
    ),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines(case: str) -> None:
    """docs/howto.md: wrap the model; the pipeline gives the same results."""
    family, kind, texts, how = PIPELINES[case]
    task, model = case.split(",")[0], fresh(family, kind)
    if task == "zero-shot-classification":
        model.config.label2id = {"entailment": 0, "neutral": 1}
    pipe = tf.pipeline(task, model=model, tokenizer=tokenizer("left" if task == "text-generation" else "right"))
    pipe.tokenizer.model_input_names = ["input_ids", "attention_mask"]
    expected = tensors(pipe(texts, **how))
    with LLMCache.wrap(model, tokenizer=pipe.tokenizer, auto_bypass=False) as cache:
        check_twice(cache, lambda: pipe(texts, **how), expected)


# -- Trainer -----------------------------------------------------------------------------------------------------------


def labelled() -> list[dict[str, Any]]:
    encoded = tokenizer()(TEXTS, padding=True)
    rows = zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    return [{"input_ids": ids, "attention_mask": mask, "labels": i % 2} for i, (ids, mask) in enumerate(rows)]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_trainer_on_a_wrapped_model(tmp_path: Path) -> None:
    """docs/howto.md: training steps bypass the cache, and older entries never serve after them."""
    model = fresh("bert", "classifier")
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), learning_rate=0.02, max_steps=2, per_device_train_batch_size=2, seed=3,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = labelled()
    trainer = tf.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)

    def predict() -> Any:
        return tensors(trainer.predict(data).predictions)

    before, loss = predict(), trainer.evaluate()["eval_loss"]
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        check_twice(cache, predict, before)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-5)
        trainer.train()
        model.eval()
        with cache.disabled():
            after = predict()
        assert not torch.allclose(after, before, atol=1e-3)
        check_twice(cache, predict, after)
    check_same(predict(), after, exact=True)
