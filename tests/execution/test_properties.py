"""Whatever is asked in whatever batches: lossless rungs give the plain answers."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcache import LLMCache
from tests.tiny_models import BARE, build

MODELS = {family: build(BARE[family]) for family in ("bert", "gpt2", "t5")}
ROW = st.tuples(st.integers(1, 7), st.integers(0, 5))  # valid tokens, seed: few enough that rows come back
BATCH = st.tuples(st.lists(ROW, min_size=1, max_size=4), st.booleans(), st.integers(0, 3))


def batch(rows: list[tuple[int, int]], left: bool, more: int) -> dict[str, torch.Tensor]:
    width = max(length for length, _ in rows) + more
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, (length, seed) in enumerate(rows):
        where = slice(width - length, width) if left else slice(0, length)
        ids[i, where] = torch.arange(length) * (seed + 3) % 90 + 5
        mask[i, where] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(sorted(MODELS)),
    layers=st.sets(st.integers(0, 3), min_size=1),
    max_entries=st.sampled_from([None, 1, 3]),
    policy=st.sampled_from(
        ["lru", "lfu", "fifo", "divergence", {"name": "ttl", "ttl_s": 60}, {"name": "staleness", "half_life_s": 60}]
    ),
    batches=st.lists(BATCH, min_size=2, max_size=6),
)
def test_outputs_are_the_plain_ones(
    family: str, layers: set[int], max_entries: int | None, policy: Any, batches: list[Any]
) -> None:
    model = MODELS[family]
    inputs = [batch(*one) for one in batches]
    with torch.inference_mode():
        plain = [model(**one).last_hidden_state[one["attention_mask"].bool()] for one in inputs]
    with LLMCache.wrap(model, layers=sorted(layers), max_entries=max_entries, policy=policy) as cache:
        for one, expected in zip(inputs, plain, strict=True):
            output = cache(**one).last_hidden_state[one["attention_mask"].bool()]
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        stats = cache.stats()
    assert stats.errors == 0
    assert stats.n_requests == stats.n_hits + stats.n_misses + sum(stats.bypassed.values())
    assert stats.n_requests == sum(len(rows) for rows, _, _ in batches)
    assert all(n <= (max_entries or n) for n in stats.n_entries.values())


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(payload=st.sampled_from(["cls", "last", "mean"]), batches=st.lists(BATCH, min_size=2, max_size=5))
def test_one_vector_is_the_plain_one(payload: str, batches: list[Any]) -> None:
    model = MODELS["bert"]

    def read(output: Any, mask: torch.Tensor) -> torch.Tensor:
        hidden = output.last_hidden_state
        if payload == "mean":
            return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        places = torch.arange(mask.shape[1])
        return hidden[:, 0] if payload == "cls" else hidden[torch.arange(len(mask)), (places * mask).argmax(1)]

    inputs = [batch(*one) for one in batches]
    with torch.inference_mode():
        plain = [read(model(**one), one["attention_mask"]) for one in inputs]
    with LLMCache.wrap(model, payload=payload) as cache:
        for one, expected in zip(inputs, plain, strict=True):
            torch.testing.assert_close(read(cache(**one), one["attention_mask"]), expected, atol=1e-5, rtol=1e-5)
        assert cache.stats().errors == 0
