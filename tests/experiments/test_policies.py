"""Policies replayed on keys: no policy beats the bound; counts follow banks and blocks."""

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.streams.keys import BYTES, Asked, KeyStream, asked
from experiments.data.traces import AZURE, azure_lengths
from experiments.measures.policies import BEST, Policies
from experiments.replay.eviction import most_hits, replay_blocks, replay_entries
from experiments.replay.w_tinylfu import WTinyLFU
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from llmcache.errors import ConfigError
from llmcache.memory.policies import GDSF, LRU, S3FIFO, Policy
from tests.experiments.measuring import measured, told
from tests.tiny_prompts import TRACE, write_trace

NAMES = ["fifo", "lru", "lfu", "s3_fifo", "gdsf", "w_tinylfu"]
SMALL = {"name": "zipf", "n": 3000, "keys": 300}


def of(keys: str) -> list[Sequence[Asked]]:
    """Return one request per letter."""
    return [[Asked(key)] for key in keys]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    write_trace(tmp_path)
    (tmp_path / AZURE).parent.mkdir()
    lines = [f"2023-11-16 18:15:46.68,{n},44" for n in (5, 0, 100, 7)]
    (tmp_path / AZURE).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return Folders(data=tmp_path)


def figures(folders: Folders, **stream: Any) -> dict[tuple[str, float], Any]:
    values = {"measure": "policies", "stream": {**SMALL, **stream}, "policies": NAMES, "shares": [0.05, 0.3]}
    outcome = measured(values, folders)
    assert len(told(values, outcome).splitlines()) == len(outcome.rows) + 4
    return {(row["policy"], row["share"]): row for row in outcome.rows}


def test_no_policy_beats_the_bound_and_a_larger_cache_finds_more(folders: Folders) -> None:
    for scan in (0, 200):
        rows = figures(folders, scan=scan, every=500)
        for name in NAMES:
            assert rows[name, 0.05]["hit_rate"] < rows[BEST, 0.05]["hit_rate"]
            assert rows[name, 0.05]["hit_rate"] < rows[name, 0.3]["hit_rate"] <= rows[BEST, 0.3]["hit_rate"]
            assert rows[name, 0.3]["hit_rate"] == rows[name, 0.3]["byte_hit_rate"] == rows[name, 0.3]["tokens_saved"]
        assert rows["s3_fifo", 0.05]["hit_rate"] > rows["lru", 0.05]["hit_rate"]


@cache
def most(keys: str, max_entries: int) -> int:
    """Return the most possible hits, by exhaustive search."""

    def hits(at: int, held: frozenset[str]) -> int:
        if at == len(keys):
            return 0
        if keys[at] in held:
            return 1 + hits(at + 1, held)
        room = [held | {keys[at]}] if len(held) < max_entries else [held - {one} | {keys[at]} for one in held]
        return max(hits(at + 1, later) for later in [held, *room])

    return hits(0, frozenset())


@given(st.text("abcd", max_size=9), st.integers(1, 3))
def test_the_bound_is_the_most_that_is_possible(keys: str, max_entries: int) -> None:
    assert most_hits(of(keys), max_entries).hits == most(keys, max_entries)
    for policy in (LRU, S3FIFO, GDSF, WTinyLFU):
        assert replay_entries(of(keys), policy, max_entries * BYTES).hits <= most(keys, max_entries)


@pytest.mark.parametrize("policy", [LRU, S3FIFO, WTinyLFU])
def test_of_chains_what_is_held_of_the_beginning_is_found(policy: type[Policy]) -> None:
    requests = [[Asked(str(block)) for block in blocks] for _, blocks in TRACE]
    found = replay_blocks(requests, policy, 100 * BYTES)
    # 16 of 28 blocks came before.
    assert (found.n, found.hits) == (28, 16) == (found.nbytes // BYTES, found.hit_nbytes // BYTES)
    assert most_hits(requests, 100).hits == 16
    assert replay_blocks(requests, LRU, 2 * BYTES).hits < 16


def test_mooncakes_blocks_are_read_and_bounded(folders: Folders) -> None:
    values = {"measure": "policies", "stream": {"name": "mooncake"}, "policies": NAMES, "shares": [1.0]}
    outcome = measured(values, folders)
    assert {row["hit_rate"] for row in outcome.rows} == {16 / 28}
    assert outcome.metrics["task"] == "Mooncake's trace, blocks"


def test_lengths_are_azures_and_costs_are_told(folders: Folders) -> None:
    assert azure_lengths(folders.data) == [5, 100, 7]
    stream = KeyStream.make({**SMALL, "lengths": "azure", "keeps": "tokens", "scan": 2, "every": 10})
    requests = [one for (one,) in asked(stream, folders.data, 0)]
    assert {one.tokens for one in requests} == {5, 7, 100}
    assert all(one.nbytes == BYTES * one.tokens for one in requests)
    assert len({one.key for one in requests if int(one.key) >= 300}) == 2 * 3000 // 10
    rows = figures(folders, lengths="azure")
    assert (BEST, 0.3) not in rows
    assert rows["gdsf", 0.3]["tokens_saved"] > rows["lfu", 0.3]["tokens_saved"]
    with pytest.raises(ConfigError, match=r"not on the hub; give a folder with azure_llm_trace/.*--data-dir"):
        azure_lengths(None)


def test_a_newcomer_needs_more_uses_than_whom_it_would_drive_out() -> None:
    """Keys used twice stay, however many new keys come once."""
    once = (f"once {i}" for i in itertools.count())
    keys = [*"abcdefgh" * 3, *itertools.islice(once, 50), *"abcdefgh"]
    found = replay_entries([[Asked(key)] for key in keys], WTinyLFU, 10 * BYTES)
    assert found.hits == 3 * 8
    policy = WTinyLFU()
    policy.on_put("a", 1)
    policy.on_hit("nobody")
    assert policy.victim() == "a"
    policy.on_remove("a")
    with pytest.raises(KeyError, match="empty"):
        policy.victim()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ["lruu"]}, "policy: unknown name 'lruu'"),
        ({"policies": []}, "policies"),
        ({"shares": [0.0]}, "shares"),
        ({"stream": {"name": "zip"}}, r"stream\.name"),
        ({"policies": [{"name": "s3_fifo", "trial": 2.0}]}, "trial=2.0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        make_experiment({"measure": "policies", "stream": SMALL, "policies": ["lru"], **changes})
    made = make_experiment({"measure": "policies", "stream": SMALL, "policies": ["lru"]})
    assert isinstance(made, Policies)
    assert Policies.make(made.to_dict()) == made
