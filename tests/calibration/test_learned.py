"""The learned fingerprint of unusual tokens. `contract/decisions.json` holds what usual ones decide."""

import numpy as np
import pytest
import torch

from llmcache.errors import ConfigError
from llmcache.models.adapters import locate
from llmcache.models.packing import PAYLOADS
from llmcache.request.rows import Row
from llmcache.reuse.calibration.token_vectors import TokenVectors
from llmcache.reuse.fingerprint import LearnedFingerprint
from llmcache.support.arrays import Floats
from tests.tiny_models import BARE, STRANGERS, VOCABULARY, build

D = 12
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((VOCABULARY, D)).astype(np.float32)
MEANING = RNG.standard_normal((D, D)).astype(np.float32)
OUT = RNG.standard_normal((D, 3)).astype(np.float32)


def contextual(ids: np.ndarray) -> Floats:
    return np.tanh(TABLE[ids] @ MEANING)


def made(n: int) -> tuple[list[list[int]], Floats]:
    """Return content tokens of requests, and the outputs of a model that averages meanings."""
    rng = np.random.default_rng(0)
    requests = [rng.integers(5, VOCABULARY, rng.integers(3, 9)) for _ in range(n)]
    return [ids.tolist() for ids in requests], np.stack([contextual(ids).mean(axis=0) for ids in requests])


@pytest.mark.parametrize("first", [50, 0])
def test_a_token_that_alone_comes_to_no_number_is_guessed(first: int) -> None:
    """Tokens from `first` on have no finite vector: some, or all."""
    learned = LearnedFingerprint(
        lambda ids: TABLE[ids], lambda ids: np.where(ids[:, None] >= first, np.float32("nan"), contextual(ids)), dim=8
    )
    requests, targets = made(200)
    learned.fit(requests, targets, targets @ OUT)
    vectors, forecasts = learned.project([[20, 55, 70], [51, 52, 53]])
    assert np.isfinite(vectors).all() and np.isfinite(forecasts).all()


def test_tokens_that_were_not_learned_from_are_guessed_and_no_content_is_like_nothing() -> None:
    asked = list[int]()
    learned = LearnedFingerprint(
        lambda ids: TABLE[ids], lambda ids: (asked.extend(ids.tolist()), contextual(ids))[1], dim=8
    )
    requests, targets = made(200)
    few = [[token for token in one if token < 60] for one in requests]
    kept = [i for i, one in enumerate(few) if len(one)]
    learned.fit([few[i] for i in kept], targets[kept], targets[kept] @ OUT)
    vectors, forecasts = learned.project([[], [70, 80, 90]])
    assert not vectors[0].any() and vectors[1].any() and np.isfinite(vectors).all()
    assert np.array_equal(forecasts[0], learned.state()["outputs_mean"])
    assert max(asked) < 60  # the model is not run for a new token


@pytest.mark.parametrize("family", ["gpt2", "t5", "deberta"])
def test_vectors_of_tokens_are_what_the_model_makes_of_each_alone(family: str) -> None:
    model = build(BARE[family]).eval()
    trunk = locate(model)
    vectors = TokenVectors(trunk, PAYLOADS["mean"](), trunk.module.forward)
    row = Row(0, "", np.array([1, 40, 41, 2], np.uint16).tobytes(), slice(0, 4), 4)
    vectors.frame(row, [40, 41])
    thought = vectors.contextual(np.array([40, 50]))
    with torch.inference_mode():
        own = trunk.module(input_ids=torch.tensor([[1, 50, 2]]), return_dict=True).last_hidden_state[0].mean(dim=0)
    np.testing.assert_allclose(thought[1], own.numpy(), atol=1e-5)
    assert vectors.embed(np.array([40, 50])).shape[0] == 2


def test_a_trunk_without_input_embeddings_is_refused() -> None:
    trunk = locate(build(STRANGERS["megatron"]))
    trunk.module.get_input_embeddings = lambda: None
    with pytest.raises(ConfigError, match="input embeddings"):
        TokenVectors(trunk, PAYLOADS["mean"](), trunk.module.forward)
