"""Whatever is asked in whatever batches: lossless rungs give the plain answers."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcache import LLMCache
from tests.execution.calls import agree, assert_close, run
from tests.tiny_models import BARE, build

FAMILIES = ("bert", "gpt2", "t5")
WRAPPED, ALONE = ({family: build(BARE[family]) for family in FAMILIES} for _ in range(2))
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
    family=st.sampled_from(FAMILIES),
    layers=st.sets(st.integers(0, 3), min_size=1),
    max_entries=st.sampled_from([None, 1, 3]),
    policy=st.sampled_from(
        [
            "lru",
            "lfu",
            "fifo",
            "s3_fifo",
            "gdsf",
            "divergence",
            {"name": "ttl", "ttl_s": 60},
            {"name": "staleness", "half_life_s": 60},
        ]
    ),
    batches=st.lists(BATCH, min_size=2, max_size=6),
)
def test_outputs_are_the_plain_ones(
    family: str, layers: set[int], max_entries: int | None, policy: Any, batches: list[Any]
) -> None:
    with LLMCache.wrap(WRAPPED[family], layers=sorted(layers), max_entries=max_entries, policy=policy) as cache:
        for one in batches:
            agree(cache, ALONE[family], **batch(*one))
        stats = cache.stats()
    assert stats.errors == 0
    assert stats.n_requests == stats.n_hits + stats.n_misses + sum(stats.bypassed.values())
    assert stats.n_requests == sum(len(rows) for rows, _, _ in batches)
    assert all(n <= (max_entries or n) for n in stats.n_entries.values())


def kept(hidden: torch.Tensor, mask: torch.Tensor, payload: str) -> torch.Tensor:
    """The one vector of each row (B, D) that an entry keeps."""
    if payload == "mean":
        return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    last = (torch.arange(mask.shape[1]) * mask).argmax(1)
    return hidden[:, 0] if payload == "cls" else hidden[torch.arange(len(mask)), last]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(payload=st.sampled_from(["cls", "last", "mean"]), batches=st.lists(BATCH, min_size=2, max_size=5))
def test_one_vector_is_the_plain_one(payload: str, batches: list[Any]) -> None:
    with LLMCache.wrap(WRAPPED["bert"], payload=payload) as cache:
        for one in batches:
            inputs = batch(*one)
            mask, found = inputs["attention_mask"], cache(**inputs).last_hidden_state
            assert_close(kept(found, mask, payload), kept(run(ALONE["bert"], **inputs), mask, payload))
        assert cache.stats().errors == 0
