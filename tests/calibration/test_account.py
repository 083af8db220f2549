"""Auto-bypass stops searches that do not pay, logs the numbers, and resumes once they pay."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmcache.reuse.search_cost import SearchCost


def call(n_rows: int, n_hits: int, search_s: float, made: object = None, length: int = 12) -> Any:
    """Make a searched call; each miss took 10 ms to compute."""
    return SimpleNamespace(
        arguments={"input_ids": torch.ones(n_rows, length, dtype=torch.long)},
        calibration=made,
        n_searched=n_rows,
        hits={i: SimpleNamespace(answer=True, source="key") for i in range(n_hits)},
        search_s=search_s * n_rows,
        computed={i: i for i in range(n_rows - n_hits)},
        computing_s=0.01 * (n_rows - n_hits),
    )


@pytest.mark.parametrize(
    ("n_hits", "search_s", "is_off"),
    [(16, 0.001, False), (1, 0.001, True), (0, 0.00001, False), (0, 0.001, True), (16, 0.009, True)],
    ids=["many hits", "few hits", "a cheap search", "no hits", "a dear search"],
)
def test_searches_stop_where_they_cost_more_than_they_save(
    n_hits: int, search_s: float, is_off: bool, caplog: pytest.LogCaptureFixture
) -> None:
    account = SearchCost()
    for n_seen in range(32, 2049, 32):
        account.took(call(32, n_hits, search_s))
        assert n_seen >= 512 or account.pays(call(32, 0, 0))  # fewer rows decide nothing
    asked = [account.pays(call(1, 0, 0)) for _ in range(128)]
    assert asked.count(True) == (2 if is_off else 128)
    assert account.pays(call(1, 0, 0, length=40))  # another length is not known yet
    told = [text for text in caplog.messages if "is searched for in 1 of 64 calls" in text]
    assert len(told) == is_off and all("of up to 16 tokens" in text and "auto_bypass=False" in text for text in told)


def test_searches_come_back_once_they_pay_or_sources_are_others(caplog: pytest.LogCaptureFixture) -> None:
    account, made = SearchCost(), object()
    for _ in range(40):
        account.took(call(32, 0, 0.001, made))
    assert not account.pays(call(1, 0, 0))
    for _ in range(200):
        account.took(call(32, 24, 0.001, made))
    assert all(account.pays(call(1, 0, 0)) for _ in range(64))
    assert "in all calls again" in caplog.text
    for _ in range(400):
        account.took(call(32, 0, 0.001, made))
    assert not account.pays(call(1, 0, 0))
    account.took(call(32, 0, 0.001, object()))
    assert account.pays(call(1, 0, 0))
