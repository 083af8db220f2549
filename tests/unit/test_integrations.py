"""Pipelines, Trainer and sentence-transformers on a wrapped model, used as they are without it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import LLMCache
from tests.models import BARE, CLASSIFIERS, GENERATORS, STRANGERS, TOKEN_HEADS, build, tokenizer

TEXTS = ["w5 w6 w7 w8", "w9 w10", "w11 w12 w13"]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_text_classification(batch_size: int) -> None:
    model = build(CLASSIFIERS["bert"])
    classify = tf.pipeline("text-classification", model=model, tokenizer=tokenizer(), batch_size=batch_size)
    plain = classify(TEXTS)
    cache = LLMCache.wrap(model, tokenizer=tokenizer())
    assert classify(TEXTS) == plain
    for ours, theirs in zip(classify(TEXTS[::-1]), plain[::-1], strict=True):
        assert ours["label"] == theirs["label"]
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 3}, {})


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("feature-extraction", BARE["bert"]),
        ("token-classification", TOKEN_HEADS["token"]),
        ("fill-mask", TOKEN_HEADS["masked"]),
    ],
)
def test_other_pipelines(task: Any, model: Any) -> None:
    wrapped = build(model)
    pipe = tf.pipeline(task, model=wrapped, tokenizer=tokenizer())
    text = "w5 w6 [MASK] w8"
    plain = pipe(text)
    cache = LLMCache.wrap(wrapped)
    pipe(text)
    warm = pipe(text)
    assert cache.stats().hits == {"exact": 1}
    if task == "feature-extraction":
        np.testing.assert_allclose(warm, plain, atol=1e-5)
    else:
        assert str(warm) == str(plain)


def test_text_generation() -> None:
    model = build(GENERATORS["llama"])
    write = tf.pipeline("text-generation", model=model, tokenizer=tokenizer("left"))
    settings = {"max_new_tokens": 6, "do_sample": False}
    plain = write(TEXTS[0], **settings)
    cache = LLMCache.wrap(model)
    assert write(TEXTS[0], **settings) == write(TEXTS[0], **settings) == plain
    assert cache.stats().hits == {"exact": 1}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Labelled texts, tokenised."""

    def __init__(self) -> None:
        encoded = tokenizer()(TEXTS * 2, padding=True)
        self.rows = [
            {"input_ids": ids, "attention_mask": mask, "labels": i % 5}
            for i, (ids, mask) in enumerate(zip(encoded["input_ids"], encoded["attention_mask"], strict=True))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer(optim: str, tmp_path: Path) -> None:
    model = build(CLASSIFIERS["bert"])
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path),
        optim=optim,
        learning_rate=0.02,
        max_steps=2,
        per_device_train_batch_size=3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = tf.Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    cache = LLMCache.wrap(model)
    before = trainer.predict(Rows()).predictions
    assert cache.stats().hits == {"exact": 3} or cache.stats().n_misses == 6  # texts come twice
    warm = trainer.predict(Rows()).predictions
    np.testing.assert_allclose(warm, before, atol=1e-5)
    assert cache.stats().n_hits >= 6
    trainer.train()
    assert cache.stats().bypassed["training"] == 6
    after = trainer.predict(Rows()).predictions
    with cache.disabled():
        plain = trainer.predict(Rows()).predictions
    np.testing.assert_allclose(after, plain, atol=1e-5)
    assert not np.allclose(after, before, atol=1e-3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-5)


def embedder(folder: Path, mode: str = "mean", model: nn.Module | None = None, **pooling: Any) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    (model or build(BARE["bert"])).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    parts = [modules.Transformer(str(folder)), modules.Pooling(32, pooling_mode=mode, **pooling)]
    return SentenceTransformer(modules=parts, device="cpu", prompts={"query": "w1 w2 w3 "})


@pytest.mark.parametrize("tau", [None, 0.9999])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max"])
def test_sentence_transformers(mode: str, tau: float | None, tmp_path: Path) -> None:
    model = embedder(tmp_path, mode)
    plain = model.encode(TEXTS)
    cache = LLMCache.wrap(model, tau=tau)
    np.testing.assert_allclose(model.encode(TEXTS), plain, atol=1e-6)
    np.testing.assert_allclose(model.encode(TEXTS[::-1]), plain[::-1], atol=1e-5)
    np.testing.assert_allclose(model.encode(TEXTS[1]), plain[1], atol=1e-5)
    stats = cache.stats()
    assert (stats.hits, stats.bypassed, stats.errors) == ({"exact": 4}, {}, 0)
    cache.unwrap()
    np.testing.assert_allclose(model.encode(TEXTS), plain, atol=1e-6)


def test_sentence_transformers_called_with_features(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    features = model.preprocess(TEXTS)
    plain = model.encode(TEXTS, convert_to_tensor=True)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        torch.testing.assert_close(cache(dict(features))["sentence_embedding"], plain, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"exact": 3}


def test_sentence_transformers_are_calibrated_on_texts(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    rng = np.random.default_rng(0)
    subjects = rng.integers(5, 90, (12, 12))  # a text is about one of them, and has two words of its own
    words = [[*subjects[rng.integers(12)], *rng.integers(5, 90, 2)] for _ in range(800)]
    texts = [" ".join(f"w{word}" for word in rng.permutation(row)) for row in words]
    with LLMCache.wrap(model, tokenizer=tokenizer(), payload="mean") as cache:
        found = cache.calibrate(texts[:700], max_drop=0.05)
        assert found.metric == "changed" and found.n_sources + found.n_tested == 700
        assert found.chosen is not None and found.chosen.hit_rate > 0
        served = model.encode(texts[700:], batch_size=8)
        assert cache.stats().hits["semantic"] > 0
        with cache.disabled():
            own = model.encode(texts[700:], batch_size=8)
        cosine = (served * own).sum(axis=1) / np.linalg.norm(served, axis=1) / np.linalg.norm(own, axis=1)
        assert (cosine < 0.98).mean() <= 0.15
        assert cache.stats().errors == 0


def test_a_similar_sentence_gets_the_stored_embedding(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    cache = LLMCache.wrap(model, tau=-1.0)
    first = model.encode("w5 w6 w7")
    np.testing.assert_allclose(model.encode("w9 w10"), first, atol=1e-6)
    assert cache.stats().hits == {"semantic": 1}


def test_token_embeddings_are_served_losslessly(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    plain = model.encode(TEXTS, output_value="token_embeddings")
    cache = LLMCache.wrap(model)
    for _ in range(2):
        for ours, theirs in zip(model.encode(TEXTS, output_value="token_embeddings"), plain, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"exact": 3}


def test_prompts_that_pooling_leaves_out(tmp_path: Path) -> None:
    """The pooled mean is over part of the tokens only, so an entry of the mean over all would be wrong."""
    model = embedder(tmp_path, include_prompt=False)
    plain = model.encode(TEXTS, prompt_name="query")
    cache = LLMCache.wrap(model, tau=0.9999)
    for _ in range(2):
        np.testing.assert_allclose(model.encode(TEXTS, prompt_name="query"), plain, atol=1e-5)
    assert cache.stats().n_hits == 3


def test_an_embedder_with_a_final_norm(tmp_path: Path) -> None:
    model = embedder(tmp_path, model=build(STRANGERS["modernbert"]))
    plain = model.encode(TEXTS)
    cache = LLMCache.wrap(model, tau=0.9999)
    for _ in range(2):
        np.testing.assert_allclose(model.encode(TEXTS), plain, atol=1e-5)
    assert cache.stats().n_hits == 3


def test_cross_encoders(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    config = build(BARE["bert"]).config
    config.num_labels = 1
    build(lambda: tf.BertForSequenceClassification(config)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [("w5 w6", "w7"), ("w8", "w9 w10")]
    plain = model.predict(pairs)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        np.testing.assert_allclose(model.predict(pairs), plain, atol=1e-5)
    assert cache.stats().hits == {"exact": 2}
