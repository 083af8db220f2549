"""Fingerprints alone: tokens left out, scaling, fitting, and the similarities that they estimate."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from llmcache.paper.fingerprints import (
    FINGERPRINTS,
    AttentionMean,
    MeanEmbedding,
    PCAEmbedding,
    ShingleMinHash,
    SimHash,
    View,
)
from llmcache.testing import check_fingerprint


def view(hidden: torch.Tensor, content: torch.Tensor, attention: torch.Tensor | None = None) -> View:
    return View(hidden, content, torch.zeros(content.shape, dtype=torch.int64), attention)


def test_mean_leaves_out_tokens_without_content() -> None:
    hidden = torch.randn(3, 4, 3)
    content = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    features = MeanEmbedding().features(view(hidden, content))
    torch.testing.assert_close(features[0], hidden[0, 1:3].mean(0))
    torch.testing.assert_close(features[1], hidden[1].mean(0))
    assert not MeanEmbedding().project(features.numpy())[2].any()  # a row without content matches nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_long_request_in_half_precision_has_a_mean_in_float32(dtype: torch.dtype) -> None:
    """The sum overflows float16, and one such row would fail the lookup of its whole batch."""
    hidden = torch.full((1, 700, 4), 100.0, dtype=dtype)
    with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float32):
        features = MeanEmbedding().features(view(hidden, torch.ones(1, 700).bool()))
    torch.testing.assert_close(features, torch.full((1, 4), 100.0))


@pytest.mark.parametrize("name", sorted(set(FINGERPRINTS) - {"learned"}))
def test_every_fingerprint_keeps_the_rules(name: str) -> None:
    check_fingerprint(FINGERPRINTS[name], has_unit_norm=name != "minhash")


def test_simhash_inner_product_estimates_the_angle() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((1, 64)).astype(np.float32)
    b = a + 0.5 * rng.standard_normal((1, 64)).astype(np.float32)
    cosine = float((a @ b.T).item() / np.linalg.norm(a) / np.linalg.norm(b))
    left, right = SimHash(bits=8192).project(np.concatenate([a, b]))
    assert left @ right == pytest.approx(1 - 2 * np.arccos(cosine) / np.pi, abs=0.03)


USELESS = [
    *(("simhash", "bits", bits) for bits in (0, -8, 12)),
    *(("pca", "dim", 0), ("pca", "fit_on", 1)),
    *(("minhash", "width", 0), ("minhash", "n_hashes", 1), ("minhash", "seed", -1)),
    *(("attention", "weight", weight) for weight in (0.0, 1.2)),
]


@pytest.mark.parametrize(("name", "option", "value"), USELESS)
def test_useless_sizes_are_refused(name: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        FINGERPRINTS[name](**{option: value})


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


def words(*rows: list[int]) -> View:
    """Return a view of these tokens, padded with 0, without hidden states."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return View(torch.empty(0), ids != 0, ids)


def signatures(*rows: list[int], **options: int) -> np.ndarray:
    fingerprint = ShingleMinHash(**options)
    return fingerprint.project(fingerprint.features(words(*rows)).numpy())


def test_minhash_reads_shingles_of_content_tokens_wherever_they_stand() -> None:
    left, right, between = signatures([0, 0, 7, 8, 9], [7, 8, 9, 0, 0], [7, 0, 8, 0, 9])
    assert (left == right).all() and (left == between).all()
    one, same, other, longer = signatures([5], [5], [6], [5, 6], width=3)  # short rows use all their tokens
    assert (one == same).all() and not (one == other).any() and not (one == longer).any()
    for width in (1, 2):
        there, back = signatures([1, 2, 3], [3, 2, 1], width=width)
        assert (there == back).all() if width == 1 else not (there == back).any()


@pytest.mark.parametrize("width", [1, 2, 3])
def test_minhash_estimates_the_jaccard_similarity_of_shingles(width: int) -> None:
    rng = np.random.default_rng(0)
    one = rng.integers(1, 60_000, 400).tolist()
    two = one[:200] + rng.integers(1, 60_000, 200).tolist()
    sets = [{tuple(row[i : i + width]) for i in range(len(row) - width + 1)} for row in (one, two)]
    jaccard = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    a, b = signatures(one, two, width=width, n_hashes=4096)
    assert np.mean(a == b) == pytest.approx(jaccard, abs=4 * 0.5 / 64)  # four standard errors of 4096 hashes


def test_signatures_are_whole_numbers_that_float32_holds() -> None:
    signature = signatures(list(range(1, 500)), n_hashes=1024)[0]
    assert signature.dtype == np.float32
    assert (signature == np.floor(signature)).all()
    assert signature.min() >= 0 and 2**23 < signature.max() < 2**24  # the lowest bits: spread for any length


@pytest.mark.parametrize("weight", [0.2, 0.5, 1.0])
def test_its_cosine_is_the_weighted_cosine_of_the_halves(weight: float) -> None:
    content = torch.ones(2, 4, dtype=torch.bool)
    view = View(torch.randn(2, 4, 8), content, torch.zeros(2, 4, dtype=torch.int64), 100 * torch.randn(2, 4, 8))
    fingerprint = AttentionMean(weight=weight)
    a, b = fingerprint.project(fingerprint.features(view).numpy())
    attended, embedded = (normalize(x.mean(1)) for x in (view.attention, view.hidden))
    expected = weight * attended[0] @ attended[1] + (1 - weight) * embedded[0] @ embedded[1]
    assert a @ b == pytest.approx(float(expected), abs=1e-5)
