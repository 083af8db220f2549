"""Sentence-transformers with one stored vector per text: calls that need all token states, or another pooling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from llmcache import LLMCache
from llmcache.models.sentences import Features
from tests.contract.judge import ask, check_same
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


def dense(**names: str) -> Any:
    from sentence_transformers.base.modules import Dense

    return Dense(32, 32, **names).eval()


def vectors(model: Any) -> Any:
    return model.encode(TEXTS, convert_to_tensor=True)


def gemma() -> Any:
    """Like EmbeddingGemma's trunk: known by its structure only, which is a causal one's."""
    more = {"num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True}
    return tf.Gemma3TextModel(tf.Gemma3TextConfig(**SIZES, **more))


@pytest.mark.parametrize("mode", ["lasttoken", "cls"])
def test_a_pooling_that_heeds_the_mask_reads_no_padding(mode: str, tmp_path: Path) -> None:
    model = embedder(gemma, mode, tmp_path)
    plain = vectors(model)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            check_same(vectors(model), plain)
        assert (cache.stats().n_hits, cache.stats().bypassed) == (len(TEXTS), {})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another mode": lambda model: setattr(model[1], "pooling_mode", "cls"),
    "another pooling": lambda model: model.__setitem__(1, type(model[1])(32, pooling_mode="max")),
    "one more": lambda model: model.append(type(model[1])(32, pooling_mode="max")),
    "a hook": lambda model: model[1].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize(
    ("change", "payload"), [*((change, "mean") for change in CHANGES), ("another mode", "sequence")]
)
def test_another_pooling_after_wrapping_is_computed(model: Any, change: str, payload: str) -> None:
    with LLMCache.wrap(model, payload=payload) as cache:
        vectors(model)
        CHANGES[change](model)
        with cache.disabled():
            plain = vectors(model)
        check_same(vectors(model), plain)
        # Also with all tokens stored: the key omits tokens that pooling layers mask.
        assert cache.stats().bypassed == {"disabled": len(TEXTS), "other_pooling": len(TEXTS)}


def test_states_are_computed_when_they_are_read_and_again_if_that_failed() -> None:
    answers = iter([RuntimeError("out of memory"), "states"])

    def compute() -> object:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    features = Features({"token_embeddings": "vector", "a": 1}, compute)
    assert features.pop("a") == 1  # not yet
    with pytest.raises(RuntimeError, match="out of memory"):
        features["token_embeddings"]
    assert features["token_embeddings"] == features["token_embeddings"] == "states"


def with_hook(model: Any) -> list[torch.Tensor]:
    """Append a module with a hook; return the list of token states that the hook sees."""
    from sentence_transformers.base.modules import Normalize

    seen: list[torch.Tensor] = []
    model.append(Normalize())
    model[2].register_forward_hook(lambda _, args, out: seen.append(args[0]["token_embeddings"].clone()))
    return seen


def with_tokens_of_its_own(model: Any) -> list[torch.Tensor]:
    """Append a module that puts its output in place of token states."""
    model.append(dense(module_output_name="token_embeddings"))
    return []


def with_a_reader_of_tokens(model: Any) -> list[torch.Tensor]:
    """Insert a module that reads token states before they are pooled."""
    model.insert(1, dense(module_input_name="token_embeddings"))
    return []


EXTENSIONS = {
    "none": lambda model: [],
    "a hook": with_hook,
    "tokens": with_tokens_of_its_own,
    "a reader": with_a_reader_of_tokens,
}


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_no_vector_stands_for_states(model: Any, extension: str) -> None:
    seen, features = EXTENSIONS[extension](model), model.preprocess(TEXTS)
    where = slice(None) if extension == "tokens" else features["attention_mask"].bool()
    expected = ask(model, dict(features))
    seen.append(expected["token_embeddings"])
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            given = dict(features)  # the caller's own
            found = ask(model, given)
            assert given["sentence_embedding"] is found["sentence_embedding"]
            check_same(found["sentence_embedding"], expected["sentence_embedding"])
            seen.append(found["token_embeddings"])
        assert cache.stats().n_hits == len(TEXTS)
    assert extension != "none" or "token_embeddings" not in given  # no vector is taken for states
    for states in seen[1:]:
        check_same(states[where], seen[0][where])


@pytest.mark.slow
def test_they_are_calibrated_on_texts_that_their_own_tokenizer_reads(model: Any) -> None:
    texts = [f"w{number % 40} w{number % 31}" for number in range(500)]
    with LLMCache.wrap(model, payload="mean") as cache:
        found = cache.calibrate(texts, max_drop=0.05)
        assert found.n_sources + found.n_tested == len(set(texts))
        observed = cache.observe(TEXTS)
        assert [case.row.n_valid for case in observed] == [len(ids) for ids in model.tokenizer(TEXTS)["input_ids"]]
