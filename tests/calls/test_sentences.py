"""Sentence-transformers with one stored vector per text: calls that need all token states, or another pooling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from llmcache import LLMCache
from llmcache.models.sentences import Features
from tests.contract.models import SIZES
from tests.tiny_models import BARE, Make, build, tokenizer

TEXTS = ["w5 w6 w7 w8", "w9 w10", "w11 w12 w13"]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """An embedder: the mean of BERT's states."""
    return embedder(BARE["bert"], "mean", tmp_path)


def embedder(make: Make, mode: str, folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    build(make).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    parts = [modules.Transformer(str(folder)), modules.Pooling(32, pooling_mode=mode)]
    return SentenceTransformer(modules=parts, device="cpu")


def gemma() -> Any:
    """Like EmbeddingGemma's trunk: known by its structure only, which is a causal one's."""
    more = {"num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True}
    return tf.Gemma3TextModel(tf.Gemma3TextConfig(**SIZES, **more))


@pytest.mark.parametrize("mode", ["mean", "lasttoken", "cls"])
def test_a_pooling_that_heeds_the_mask_reads_no_padding(mode: str, tmp_path: Path) -> None:
    model = embedder(gemma, mode, tmp_path)
    plain = model.encode(TEXTS)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            check(model, plain)
        assert (cache.stats().n_hits, cache.stats().bypassed) == (len(TEXTS), {})


def check(model: Any, expected: Any, **how: Any) -> None:
    """Assert that texts are embedded as expected."""
    for ours, theirs in zip(model.encode(TEXTS, **how), expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), atol=1e-5, rtol=1e-5)


NEAR = {"exact": {}, "tau": {"tau": 0.9999, "layers": "last"}}


def dense(model: Any) -> Any:
    from sentence_transformers.base.modules import Dense

    return Dense(32, 32, module_input_name="token_embeddings")


def test_a_module_that_reads_tokens_gets_all_of_them(model: Any) -> None:
    model.insert(1, dense(model).eval())
    plain = model.encode(TEXTS)
    with LLMCache.wrap(model) as cache:
        assert cache.payload == "sequence"
        for _ in range(2):
            check(model, plain)
        assert cache.stats().n_hits > 0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mode": lambda model: setattr(model[1], "pooling_mode", "cls"),
    "prompt": lambda model: setattr(model[1], "include_prompt", False),
    "another pooling": lambda model: model.__setitem__(1, type(model[1])(32, pooling_mode="max")),
    "one more": lambda model: model.append(type(model[1])(32, pooling_mode="max")),
    "one between": lambda model: model.insert(1, dense(model)),
}


@pytest.mark.parametrize(("change", "payload"), [*((change, "mean") for change in CHANGES), ("mode", "sequence")])
def test_another_pooling_after_wrapping_is_computed(model: Any, change: str, payload: str) -> None:
    with LLMCache.wrap(model, payload=payload) as cache:
        model.encode(TEXTS)
        CHANGES[change](model)
        with cache.disabled():
            plain = model.encode(TEXTS)
        n_hits = cache.stats().n_hits
        check(model, plain)
        # Also with all tokens stored: the key omits tokens that pooling layers mask.
        assert cache.stats().bypassed.get("other_pooling") == len(TEXTS)
        assert cache.stats().n_hits == n_hits


def test_states_that_could_not_be_computed_are_computed_when_asked_for_again() -> None:
    answers = iter([None, "states"])

    def compute() -> str:
        if (answer := next(answers)) is None:
            raise RuntimeError("out of memory")
        return answer

    features = Features({"token_embeddings": "vector"}, compute)
    with pytest.raises(RuntimeError, match="out of memory"):
        features["token_embeddings"]
    assert features["token_embeddings"] == features["token_embeddings"] == "states"


def test_what_concerns_another_key_computes_no_states() -> None:
    features = Features({"token_embeddings": "vector", "a": 1, "b": 2}, lambda: pytest.fail("the states were computed"))
    assert features.pop("a") == 1 and features.setdefault("b", 3) == 2
    del features["b"]
    assert list(features) == ["token_embeddings"]


@pytest.mark.parametrize("how", NEAR)
def test_in_the_callers_dict_no_vector_stands_for_states(model: Any, how: str) -> None:
    with LLMCache.wrap(model, **NEAR[how]) as cache, torch.inference_mode():  # type: ignore[arg-type]
        for _ in range(2):
            features = model.preprocess(TEXTS)
            found = model(features)
        assert cache.stats().n_hits == len(TEXTS)
        assert "token_embeddings" in found and "token_embeddings" not in features
        assert features["sentence_embedding"] is found["sentence_embedding"]


def to_tokens(model: Any) -> None:
    from sentence_transformers.base.modules import Dense

    model.append(Dense(32, 32, module_output_name="token_embeddings").eval())


def watched(model: Any) -> list[torch.Tensor]:
    """Append a module with a hook; return the list of token states that the hook sees."""
    from sentence_transformers.base.modules import Normalize

    seen: list[torch.Tensor] = []
    model.append(Normalize())
    model[2].register_forward_hook(lambda _, args, out: seen.append(args[0]["token_embeddings"].clone()))
    return seen


@pytest.mark.parametrize("how", NEAR)
def test_a_hook_after_the_pooling_sees_all_states(model: Any, how: str) -> None:
    seen, features = watched(model), model.preprocess(TEXTS)
    with torch.inference_mode():
        model(dict(features))
        with LLMCache.wrap(model, **NEAR[how]):  # type: ignore[arg-type]
            for _ in range(2):
                model(dict(features))
        is_token = features["attention_mask"].bool()
        for states in seen[1:]:
            torch.testing.assert_close(states[is_token], seen[0][is_token])


def test_a_hook_that_comes_after_wrapping_sees_all_states(model: Any) -> None:
    features = model.preprocess(TEXTS)
    seen = watched(model)
    model[2]._forward_hooks.clear()
    with LLMCache.wrap(model, payload="mean") as cache, torch.inference_mode():
        for _ in range(2):
            model(dict(features))
        model[2].register_forward_hook(lambda _, args, out: seen.append(args[0]["token_embeddings"].clone()))
        model(dict(features))
        with cache.disabled():
            model(dict(features))
        torch.testing.assert_close(*seen)
        assert cache.stats().bypassed == {"other_pooling": len(TEXTS), "disabled": len(TEXTS)}


@pytest.mark.parametrize("how", NEAR)
def test_what_a_module_puts_in_place_of_states_is_no_state(model: Any, how: str) -> None:
    to_tokens(model)
    features = model.preprocess(TEXTS)
    with torch.inference_mode():
        expected = model(dict(features))["token_embeddings"]
        with LLMCache.wrap(model, **NEAR[how]):  # type: ignore[arg-type]
            for _ in range(2):
                torch.testing.assert_close(model(dict(features))["token_embeddings"], expected)


@pytest.mark.slow
def test_they_are_calibrated_on_texts(model: Any) -> None:
    rng = np.random.default_rng(0)
    subjects = rng.integers(5, 90, (12, 12))  # each text has the words of one subject, and two more
    words = [[*subjects[rng.integers(12)], *rng.integers(5, 90, 2)] for _ in range(800)]
    texts = [" ".join(f"w{word}" for word in rng.permutation(row)) for row in words]
    with LLMCache.wrap(model, payload="mean") as cache:  # its own tokenizer reads the texts
        found = cache.calibrate(texts[:700], max_drop=0.05)
        assert found.chosen is not None and found.chosen.hit_rate > 0 and found.n_sources + found.n_tested == 700
        served = model.encode(texts[700:], batch_size=8)
        assert cache.stats().hits["semantic"] > 0
        with cache.disabled():
            own = model.encode(texts[700:], batch_size=8)
        cosine = (served * own).sum(axis=1) / np.linalg.norm(served, axis=1) / np.linalg.norm(own, axis=1)
        assert (cosine < 0.98).mean() <= 0.15 and cache.stats().errors == 0
