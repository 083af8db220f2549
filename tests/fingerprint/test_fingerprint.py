"""Fingerprints: what is left out, what is scaled, what is learned."""

from typing import Any

import numpy as np
import pytest
import torch

from llmcache import LLMCache
from llmcache.fingerprint import FINGERPRINTS, MeanEmbedding, PCAEmbedding, ShingleMinHash, SimHash, View
from llmcache.testing import check_fingerprint
from tests.tiny_models import CLASSIFIERS, build, padded, tokens


def view(hidden: torch.Tensor, content: torch.Tensor, attention: torch.Tensor | None = None) -> View:
    return View(hidden, content, torch.zeros(content.shape, dtype=torch.int64), attention)


def test_mean_leaves_out_tokens_without_content() -> None:
    hidden = torch.randn(3, 4, 3)
    content = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    features = MeanEmbedding().features(view(hidden, content))
    torch.testing.assert_close(features[0], hidden[0, 1:3].mean(0))
    torch.testing.assert_close(features[1], hidden[1].mean(0))
    assert not MeanEmbedding().project(features.numpy())[2].any()  # a row without content is like nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_long_request_in_half_precision_has_a_mean_in_float32(dtype: torch.dtype) -> None:
    """The sum is more than float16 holds, and one such row would fail the lookup of its whole batch."""
    hidden = torch.full((1, 700, 4), 100.0, dtype=dtype)
    with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float32):
        features = MeanEmbedding().features(view(hidden, torch.ones(1, 700).bool()))
    torch.testing.assert_close(features, torch.full((1, 4), 100.0))


@pytest.mark.parametrize("name", sorted(set(FINGERPRINTS) - {"learned"}))  # see test_learned.py
def test_every_fingerprint_keeps_the_rules(name: str) -> None:
    check_fingerprint(FINGERPRINTS[name], has_unit_norm=name != "minhash")


def test_simhash_inner_product_estimates_the_angle() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((1, 64)).astype(np.float32)
    b = a + 0.5 * rng.standard_normal((1, 64)).astype(np.float32)
    cosine = float((a @ b.T).item() / np.linalg.norm(a) / np.linalg.norm(b))
    left, right = SimHash(bits=8192).project(np.concatenate([a, b]))
    assert left @ right == pytest.approx(1 - 2 * np.arccos(cosine) / np.pi, abs=0.03)


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("simhash", "bits", [0, -8, 12]),
        ("pca", "dim", [0]),
        ("pca", "fit_on", [1]),
        ("minhash", "width", [0]),
        ("minhash", "n_hashes", [1]),
        ("minhash", "seed", [-1]),
        ("learned", "dim", [1, 385]),
        ("learned", "ridge", [0.0]),
    ],
)
def test_useless_sizes_are_refused(name: str, option: str, values: list[float]) -> None:
    for value in values:
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


def words(*rows: list[int]) -> View:
    """A call of these tokens, 0 for padding, without hidden states."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return View(torch.empty(0), ids != 0, ids)


def signatures(*rows: list[int], **options: int) -> np.ndarray:
    fingerprint = ShingleMinHash(**options)
    return fingerprint.project(fingerprint.features(words(*rows)).numpy())


def test_minhash_reads_shingles_of_content_tokens_wherever_they_stand() -> None:
    left, right, between = signatures([0, 0, 7, 8, 9], [7, 8, 9, 0, 0], [7, 0, 8, 0, 9])
    assert (left == right).all() and (left == between).all()
    one, same, other, longer = signatures([5], [5], [6], [5, 6], width=3)  # they use what they have
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
    assert signature.min() >= 0 and 2**23 < signature.max() < 2**24  # the lowest bits, so spread whatever the length


@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_minhash_serves_requests_that_share_their_pairs(mode: str) -> None:
    base = tokens(1, 12, seed=1)
    near, far = base.clone(), tokens(1, 12, seed=2)
    near[0, -1] = 7  # 10 of 12 pairs in common
    with LLMCache.wrap(build(CLASSIFIERS["bert"]), mode=mode, tau=0.6, fingerprint="minhash") as cache:
        answer = cache(input_ids=base).logits
        torch.testing.assert_close(cache(input_ids=near).logits, answer)
        assert cache.last[0].rung == mode
        assert cache.last[0].similarity == pytest.approx(10 / 12, abs=0.13)
        cache(input_ids=far)
        assert cache.last[0].rung is None
        assert cache.stats().errors == 0


def test_a_row_that_is_not_finite_costs_the_others_nothing() -> None:
    model = build(CLASSIFIERS["bert"])
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[90] = torch.inf
    ids = tokens(3, 6) % 90
    ids[1, 2] = 90
    with LLMCache.wrap(model, tau=0.9999, exact=False) as cache:
        cache(input_ids=ids)
        cache(input_ids=ids)
        stats = cache.stats()
    assert (stats.hits, stats.bypassed, stats.errors) == ({"semantic": 2}, {"not_finite": 2}, 0)


HALF = [
    {"fingerprint": "attention"},
    {"fingerprint": "minhash"},
    {"fingerprint": {"name": "pca", "dim": 8, "fit_on": 4}},
    {"mode": "paper", "payload": "sequence", "fingerprint_per_layer": True},
    {"compression": {"name": "pca", "dim": 32, "fit_on": 33}, "payload": "sequence"},
    {"compression": {"name": "autoencoder", "dim": 4, "fit_on": 5}},
    {"policy": {"name": "divergence", "check_rate": 1.0}},
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("settings", HALF, ids=str)
def test_repeats_are_found_on_a_model_in_half_precision(settings: dict[str, Any], dtype: torch.dtype) -> None:
    ids = tokens(6, 6)
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]).to(dtype), tau=0.999, **{"exact": False, **settings})
    computed = cache(input_ids=ids).logits
    served = cache(input_ids=ids).logits
    stats = cache.stats()
    assert stats.errors == 0
    assert served.dtype == dtype and served.isfinite().all()
    if "policy" in settings:
        assert (stats.n_revalidated, stats.n_stored, stats.n_expelled) == (6, 6, {3: 0})
    else:
        assert stats.hits == {settings.get("mode", "semantic"): 6}
    if settings.get("compression", {}).get("dim") != 4:
        torch.testing.assert_close(served, computed, atol=0.1, rtol=0.1)
