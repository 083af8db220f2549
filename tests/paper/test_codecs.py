"""Codecs: what fitted ones learn, what is lost and how it is measured, and no side effects."""

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmcache.paper.codecs import CODECS, PCA, Codec, Half
from llmcache.paper.packer import Loss, Packer
from llmcache.testing import check_codec

LEARNED = ["pca", "autoencoder"]
WIDTH = 16


def low_rank(n: int, rank: int = 3, width: int = WIDTH, seed: int = 0) -> Tensor:
    """Rows that vary in few directions, around a centre that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.randn(rank, width, generator=torch.Generator().manual_seed(99))
    return 5.0 + torch.randn(n, rank, generator=generator) @ axes


def fitted(name: str, rows: Tensor, **options: int) -> Codec:
    """Return a codec fitted to these rows."""
    codec = CODECS[name](**{"dim": 2, "fit_on": len(rows), **options})
    codec.fit(rows)
    return codec


def there_and_back(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode("hidden", codec.encode("hidden", x), x.dtype)


def relative_error(x: Tensor, back: Tensor) -> float:
    """Return the error by its definition."""
    return float((x - back).square().sum() / (x - x.mean(dim=0)).square().sum())


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_keeps_the_rules(name: str) -> None:
    options = {"dim": 2, "fit_on": 20} if name in LEARNED else {}
    check_codec(lambda: CODECS[name](**options))


# -- learning ----------------------------------------------------------------------------------------------------------


def test_pca_is_the_best_linear_map_of_its_size() -> None:
    """It loses only the variance of the other directions (Eckart and Young, 1936)."""
    x = torch.randn(60, WIDTH) @ torch.randn(WIDTH, WIDTH)
    held = torch.linalg.svdvals((x - x.mean(dim=0)).double()).square()
    best = float(held[5:].sum() / held.sum())
    assert relative_error(x, there_and_back(fitted("pca", x, dim=5), x)) == pytest.approx(best, rel=1e-4)


def test_an_autoencoder_learns_far_more_than_the_mean() -> None:
    x = low_rank(100, seed=1)
    assert relative_error(x, there_and_back(fitted("autoencoder", low_rank(200), dim=6), x)) < 0.15
    assert relative_error(x, there_and_back(fitted("autoencoder", low_rank(200), dim=6, epochs=1), x)) > 0.5


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_kept(name: str) -> None:
    x = torch.full((2, WIDTH), 3.0)
    never_varied = fitted(name, torch.full((20, WIDTH), 3.0))
    torch.testing.assert_close(there_and_back(never_varied, x), x, atol=0.2, rtol=0.0)
    whole = fitted(name, low_rank(100), dim=64)  # capped at the width
    assert whole.encode("hidden", low_rank(2))["hidden.code"].shape == (2, WIDTH)
    codec, kv = fitted(name, low_rank(20)), torch.randn(2, 4, 3, WIDTH)  # K/V stays plain
    assert codec.encode("keys", kv).keys() == {"keys"}
    assert torch.equal(codec.decode("keys", codec.encode("keys", kv), kv.dtype), kv)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_mode_changes_nothing(name: str, mode: Callable[[], object]) -> None:
    """Inference tensors cannot be trained on, and autocast would silently halve the precision."""
    plain, packer = (Packer(CODECS[name](dim=3, fit_on=20)) for _ in range(2))
    rows, x = low_rank(20), low_rank(4, seed=1)
    plain.learn("a", "", rows)
    with mode():
        assert packer.learn("a", "", rows * 1.0)
        packed = packer.pack({"hidden": x})
        back = packer.codec.decode("hidden", packed, torch.float32)
    expected = plain.pack({"hidden": x})
    assert torch.equal(packed["hidden.code"], expected["hidden.code"])
    assert torch.equal(back, plain.codec.decode("hidden", expected, torch.float32))
    assert not any(part.is_inference() or part.requires_grad for part in packer.codec.state().values())


def test_an_autoencoder_is_seeded_and_leaves_the_callers_randomness_alone() -> None:
    before = torch.get_rng_state()
    first, same, other = (fitted("autoencoder", low_rank(20), epochs=3, seed=seed).state() for seed in (0, 0, 1))
    assert torch.equal(first["into"], same["into"]) and not torch.equal(first["into"], other["into"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("damage", ["missing", "shape", "dimensions", "rank"])
def test_a_state_that_does_not_fit_is_refused(name: str, damage: str) -> None:
    state = fitted(name, low_rank(20)).state()
    last = list(state)[-1]
    if damage == "missing":
        del state[last]
    elif damage != "dimensions":
        state[last] = state[last][:-1] if damage == "shape" else state[last][None]
    fresh = CODECS[name](dim=3 if damage == "dimensions" else 2, fit_on=20)
    with pytest.raises((KeyError, ValueError), match=f"{last}|dim=3"):
        fresh.restore(state)
    assert fresh.n_fit == 20


# -- measured loss -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), shift=st.sampled_from([0.0, 1e7]))
def test_the_running_error_is_that_of_all_rows_at_once(sizes: list[int], shift: float) -> None:
    x = torch.randn(sum(sizes), 4, dtype=torch.float64) + shift
    back = x + 0.1 * torch.randn_like(x)
    loss = Loss()
    for part, returned in zip(x.split(sizes), back.split(sizes), strict=True):
        loss.add(part, returned)
    if len(x) == 1:
        assert loss.relative_error is None
    else:
        assert loss.relative_error == pytest.approx(relative_error(x, back), rel=1e-6)
    cosine = torch.nn.functional.cosine_similarity(x, back).mean()
    assert loss.cosine_distance == pytest.approx(1 - float(cosine), abs=1e-9)


def test_rows_that_never_vary_or_have_no_number_have_no_relative_error() -> None:
    same, loss, x = Loss(), Loss(), torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]])
    same.add(torch.full((7, 3), 0.1), torch.full((7, 3), 1.1))
    loss.add(x, x)
    assert same.relative_error is loss.relative_error is loss.cosine_distance is None
    loss.add(torch.tensor([[1.0, 2.0], [3.0, torch.nan], [5.0, 2.0]]), torch.tensor([[1.0, 2.0], [0, 0], [5.0, 4.0]]))
    assert loss.relative_error == pytest.approx(4 / 8)


def test_what_is_fitted_on_is_not_measured_and_later_one_entry_in_sixteen_is() -> None:
    packer = Packer(PCA(dim=2, fit_on=20))
    counted: list[int] = []
    packer.loss.add = lambda x, unpacked: counted.append(len(x))  # type: ignore[method-assign]
    for number in range(10):
        packer.pack({"hidden": low_rank(2, seed=number)})
        packer.learn(str(number), "", low_rank(2, seed=number))
    assert counted == []
    for _ in range(2 * 16 + 1):
        packer.pack({"hidden": low_rank(2)})
    assert counted == [2, 2, 2]


def test_a_loss_that_cannot_be_measured_costs_no_entry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_tries = []
    monkeypatch.setattr(Loss, "add", lambda *_: (n_tries.append(1), 1 / 0))
    packer = Packer(Half())
    with caplog.at_level(logging.WARNING, logger="llmcache"):
        for _ in range(2 * 16):
            packer.pack({"hidden": low_rank(2)})
    assert len(n_tries) == 2
    assert len(caplog.records) == 1


def test_a_fit_that_fails_is_tried_again_with_later_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packer = Packer(PCA(dim=2, fit_on=4))
    with monkeypatch.context() as broken:
        broken.setattr(PCA, "_learn", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            packer.learn("a", "", low_rank(4))
    assert not packer.learn("b", "", low_rank(2)) and not packer.learn("b", "", low_rank(2))
    assert packer.learn("c", "", low_rank(2)) and packer.codec.n_fit == 0
