"""The measure `store_faults`: on tiny models and a real Redis."""

from pathlib import Path

from tests.experiments.measuring import measured, told
from tests.redis_server import redis_server


def test_faults_of_each_kind_cost_speed_alone(tmp_path: Path) -> None:
    with redis_server(tmp_path):  # skips the test without Redis
        pass
    values = {"measure": "store_faults", "faults": 10, "seed": 1}
    outcome = measured(values)
    *kinds, total = outcome.metrics["summary"]
    assert total["n"] == 10 == sum(row["n"] for row in kinds)
    assert (total["wrong"], total["stale"], total["crashed"]) == (0, 0, 0)
    assert total["hits"] > 0 and total["purges"] > 0 and outcome.metrics["n_read"] > 0
    assert "| all | 10 |" in told(values, outcome)
