"""`cache.look_up(batch)` splits hits from missing rows; each part runs without a second look-up, and never stale."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache import ConfigError, LLMCache
from llmcache.calls.found import Found, Part
from llmcache.request.reading import RequestReader
from tests.contract.judge import ask, check_same, plain_answer
from tests.contract.models import fresh, inputs_of, plain, rows, sentence_model
from tests.tiny_models import states

FAMILY = ("bert", "classifier")
BATCH = inputs_of(*FAMILY)


@pytest.fixture
def cache() -> LLMCache:
    """Holds the first and the last row of the batch."""
    cache = LLMCache.wrap(fresh(*FAMILY))
    cache(**rows(BATCH, 0, 2))
    return cache


@pytest.fixture
def n_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of each call that is read."""
    seen: list[int] = []
    read = RequestReader.read
    monkeypatch.setattr(
        RequestReader, "read", lambda self, call, *more: seen.append(len(call["input_ids"])) or read(self, call, *more)
    )
    return seen


def run(cache: LLMCache, part: Part | None) -> None:
    """Run a part, and compare with the plain model."""
    assert part is not None
    check_same(states(cache(**part.inputs)), states(ask(plain(*FAMILY), **rows(BATCH, *part.rows))))


def numbers(found: Found) -> tuple[Any, Any]:
    return tuple(None if part is None else part.rows for part in (found.served, found.missing))  # type: ignore[return-value]


def test_parts_are_run_without_a_second_look_up(cache: LLMCache, n_read: list[int]) -> None:
    before = cache.stats()
    found = cache.look_up(BATCH)
    other = cache.look_up(rows(BATCH, 1, 2))  # two batches are under way
    assert (numbers(found), numbers(other)) == (((0, 2), (1,)), ((1,), (0,)))
    assert cache.stats().n_requests == before.n_requests and n_read == [3, 2]
    run(cache, found.missing)
    run(cache, found.served)
    assert [one.rung for one in cache.last] == ["exact", "exact"]
    assert n_read == [3, 2]
    stats = cache.stats()
    assert (stats.n_misses, stats.hits, stats.errors) == (before.n_misses + 1, {"exact": 2}, 0)
    run(cache, found.served)  # a second time: looked up anew
    assert n_read == [3, 2, 2]
    assert numbers(cache.look_up(BATCH)) == ((0, 1, 2), None)
    assert numbers(cache.look_up({**BATCH, "output_hidden_states": True})) == (None, (0, 1, 2))
    with pytest.raises(ConfigError, match="input_ids"):
        cache.look_up({"input_ids": [[1, 2]]})


def _edit_inputs(cache: LLMCache, found: Found) -> None:
    for part in (found.served, found.missing):
        assert part is not None
        part.inputs["input_ids"][:, 1] = 50


CHANGES: dict[str, Callable[[LLMCache, Found], object]] = {
    "weights": lambda cache, found: cache.model.bert.embeddings.word_embeddings.weight.data.mul_(1.5),
    "inputs": _edit_inputs,
    "purged": lambda cache, found: cache.purge(namespace="default"),
    "forgotten": lambda cache, found: cache.forget(**BATCH),
    "cleared": lambda cache, found: cache.clear(),
    "training": lambda cache, found: cache.model.train(),
}


@pytest.mark.parametrize("change", [*CHANGES, "namespace", "disabled"])
def test_what_changed_in_between_is_looked_up_anew(cache: LLMCache, change: str) -> None:
    found = cache.look_up(BATCH)
    if change in CHANGES:
        CHANGES[change](cache, found)
    within = {"namespace": lambda: cache.namespace("other"), "disabled": cache.disabled}.get(change, nullcontext)
    for part in (found.served, found.missing):
        assert part is not None
        with within():
            output = states(cache(**part.inputs))
        assert [one.rung for one in cache.last] == [None] * len(part.rows)
        if change != "training":
            check_same(output, states(plain_answer(cache, **part.inputs)))
    assert cache.stats().errors == 0


def test_what_is_never_run_is_let_go(cache: LLMCache) -> None:
    found = cache.look_up(BATCH)
    assert len(cache._core.forward.prepared.kept) == 2
    del found
    gc.collect()
    assert len(cache._core.forward.prepared.kept) == 0


def test_threads_look_up_and_run_at_once(cache: LLMCache) -> None:
    def work(_: int) -> None:
        for _ in range(10):
            found = cache.look_up(BATCH)
            for part in (found.served, found.missing):
                if part is not None:
                    run(cache, part)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert cache.stats().errors == 0


def test_calls_that_keep_kv_are_missing_as_a_whole() -> None:
    cache, batch = LLMCache.wrap(fresh("llama", "causal")), inputs_of("llama", "causal")
    expected = states(ask(plain("llama", "causal"), **batch))
    for _ in range(2):
        found = cache.look_up(batch)
        assert numbers(found) == (None, (0, 1, 2)) and found.missing is not None
        check_same(states(cache(**found.missing.inputs)), expected)
    assert (cache.stats().errors, cache.stats().hits) == (0, {"exact": 3})


@pytest.mark.slow
def test_a_batch_of_sentence_transformers(tmp_path: Path) -> None:
    cache = LLMCache.wrap(sentence_model(tmp_path), payload="mean")
    batch = rows(BATCH, 0, 1, 2)
    with cache.disabled():
        expected = cache(dict(batch))["sentence_embedding"]
    cache(rows(batch, 1))
    found = cache.look_up(batch)
    assert numbers(found) == ((1,), (0, 2)) and found.served is not None
    torch.testing.assert_close(cache(dict(found.served.inputs))["sentence_embedding"], expected[[1]])
    assert cache.last[0].rung == "exact"
