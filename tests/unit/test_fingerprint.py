"""Fingerprints: what is left out, what is scaled, what is learned."""

import numpy as np
import pytest
import torch

from llmcache import LLMCache
from llmcache.fingerprint import FINGERPRINTS, MeanEmbedding, PCAEmbedding, SimHash
from tests.models import CLASSIFIERS, build, padded


def test_mean_leaves_out_tokens_without_content() -> None:
    hidden = torch.randn(2, 4, 3)
    content = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    features = MeanEmbedding().features(hidden, content)
    torch.testing.assert_close(features[0], hidden[0, 1:3].mean(0))
    torch.testing.assert_close(features[1], hidden[1].mean(0))


def test_mean_of_a_row_without_content_is_zero_and_like_nothing() -> None:
    features = MeanEmbedding().features(torch.randn(1, 4, 3), torch.zeros(1, 4, dtype=torch.bool))
    assert not MeanEmbedding().project(features.numpy()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_are_float32_whatever_the_model(dtype: torch.dtype) -> None:
    hidden = torch.randn(2, 4, 8).to(dtype)
    assert MeanEmbedding().features(hidden, torch.ones(2, 4).bool()).dtype is torch.float32


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_projections_are_float32_of_norm_one_and_leave_the_input_alone(name: str) -> None:
    fingerprint = FINGERPRINTS[name]()
    features = np.random.default_rng(0).standard_normal((600, 24)).astype(np.float32)
    kept = features.copy()
    if fingerprint.n_fit:
        fingerprint.fit(features[: fingerprint.n_fit])
    projected = fingerprint.project(features)
    assert projected.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(projected, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(features, kept)


def test_simhash_inner_product_estimates_the_angle() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((1, 64)).astype(np.float32)
    b = a + 0.5 * rng.standard_normal((1, 64)).astype(np.float32)
    cosine = float((a @ b.T).item() / np.linalg.norm(a) / np.linalg.norm(b))
    left, right = SimHash(bits=8192).project(np.concatenate([a, b]))
    assert left @ right == pytest.approx(1 - 2 * np.arccos(cosine) / np.pi, abs=0.03)


@pytest.mark.parametrize("bits", [0, -8, 12])
def test_simhash_refuses_odd_sizes(bits: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        SimHash(bits=bits)


def test_pca_keeps_the_directions_that_vary() -> None:
    rng = np.random.default_rng(0)
    features = np.full((64, 16), 5.0, np.float32)
    features[:, :2] += rng.standard_normal((64, 2)).astype(np.float32)
    pca = PCAEmbedding(dim=2, fit_on=64)
    pca.fit(features)
    centred = features[:, :2] - features[:, :2].mean(0)
    expected = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    projected = pca.project(features)
    np.testing.assert_allclose(projected @ projected.T, expected @ expected.T, atol=1e-4)


def test_pca_state_restores() -> None:
    features = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    fitted, fresh = PCAEmbedding(dim=4, fit_on=32), PCAEmbedding(dim=4, fit_on=32)
    fitted.fit(features)
    fresh.restore(fitted.state())
    assert fresh.n_fit == 0
    np.testing.assert_array_equal(fresh.project(features), fitted.project(features))


@pytest.mark.parametrize(("dim", "fit_on"), [(0, 10), (4, 1)])
def test_pca_refuses_useless_sizes(dim: int, fit_on: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        PCAEmbedding(dim=dim, fit_on=fit_on)


def test_pca_serves_nothing_until_it_is_fitted_and_then_all_it_saw() -> None:
    model = build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model, tau=0.99, exact=False, fingerprint={"name": "pca", "dim": 8, "fit_on": 4}) as cache:
        first = padded([6, 9, 4])
        cache(**first)
        cache(**first)
        assert cache.stats().n_hits == 0
        cache(**padded([8], seed=40))
        cache(**first)
        assert cache.stats().hits == {"semantic": 3}
