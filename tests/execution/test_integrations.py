"""Pipelines, Trainer and sentence-transformers on a wrapped model, used as they are without it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor

from llmcache import ConfigError, LLMCache
from tests import inside
from tests.execution.calls import Make
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, STRANGERS, TOKEN_HEADS, build, padded, tokenizer

TEXTS = ["w5 w6 w7 w8", "w9 w10", "w11 w12 w13"]
LONGER = "w1 w2 w3 w5 w6 w7 w8 w9"
Embedder = Callable[..., Any]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "make"),
    [
        ("feature-extraction", BARE["bert"]),
        ("token-classification", TOKEN_HEADS["token"]),
        ("fill-mask", TOKEN_HEADS["masked"]),
    ],
)
def test_other_pipelines(task: Any, make: Make) -> None:
    model = build(make)
    pipe = tf.pipeline(task, model=model, tokenizer=tokenizer())
    text = "w5 w6 [MASK] w8"
    plain = pipe(text)
    cache = LLMCache.wrap(model)
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


def labelled() -> list[dict[str, Any]]:
    """Tokenised texts with labels."""
    encoded = tokenizer()(TEXTS * 2, padding=True)
    rows = zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    return [{"input_ids": ids, "attention_mask": mask, "labels": i % 5} for i, (ids, mask) in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer(optim: str, tmp_path: Path) -> None:
    model, rows = build(CLASSIFIERS["bert"]), labelled()
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
    trainer = tf.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    cache = LLMCache.wrap(model)
    before = trainer.predict(rows).predictions
    assert cache.stats().hits == {"exact": 3} or cache.stats().n_misses == 6  # texts come twice
    warm = trainer.predict(rows).predictions
    np.testing.assert_allclose(warm, before, atol=1e-5)
    assert cache.stats().n_hits >= 6
    trainer.train()
    assert cache.stats().bypassed["training"] == 6
    after = trainer.predict(rows).predictions
    with cache.disabled():
        plain = trainer.predict(rows).predictions
    np.testing.assert_allclose(after, plain, atol=1e-5)
    assert not np.allclose(after, before, atol=1e-3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-5)


# -- sentence-transformers ---------------------------------------------------------------------------------------------


@pytest.fixture
def embedder(tmp_path: Path) -> Embedder:
    """Makes models of a trunk and a pooling layer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    def make(mode: str = "mean", trunk: Make = BARE["bert"], **pooling: Any) -> Any:
        build(trunk).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        parts = [modules.Transformer(str(tmp_path)), modules.Pooling(32, pooling_mode=mode, **pooling)]
        return SentenceTransformer(modules=parts, device="cpu", prompts={"query": "w1 w2 w3 "})

    return make


@pytest.fixture
def model(embedder: Embedder) -> Any:
    """A mean of BERT's states."""
    return embedder()


def check_encoding(model: Any, expected: Any, n: int = 2, **more: Any) -> None:
    """Assert that texts are embedded as expected, cold and warm."""
    for _ in range(n):
        np.testing.assert_allclose(model.encode(TEXTS, **more), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [None, 0.9999])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max"])
def test_sentence_transformers(embedder: Embedder, mode: str, tau: float | None) -> None:
    model = embedder(mode)
    plain = model.encode(TEXTS)
    cache = LLMCache.wrap(model, tau=tau)
    check_encoding(model, plain, n=1)
    np.testing.assert_allclose(model.encode(TEXTS[::-1]), plain[::-1], atol=1e-5)
    np.testing.assert_allclose(model.encode(TEXTS[1]), plain[1], atol=1e-5)
    stats = cache.stats()
    # Of `max` it is not known that it heeds the mask: alone, without padding, a text is another request.
    n_exact = 3 if mode == "max" else 4
    assert (stats.hits["exact"], stats.bypassed, stats.errors) == (n_exact, {}, 0)
    cache.unwrap()
    np.testing.assert_allclose(model.encode(TEXTS), plain, atol=1e-6)


def with_module(model: Any, where: str) -> Any:
    """A model of the same modules and another one: before its pooling, or after."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import CNN, Dropout, WordWeights

    torch.manual_seed(0)
    parts = list(model)
    tokens = {"module_input_name": "token_embeddings"}
    kinds: dict[str, Any] = {
        "dense before": [parts[0], Dense(32, 32, **tokens), parts[1]],
        "normalize before": [parts[0], Normalize(**tokens), parts[1]],
        "cnn before": [parts[0], CNN(32, 32, kernel_sizes=[1]), parts[1]],
        "weights before": [parts[0], WordWeights(tokenizer().get_vocab(), {"w1": 5.0, "w5": 0.1}), parts[1]],
        "dense on tokens after": [*parts, Dense(32, 32, **tokens)],
        "dense after": [*parts, Dense(32, 8)],
        "normalize after": [*parts, Normalize(), Dropout(0.5)],
    }
    return SentenceTransformer(modules=kinds[where], device="cpu").eval()


@pytest.mark.parametrize(
    "where", ["dense before", "normalize before", "cnn before", "weights before", "dense on tokens after"]
)
def test_a_module_that_reads_tokens_gets_all_of_them(model: Any, where: str) -> None:
    model = with_module(model, where)
    plain, tokens = model.encode(TEXTS), model.encode(TEXTS, output_value="token_embeddings")
    with LLMCache.wrap(model, tau=1.0) as cache:
        assert cache.payload == "sequence"
        check_encoding(model, plain)
        for found, expected in zip(model.encode(TEXTS, output_value="token_embeddings"), tokens, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert cache.stats().n_hits > 0
    with pytest.raises(ConfigError, match="payload='mean': this model's sentence embedding reads more than that"):
        LLMCache.wrap(model, payload="mean")


@pytest.mark.parametrize("where", ["dense after", "normalize after"])
def test_a_module_that_reads_what_was_pooled_changes_nothing(model: Any, where: str) -> None:
    model = with_module(model, where)
    plain = model.encode(TEXTS)
    with LLMCache.wrap(model, payload="mean") as cache:
        check_encoding(model, plain)
        assert cache.stats().hits == {"exact": len(TEXTS)}


@pytest.mark.parametrize("index", ["one", "more"])
def test_token_embeddings_that_are_not_kept_are_nan(model: Any, index: str) -> None:
    """In a batch of one the trunk is not run at all for a hit; in one of more only for the others."""
    known, texts = (TEXTS[:1], TEXTS[:1]) if index == "one" else (TEXTS[:2], TEXTS)
    plain, tokens = model.encode(texts), model.encode(texts, output_value="token_embeddings")
    with LLMCache.wrap(model, payload="mean") as cache:
        for _ in range(2):  # the second time before the layers
            model.encode(known)
        n_hits = cache.stats().n_hits
        for text, found, expected in zip(
            texts, model.encode(texts, output_value="token_embeddings"), tokens, strict=True
        ):
            if text in known:
                assert found.isnan().all()
            else:
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert cache.stats().n_hits > n_hits
        whole = model.encode(texts, output_value=None)
        assert all(one["token_embeddings"].isnan().all() for one in whole)
        np.testing.assert_allclose(np.stack([one["sentence_embedding"] for one in whole]), plain, atol=1e-5)
        features = model.preprocess(texts)
        with torch.inference_mode():  # modules called one by one
            assert model[0](dict(features))["token_embeddings"].isnan().all()
            pooled = model[1](model[0](dict(features)))["sentence_embedding"]
            output = model[0].auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        np.testing.assert_allclose(pooled, plain, atol=1e-5)
        assert output.last_hidden_state.isnan().all() and output.pooler_output.isnan().all()
        assert cache.stats().errors == 0
    assert not (model[1]._forward_hooks or model[1]._forward_pre_hooks)
    np.testing.assert_array_equal(model.encode(texts), plain)


def test_unwrapping_between_trunk_and_pooling_leaves_no_nan(model: Any) -> None:
    plain = model.encode(TEXTS)
    cache = LLMCache.wrap(model, payload="mean")
    model.encode(TEXTS)
    hook = model[0].auto_model.register_forward_hook(lambda *_: cache.unwrap() and None)
    check_encoding(model, plain, n=1)
    assert cache.stats().hits == {"exact": 3}
    hook.remove()
    np.testing.assert_allclose(model.encode(TEXTS), plain, rtol=1e-5)  # batches that are cut otherwise round otherwise


CHANGES = {
    "mode": lambda model: setattr(model[1], "pooling_mode", "cls"),
    "prompt": lambda model: setattr(model[1], "include_prompt", False),
    "another pooling": lambda model: model.__setitem__(1, type(model[1])(32, pooling_mode="max")),
    "one more": lambda model: model.append(type(model[1])(32, pooling_mode="max")),
    "one between": lambda model: model.insert(1, with_module(model, "dense before")[1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("payload", ["mean", "auto"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_pooling_after_wrapping_is_computed(model: Any, change: Any, payload: str) -> None:
    with LLMCache.wrap(model, payload=payload) as cache:
        model.encode(TEXTS)
        change(model)
        with cache.disabled():
            plain = model.encode(TEXTS)
        n_bypassed = cache.stats().bypassed.get("other_pooling", 0)
        check_encoding(model, plain, n=1)
        # Also with all tokens kept: those that pooling layers mask were left out of the key.
        assert cache.stats().bypassed.get("other_pooling", 0) - n_bypassed == len(TEXTS)
        assert cache.stats().n_hits == 0


@pytest.mark.slow
def test_sentence_transformers_are_calibrated_on_texts(model: Any) -> None:
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


def test_a_similar_sentence_gets_the_stored_embedding(model: Any) -> None:
    cache = LLMCache.wrap(model, tau=-1.0)
    first = model.encode("w5 w6 w7")
    np.testing.assert_allclose(model.encode("w9 w10"), first, atol=1e-6)
    assert cache.stats().hits == {"semantic": 1}


# -- padding under pooling ---------------------------------------------------------------------------------------------


def token_embeddings(model: Any, texts: Sequence[str] = TEXTS) -> Tensor:
    """Of a whole batch, padding included (B, T, D)."""
    with torch.inference_mode():
        embeddings: Tensor = model(dict(model.preprocess(list(texts))))["token_embeddings"]
    return embeddings


@pytest.mark.parametrize("layers", ["auto", [1]])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_token_embeddings_come_back_at_every_place(embedder: Embedder, mode: str, layers: Any) -> None:
    model = embedder(mode)
    plain, embedded = token_embeddings(model), model.encode(TEXTS)
    with LLMCache.wrap(model, layers=layers) as cache:
        for _ in range(3):  # the third time before the layers, where only the last layer is stored
            assert torch.equal(token_embeddings(model), plain)
        assert cache.stats().hits == {"exact": 2 * len(TEXTS)}
        np.testing.assert_allclose(cache(model.preprocess(TEXTS))["sentence_embedding"], embedded, atol=1e-5)


@pytest.mark.parametrize("n_known", [2, 3])
def test_other_layouts_are_served_with_zeros_for_padding(model: Any, n_known: int) -> None:
    """Also in a batch of which a row is computed."""
    longer = [*TEXTS[:n_known], LONGER]
    plain, mask = token_embeddings(model, longer), model.preprocess(longer)["attention_mask"]
    with LLMCache.wrap(model) as cache:
        first = token_embeddings(model)
        other = token_embeddings(model, longer)
        assert cache.stats().hits == {"exact": n_known}
        assert torch.equal(token_embeddings(model, longer), other)
        assert cache.stats().hits == {"exact": 2 * n_known + 1}
        assert torch.equal(token_embeddings(model), first)  # its own padding is still held
    torch.testing.assert_close(other[mask == 1], plain[mask == 1], atol=1e-5, rtol=1e-5)
    assert not other[mask == 0].any()


def test_what_padding_is_made_of_is_looked_at_where_pooling_heeds_the_mask(model: Any) -> None:
    features = model.preprocess(TEXTS)
    other = features | {"input_ids": torch.where(features["attention_mask"] == 1, features["input_ids"], 7)}
    with LLMCache.wrap(model) as cache:
        cache(dict(features))
        served = cache(dict(other))["token_embeddings"]
        assert cache.stats().hits == {"exact": len(TEXTS)}
    assert not served[features["attention_mask"] == 0].any()


def test_padding_under_pooling_is_kept_on_disk(model: Any, tmp_path: Path) -> None:
    with LLMCache.wrap(model) as cache:
        first = token_embeddings(model)
        cache.save(tmp_path / "saved")
    with LLMCache.load(model, tmp_path / "saved") as cache:
        assert torch.equal(token_embeddings(model), first)
        assert cache.stats().hits == {"exact": len(TEXTS)}


def test_keys_and_values_of_padding_under_pooling_come_back(embedder: Embedder) -> None:
    model = embedder("lasttoken", BARE["gpt2"])
    trunk = model[0].auto_model
    layouts = [padded([9, 4]), padded([11, 4])]
    with LLMCache.wrap(model, prefix=False) as cache, torch.inference_mode():
        first = trunk(**layouts[0], use_cache=True)
        other = trunk(**layouts[1], use_cache=True)
        again = trunk(**layouts[0], use_cache=True)
        assert cache.stats().hits == {"exact": 3}
    assert torch.equal(again.last_hidden_state, first.last_hidden_state)
    for ours, theirs in zip(again.past_key_values.layers, first.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    for layer in other.past_key_values.layers:
        assert not layer.keys[1, :, 4:].any() and not layer.values[1, :, 4:].any()


def test_padding_comes_back_where_only_another_layout_was_stored_before(embedder: Embedder) -> None:
    """And without K/V, so that it was not served."""
    model = embedder("lasttoken", BARE["gpt2"])
    trunk, inputs = model[0].auto_model, padded([9, 4])
    with LLMCache.wrap(model, prefix=False) as cache, torch.inference_mode():
        trunk(**{name: value[1:, :4] for name, value in inputs.items()}, use_cache=False)
        first = trunk(**inputs, use_cache=True).last_hidden_state
        assert cache.stats().n_hits == 0
        assert torch.equal(trunk(**inputs, use_cache=True).last_hidden_state, first)
        assert cache.stats().hits == {"exact": 2}


def test_padding_comes_back_from_below_where_a_layer_has_it_no_more(model: Any) -> None:
    with LLMCache.wrap(model, layers=[0, 1], auto_bypass=False) as cache:
        first = token_embeddings(model)
        for key in [record.key for record in inside.records(cache)]:
            inside.banks(cache).layer_banks[1].remove(key)
        token_embeddings(model, [*TEXTS, LONGER])  # stored there on top of zeros
        for _ in range(2):
            torch.testing.assert_close(token_embeddings(model), first)  # regrouped, so rounded otherwise
        assert cache.stats().hits == {"exact": 9}


@pytest.mark.parametrize("case", ["a prompt that pooling leaves out", "a final norm"])
def test_a_pooled_mean_that_is_not_that_of_the_last_layers_states(embedder: Embedder, case: str) -> None:
    """An entry of the mean over all tokens, or before the norm, would be wrong."""
    is_prompted = case == "a prompt that pooling leaves out"
    model = embedder(include_prompt=False) if is_prompted else embedder(trunk=STRANGERS["modernbert"])
    prompt = "query" if is_prompted else None
    plain = model.encode(TEXTS, prompt_name=prompt)
    cache = LLMCache.wrap(model, tau=0.9999)
    check_encoding(model, plain, prompt_name=prompt)
    assert cache.stats().n_hits == 3


def test_cross_encoders(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    config = BARE["bert"]().config
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
