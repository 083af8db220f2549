"""Measures `prefix`, `decode` and `parity`: figures follow from times and tokens; wrong tokens are detected."""

from typing import Any

import pytest
import torch

from experiments.data.streams.prompts import BLOCK
from experiments.measures.parity import difference
from experiments.support.files import Folders
from llmcache.calls.kv_fill import Pieces, fill
from llmcache.errors import ConfigError
from tests.experiments.measuring import measured, told

STREAM = {"name": "chat", "n": 16, "turns": 4, "question": 20, "answer": 20, "at_once": 2}
TASK = {"name": "prompts", "model": "tiny", "stream": STREAM}
PREFIX = {"measure": "prefix", "task": TASK, "rounds": 2, "warmup": 2}
PARITY = {"measure": "parity", "task": TASK, "new_tokens": 5}
LENGTHS = {"prompt_tokens": 40, "shared_tokens": 32, "new_tokens": 4}
DECODE = {"measure": "decode", "models": ["tiny"], "rounds": 3, **LENGTHS}


@pytest.fixture
def _wrong_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of prefixes come back multiplied by -10."""

    def lie(kv_cache: Any, number: int, keys: Pieces, values: Pieces) -> None:
        fill(kv_cache, number, keys, [-10 * piece for piece in values])

    monkeypatch.setattr("llmcache.calls.prefix.fill", lie)


def test_time_to_first_token_is_compared(prompts: Folders) -> None:
    outcome = measured(PREFIX, prompts, rounds=1)
    metrics, rows = outcome.metrics, outcome.rows
    assert [row["method"] for row in rows] == ["recompute"] * 16 + ["llmcache"] * 16
    base, own = rows[:16], rows[16:]
    figures = metrics["methods"]["llmcache"]

    def ratio(numbers: list[int]) -> Any:
        alone, cached = (sum(rows[i]["ttft_ms"] for i in numbers) for rows in (base, own))
        return pytest.approx(alone / cached, rel=1e-2)

    known = [i for i in range(16) if own[i]["n_known"]]
    new = [i for i in range(16) if not own[i]["n_known"]]
    assert len(new) >= 4 and len(known) >= 8
    assert figures["speedup"] == ratio([*range(16)])
    assert figures["known"]["median"] == ratio(known) and figures["new"]["median"] == ratio(new)
    ratios = sorted(one["ttft_ms"] / other["ttft_ms"] for one, other in zip(base, own, strict=True))
    assert figures["ratio_median"]["median"] == pytest.approx((ratios[7] + ratios[8]) / 2, rel=1e-2)
    tokens = sum(own[i]["n_tokens"] for i in known)
    unknown = tokens - sum(own[i]["n_reused"] for i in known)
    assert (figures["known_n"], figures["known_ceiling"]) == (len(known), tokens / unknown)
    assert figures["known_ceiling"] > metrics["facts"]["ceiling"]  # without first turns, like `known`
    assert all(row["n_known"] <= row["n_reused"] < row["n_known"] + BLOCK for row in own)  # whole blocks are known
    assert {row["n_reused"] for row in base} == {0}
    assert figures["share_reused"] >= metrics["facts"]["share_known"] > 0.4
    assert figures["of_ceiling"] == pytest.approx(figures["speedup"] * (1 - metrics["facts"]["share_known"]))
    assert figures["asked"] == 0.9 * metrics["facts"]["ceiling"]
    assert (figures["n_same"], figures["is_same"]) == (16, True)
    assert figures["hits_by_rung"] == {"prefix": len(known) / 16}
    assert (figures["hit_ms"]["n"], figures["miss_ms"]["n"]) == (len(known), len(new))
    assert figures["bytes"] > 0


def test_a_stream_that_shares_nothing_has_no_hits(prompts: Folders) -> None:
    stream = {"name": "nothing_shared", "n": 6, "length": 40}
    methods = [{"method": "llmcache", "label": "a", "auto_bypass": True}, {"method": "llmcache", "label": "b"}]
    values = PREFIX | {"task": TASK | {"stream": stream}, "methods": methods}
    outcome = measured(values, prompts)
    assert outcome.metrics["facts"]["ceiling"] == 1.0
    for figures in outcome.metrics["methods"].values():
        assert figures["known"] is None and figures["hit_ms"] is None and figures["share_reused"] == 0
        assert figures["miss_ms"]["n"] == 12
    assert told(values, outcome).count("| nothing_shared |") == 2


def test_tokens_are_the_same(prompts: Folders) -> None:
    outcome = measured(PARITY, prompts)
    metrics = outcome.metrics
    assert (metrics["n_same"], metrics["n_near_ties"], metrics["n_wrong"], metrics["errors"]) == (16, 0, 0, 0)
    assert metrics["hits"] == {"prefix": sum(row["n_known"] > 0 for row in outcome.rows)}
    assert all(row["n_known"] <= row["n_prefix"] < row["n_known"] + BLOCK for row in outcome.rows)
    assert metrics["n_evicted"] == 0
    assert [point["n"] for point in metrics["memory"]] == [2, 3, 5, 6, 8, 10, 11, 13, 14, 16]
    assert all(point["resident_bytes"] > 1e7 for point in metrics["memory"])
    assert "| float32 | 16 | 0 | 0 |" in told(PARITY, outcome)


def test_under_a_budget_blocks_leave_and_tokens_stay_the_same(prompts: Folders) -> None:
    budget = 200_000
    task = TASK | {"stream": STREAM | {"n": 40}}
    metrics = measured(PARITY, prompts, task=task, new_tokens=2, cache={"max_bytes": budget}).metrics
    assert metrics["n_same"] == metrics["n"] == 40
    assert metrics["n_evicted"] > 10 and metrics["hits"]["prefix"] > 5
    assert metrics["n_evicted"] > metrics["memory"][4]["n_evicted"]  # evicts until the end
    assert budget / 4 < metrics["most_bytes"] <= budget == metrics["max_bytes"]
    assert metrics["share_reused"] < metrics["facts"]["share_known"]


@pytest.mark.usefixtures("_wrong_prefixes")
def test_wrong_tokens_are_seen(prompts: Folders) -> None:
    outcome = measured(PREFIX, prompts, rounds=1)
    figures = outcome.metrics["methods"]["llmcache"]
    assert figures["n_same"] == sum(row["is_same"] for row in outcome.rows[16:]) < 16 and not figures["is_same"]
    outcome = measured(PARITY, prompts)
    assert outcome.metrics["n_wrong"] == sum(row["is_near_tie"] == 0 for row in outcome.rows) > 3
    assert {row["is_same"] for row in outcome.rows if row["served"] == "computed"} == {1}
    with pytest.raises(RuntimeError, match="prefix_hit had 1 hits, or other tokens"):
        measured(DECODE, prompts)


def test_a_near_tie_is_told_from_a_wrong_token() -> None:
    scores = [torch.tensor([[0.0, 4.0, 1.0]]), torch.tensor([[8.0, 7.75, -torch.inf]]), torch.tensor([[1.0, 2.0, 0.0]])]
    reference = torch.tensor([[9, 9, 1, 0, 1]])
    assert difference(reference, reference, scores, 4, torch.float32) is None
    found = difference(reference, torch.tensor([[9, 9, 1, 1, 2]]), scores, 4, torch.bfloat16)
    assert found is not None and (found.step, found.gap, found.tolerance) == (1, 0.25, 4 * 8 / 128)
    assert found.is_near_tie
    exact = difference(reference, torch.tensor([[9, 9, 1, 1, 2]]), scores, 4, torch.float32)
    assert exact is not None and not exact.is_near_tie
    last = difference(reference, torch.tensor([[9, 9, 1, 0, 0]]), scores, 4, torch.bfloat16)
    assert last is not None and last.step == 2 and not last.is_near_tie


def test_generation_is_timed_by_token(prompts: Folders) -> None:
    outcome = measured(DECODE, prompts)
    (figures,) = outcome.metrics["generation"]
    kinds = ["nocache", "kv_cache", "miss", "prefix_hit", "exact_hit"]
    assert sorted(figures["times"]) == sorted(kinds) and len(outcome.rows) == 5
    for kind, row in zip(kinds, outcome.rows, strict=True):
        times = figures["times"][kind]
        assert [times[f"{name}_ms"]["n"] for name in ("ttft", "tpot", "itl", "e2el")] == [3, 3, 9, 3]
        assert 0 < row["ttft_ms"] < row["e2el_ms"] == figures[f"{kind}_ms"]["median"]
        assert row["model"] == row["weights"] == "tiny"
    assert outcome.rows[1]["kv_cache_ratio"] == 1.0
    assert told(DECODE, outcome).count("| tiny |") == 5


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (DECODE | {"shared_tokens": 40}, r"shared_tokens: fewer than the prompt's 40 \(got 40\)"),
        (DECODE | {"shared_tokens": 15}, "shared_tokens"),
        (DECODE | {"models": ["nowhere"]}, "model: nowhere is none of bert-base"),
        (PARITY | {"cache": {"max_byte": 3}}, r"cache\.max_byte.*max_bytes"),
        (PARITY | {"ulps": -1}, "ulps"),
        (PARITY | {"new_tokens": 500}, r"max_length: 6\d\d is more than this model's 512 positions"),
        (PREFIX | {"rounds": 0}, "rounds"),
        (PREFIX | {"task": {"name": "wikitext", "model": "untrained", "data": "made"}}, "give the task prompts"),
        (PREFIX | {"methods": [{"method": "doccache", "treshold": 1}]}, r"methods\[0\]\.treshold"),
    ],
)
def test_what_cannot_be_measured_is_refused(prompts: Folders, values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        measured(values, prompts)
