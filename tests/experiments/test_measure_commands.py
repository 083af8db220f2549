"""Measure `commands`: shell commands from an empty folder, and the time of each."""

from typing import Any

import pytest

from experiments.report.pages.costs import first_hit
from llmcache.errors import ConfigError, LLMCacheError
from tests.experiments.measuring import measured


def of(*commands: str) -> dict[str, Any]:
    return {
        "measure": "commands",
        "title": "tried",
        "commands": {f"step {number}": run for number, run in enumerate(commands)},
    }


def test_commands_run_in_order_in_one_empty_folder_and_the_last_row_is_their_sum() -> None:
    outcome = measured(of('test -z "$(ls)" && test -f "$CHECKOUT/pyproject.toml" && echo seen > note', "cat note"))
    assert [row["command"] for row in outcome.rows] == ["step 0", "step 1"]
    *rows, total = outcome.metrics["summary"]
    assert rows == outcome.rows and total == {"command": "all", "seconds": sum(row["seconds"] for row in rows)}
    assert all(row["seconds"] > 0 for row in rows)


def test_a_command_that_fails_ends_the_measure_with_its_last_lines() -> None:
    with pytest.raises(LLMCacheError, match="step 1: exit status 3\nno such thing"):
        measured(of("true", "echo no such thing >&2; exit 3", "touch never"))


def test_it_runs_outside_of_the_callers_virtual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/of/the/caller")
    measured(of('test -z "$VIRTUAL_ENV"'))


def test_a_table_that_is_not_measured_names_its_command(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"llmcache run configs/first_hit\.yaml"):
        first_hit(tmp_path)
