"""Measures of a store that workers share: on tiny models and a real Redis."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from experiments.measures import store_remote
from experiments.support.folders import Folders
from experiments.support.ring import Ring
from llmcache import ConfigError
from tests.contract.slow_proxy import slow_proxy
from tests.experiments.measuring import learning, measured, told
from tests.redis_server import RedisServer, redis_server
from tests.tiny_models import save_bert

REMOTE = {
    "measure": "store_remote",
    "model": "tiny",
    "tokens": 8,
    "requests": 5,
    "pauses": 2,
    "paused": 3,
    "announcements": 3,
    "workers": 2,
    "timeout_ms": 1000.0,
}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> None:
    with redis_server(tmp_path):  # skips where there is none
        pass


def test_hits_in_redis_pauses_and_announcements_are_timed(tmp_path: Path) -> None:
    values: dict[str, Any] = {**REMOTE, "model": str(save_bert(tmp_path / "tiny", "some words of a request"))}
    outcome = measured(values)
    kinds = {row["kind"]: row["n"] for row in outcome.metrics["summary"]}
    assert kinds == {"remote": 5, "local": 5, "paused": 6, "read": 6, "announced": 3}
    assert outcome.metrics["entry_nbytes"] > 0 and outcome.metrics["n_errors"] == 0
    assert "| hit in Redis |" in told(values, outcome)


def test_a_redis_that_is_late_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def late_server(folder: Path) -> Iterator[RedisServer]:
        with redis_server(folder) as server, slow_proxy(server.port, 0.05) as server.port:
            yield server

    monkeypatch.setattr(store_remote, "redis_server", late_server)
    values = {**REMOTE, "model": str(save_bert(tmp_path / "tiny", "some words")), "timeout_ms": 5.0}
    with pytest.raises(ConfigError, match="5 of 5 hits were late: allow more"):
        measured(values)


def test_faults_of_each_kind_cost_speed_alone() -> None:
    values = {"measure": "store_faults", "faults": 40, "seed": 1}
    outcome = measured(values)
    *kinds, total = outcome.metrics["summary"]
    assert total["n"] == 40 == sum(row["n"] for row in kinds)
    assert (total["wrong"], total["stale"], total["crashed"]) == (0, 0, 0)
    assert total["hits"] > 0 and total["purges"] > 0 and outcome.metrics["n_read"] > 0
    assert "| all | 40 |" in told(values, outcome)


def test_workers_that_share_a_bank_find_what_any_computed() -> None:
    values = learning("store_workers", workers=2)
    values["task"] = {**values["task"], "data": {"path": "support_desk", "limit": 700}}
    outcome = measured(values, Folders())
    one, shared, separate, routed = outcome.metrics["summary"]
    assert [row["way"] for row in (one, shared, separate, routed)] == ["one", "shared", "separate", "routed"]
    assert [row["workers"] for row in (one, shared, separate, routed)] == [1, 2, 2, 2]
    assert {row["n"] for row in (one, shared, separate, routed)} == {120}
    assert separate["hit_rate"] <= shared["hit_rate"]
    assert one["n_fetched"] == separate["n_fetched"] == routed["n_fetched"] == 0
    assert one["n_errors"] == separate["n_errors"] == 0  # a Redis may be late where much else runs
    assert one["points_lost"] is None
    assert separate["points_lost"] == pytest.approx(100 * (one["hit_rate"] - separate["hit_rate"]))
    asked: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in outcome.rows:
        asked[row["way"], row["number"]].add(row["worker"])
    assert len(asked) == 4 * 120 and all(len(workers) == 1 for workers in asked.values())
    assert "| shared | 2 | 120 |" in told(values, outcome)


def test_a_ring_moves_few_keys_when_a_worker_comes_and_passes_over_who_has_too_much() -> None:
    keys = [f"key {i}" for i in range(2000)]
    four, five = Ring(4), Ring(5)
    moved = [key for key in keys if four.of(key) != five.of(key)]
    assert all(five.of(key) == 4 for key in moved) and 0.1 < len(moved) / len(keys) < 0.3
    first = four.of("some")
    assert four.of_bounded("some", [1, 1, 1, 1], 1.25) == first
    assert four.of_bounded("some", [9 if worker == first else 1 for worker in range(4)], 1.25) != first
    assert Ring(1).of_bounded("some", [7], 1.25) == 0
