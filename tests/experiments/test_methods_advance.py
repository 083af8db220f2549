"""Thresholds of baselines, chosen in advance by a calibration's tests."""

import numpy as np
import pytest

from experiments.replay.advance import choose_threshold, nearest, serve
from experiments.replay.replay import Units
from llmcache.reuse.calibration.calibration import split
from llmcache.reuse.calibration.risk_target import RiskTarget

N, N_FIRST = 900, 600
CLAIM = RiskTarget(0.05, 0.05, "changed", "frozen", 0)


def made(noise: float = 0.3) -> tuple[Units, np.ndarray]:
    """Return points on a circle in six overlapping groups, and each point's group, its answer."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 6, N)
    angle = group * np.pi / 3 + rng.normal(0, noise, N)
    vectors = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    return Units(np.arange(N), vectors), group


def test_the_nearest_is_another_one() -> None:
    units, _ = made()
    stored = np.arange(0, N, 3)
    source, similarity = nearest(units, range(N), stored)
    assert (source != np.arange(N)).all() and set(source.tolist()) <= set(stored.tolist())
    expected = np.where(np.arange(N)[:, None] == stored, -np.inf, units.vectors @ units.vectors[stored].T)
    assert similarity == pytest.approx(expected.max(axis=1), abs=1e-6)


def test_a_threshold_keeps_its_claim_on_c_and_sees_no_later_request() -> None:
    units, group = made()
    compared: list[int] = []

    def is_changed(one: int, other: int) -> bool:
        compared.extend((one, other))
        return bool(group[one] != group[other])

    setting, stored = choose_threshold(units, N_FIRST, CLAIM, is_changed)
    learned, tested = split(N_FIRST, CLAIM)
    assert stored.tolist() == learned and max(compared) < N_FIRST and set(compared[::2]) == set(tested)
    assert setting is not None and setting.bound <= 0.05 and setting.hit_rate > 0
    strict = RiskTarget(0.02, 0.05, "changed", "frozen", 0)
    none, _ = choose_threshold(units, N_FIRST, strict, lambda one, other: True)
    assert none is None


def test_frozen_and_growing_serve_later_requests_alone() -> None:
    units, group = made(noise=0.1)
    setting, stored = choose_threshold(units, N_FIRST, CLAIM, lambda one, other: bool(group[one] != group[other]))
    frozen = serve(units, N_FIRST, setting, stored, grows=False)
    growing = serve(units, N_FIRST, setting, stored, grows=True)
    for again in (frozen, growing):
        assert (again.served[:N_FIRST] == "computed").all() and (again.served[N_FIRST:] == "near").any()
        near = again.served == "near"
        assert (again.similarity[near] >= -setting.limit - 1e-6).all() if setting else False
    assert set(frozen.source[frozen.served == "near"].tolist()) <= set(stored.tolist())
    assert (growing.served == "near").sum() >= (frozen.served == "near").sum()
    nothing = serve(units, N_FIRST, None, stored, grows=False)
    assert (nothing.served == "computed").all()
