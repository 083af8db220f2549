"""A part that fails costs speed only: answers are right, the failure is counted and logged once, later calls hit."""

from typing import Any

import pytest
import torch

from llmcache.request.counters import Counters, is_logged
from tests.calls.helpers import agree, pair
from tests.tiny_models import CLASSIFIERS, padded, tokens

BERT = CLASSIFIERS["bert"]


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not today")


BREAKS = {
    "policy puts": ("memory.policies.lru.LRU", "on_put", "store a call"),
    "policy hits": ("memory.policies.lru.LRU", "on_hit", "look up a call"),
    "policy removes": ("memory.policies.lru.LRU", "on_remove", "store a call"),
    "policy chooses": ("memory.policies.lru.LRU", "victim", "store a call"),
    "entries are taken": ("models.packing.Packing", "take", "store a call"),
    "outputs are joined": ("models.packing.Packing", "join", "serve a call"),
    "rows are taken out": ("models.arguments.Arguments", "replace", "serve a call"),
    "arguments are read": ("request.reading.RequestReader", "read", "read a call"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_part_costs_speed_only(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, step = BREAKS[what]
    cache, alone = pair(BERT, max_entries=4)
    agree(cache, alone, input_ids=tokens(4, 5))
    with monkeypatch.context() as broken:
        broken.setattr(f"llmcache.{owner}.{method}", fail)
        for seeds in ((0, 1), (0, 0), (2, 0), (3, 4)):  # mixed, hits only, and misses that evict
            agree(cache, alone, input_ids=torch.cat([tokens(1, 5, seed=seed) for seed in seeds]))
    stats = cache.stats()
    assert stats.errors > 0 and {failure.split(":")[0] for failure in stats.health.failures} == {step}
    told = [text for text in caplog.messages if "failed to" in text]
    assert len(told) == len(stats.health.failures) == 1
    assert stats.n_requests == 4 + 4 * 2  # each counted once
    for seed in (10, 11, 12, 13):
        for _ in range(2):
            agree(cache, alone, input_ids=tokens(2, 5, seed=seed))
    healed = cache.stats()
    assert (healed.errors, healed.n_hits) == (stats.errors, stats.n_hits + 4 * 2)
    assert healed.n_stored == healed.n_entries[3] <= 4


def test_rungs_and_classes_of_ones_own_that_raise() -> None:
    class Rung:
        name, is_lossless = "mine", False

        def look_up(self, call: Any, rows: Any) -> None:
            raise RuntimeError("not today")

    cache, alone = pair(BERT, rungs=[lambda bank: Rung()])
    for seed in (0, 1, 1):
        agree(cache, alone, **padded([6, 4], seed))
    assert cache.stats().health.failures == {"look up a call: RuntimeError": 1}
    assert (cache.stats().n_misses, cache.stats().hits) == (4, {"exact": 2})
    with pytest.raises(IndexError):  # the model's own error leaves no outcome
        cache(input_ids=torch.full((1, 4), 10_000))
    assert (cache.stats().n_stored, cache.last) == (4, ())


# -- how failures are counted ------------------------------------------------------------------------------------------


def test_failures_are_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    for _ in range(1497):
        counters.look(ValueError("no"))
    for _ in range(5):
        counters.error("store", ValueError("no"))
    assert [text for text in caplog.messages if "store" in text] == ["llmcache failed to store; computing instead"]
    assert len([text for text in caplog.messages if "audit" in text]) == 4
    assert [n for n in range(1, 2000) if is_logged(n)] == [1, 10, 100, 1000]
    assert counters.snapshot().errors == 1502
