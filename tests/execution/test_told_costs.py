"""What computing a request took reaches the policy of its bank, and nothing else does."""

from time import perf_counter

import pytest

from llmcache import POLICIES
from llmcache.policies import LRU
from tests.execution.calls import wrapped
from tests.tiny_models import CLASSIFIERS, GENERATORS, padded, tokens

TOLD: list[tuple[str, float]] = []


class Listening(LRU):
    """Takes note of every cost."""

    def on_cost(self, key: str, cost: float) -> None:
        TOLD.append((key, cost))


@pytest.fixture(autouse=True)
def _listening(monkeypatch: pytest.MonkeyPatch) -> None:
    TOLD.clear()
    monkeypatch.setitem(POLICIES, "listening", Listening)


def test_rows_that_were_computed_share_the_time_of_the_call_by_their_tokens() -> None:
    cache, started = wrapped(CLASSIFIERS["bert"], policy="listening", auto_bypass=False), perf_counter()
    cache(**padded([6, 3]))
    (_, long), (_, short) = TOLD
    assert long == pytest.approx(2 * short)
    assert 0 < long + short < 1e3 * (perf_counter() - started)
    TOLD.clear()
    cache(**padded([6, 3]))
    assert TOLD == []  # repeats compute nothing


def test_rows_beside_a_hit_bear_the_time_alone() -> None:
    cache = wrapped(CLASSIFIERS["bert"], policy="listening", auto_bypass=False)
    ids = tokens(3, 5)
    cache(input_ids=ids[:1])
    (first, _), *_ = TOLD
    cache(input_ids=ids)
    assert len(TOLD) == len({key for key, _ in TOLD}) == 3
    assert first not in [key for key, _ in TOLD[1:]]
    assert TOLD[1][1] == pytest.approx(TOLD[2][1])


def test_blocks_of_a_prompt_are_told_no_cost() -> None:
    cache = wrapped(GENERATORS["llama"], policy="listening", prefix_block=4)
    cache(input_ids=tokens(1, 12))
    assert cache.stats().n_blocks == 3 and TOLD == []
