"""Streams of requests: arrivals, repeats, shared prefixes and generated texts are as stated, and follow their seed."""

import hashlib
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from experiments.data.streams.prompts import BLOCK, Pieces, Prompt, known_tokens, make_stream, sample
from experiments.data.streams.support_desk import INTENTS, support_desk
from experiments.data.streams.traffic import BYTES, Arrival, KeyStream, Traffic, arrange, asked, draw
from experiments.data.traces import AZURE, azure_lengths, read_trace
from experiments.measures.over_http.loops import poisson
from experiments.measures.service import with_repeats
from experiments.support.files import Folders
from experiments.tasks.wikitext import Repeats, repeat
from llmcache.errors import ConfigError
from tests.tiny_prompts import TRACE, write_trace

CHECKSUM_SEED_0 = "8c7a5802a82771c81320896ee68afe36719f428f6b75cf968281c338190e7a3b"


def write_azure(folder: Path, *lines: str) -> None:
    path = folder / AZURE
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")


def test_arrivals_are_a_poisson_process_with_a_mean_gap_of_one() -> None:
    drawn, again, other = (poisson(5000, default_rng(seed)) for seed in (2, 2, 3))
    assert drawn[0] == 0 and np.diff(drawn).mean() == pytest.approx(1) and (np.diff(drawn) >= 0).all()
    assert np.diff(drawn).std() == pytest.approx(1, abs=0.05) and (drawn == again).all() and (drawn != other).any()


def test_keys_have_azures_lengths_and_scans_are_of_new_keys(tmp_path: Path) -> None:
    write_azure(tmp_path, *(f"2023-11-16 18:15:46.68,{n},44" for n in (5, 0, 100, 7)))
    assert azure_lengths(tmp_path) == [5, 100, 7]
    lengths = {"lengths": "azure", "keeps": "tokens", "scan": 2, "every": 10}
    stream = KeyStream.make({"name": "zipf", "n": 3000, "keys": 300, **lengths})
    requests = asked(stream, tmp_path, 0)
    assert not stream.is_uniform and stream.title == "Zipf 1, scans, Azure's lengths, tokens"
    assert {one.tokens for (one,) in requests} == {5, 7, 100}
    assert all(one.nbytes == BYTES * one.tokens for (one,) in requests)
    assert len({one.key for (one,) in requests if int(one.key) >= 300}) == 2 * 3000 // 10
    with pytest.raises(ConfigError, match=r"not on the hub; give a folder with azure_llm_trace/.*--data-dir"):
        azure_lengths(None)


def test_a_stream_repeats_as_often_as_it_is_told_to() -> None:
    repeats = with_repeats(100, 0.8, 200, random.Random(0))
    assert sorted(set(repeats)) == list(range(40)) and len(repeats) == 200
    assert all(one <= max([-1, *repeats[:i]]) + 1 for i, one in enumerate(repeats))  # no repeat before its first time
    assert with_repeats(100, 0.8, 200, random.Random(0)) == repeats != with_repeats(100, 0.8, 200, random.Random(1))


def drawn(folders: Folders | None = None, **settings: Any) -> list[Prompt]:
    return make_stream(settings, "stream").draw(Pieces(range(200_000), 0), folders or Folders(), 0)


def n_common(one: Prompt, other: Prompt) -> int:
    """Return the length of the prefix that two prompts share."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, BLOCK - 1)), min_size=1, max_size=8))
def test_known_are_the_whole_blocks_that_an_earlier_prompt_begins_with(parts: list[tuple[list[int], int]]) -> None:
    prompts = [[block for block in blocks for _ in range(BLOCK)] + [9] * rest for blocks, rest in parts]
    for number, n_known in enumerate(known_tokens(prompts)):
        longest = max((n_common(prompts[number], earlier) for earlier in prompts[:number]), default=0)
        assert n_known == longest // BLOCK * BLOCK


def test_a_trace_is_read_in_order_of_arrival_and_its_blocks_are_the_same_tokens_everywhere(tmp_path: Path) -> None:
    write_trace(tmp_path)
    assert read_trace(tmp_path) == [tuple(ids) for _, ids in TRACE]
    keys = asked(KeyStream.make({"name": "mooncake"}), tmp_path, 0)
    assert [[int(one.key) for one in request] for request in keys] == [ids for _, ids in TRACE]
    prompts = drawn(Folders(tmp_path), name="mooncake", n=8, blocks=3)
    tokens: dict[int, Prompt] = {}
    for prompt, (_, ids) in zip(prompts, TRACE, strict=True):
        assert len(prompt) == BLOCK * min(3, len(ids))
        for place, block in enumerate(ids[:3]):
            part = prompt[place * BLOCK : (place + 1) * BLOCK]
            assert tokens.setdefault(block, part) == part
    # [0, 1, 2] new; 0 of [0, 5]; all of [0, 1, 2]; 0 of [0, 8, 9]; [0, 5]; [0, 1]; [0, 8, 9]; [0, 5, 6]
    assert known_tokens(prompts) == [BLOCK * n for n in (0, 1, 3, 1, 2, 2, 3, 3)]


def test_conversations_stay_whole_and_in_order() -> None:
    chains = [(*ids, 100 + number) for number, (_, ids) in enumerate(TRACE)]
    whole = {first: [chain for chain in chains if chain[1] == first] for first in (1, 5, 8)}
    for seed in range(20):
        taken = sample(chains, 5, seed)
        found = {first: [chain for chain in taken if chain[1] == first] for first in whole}
        assert taken == [chain for chain in chains if chain in taken] and len(taken) == 5
        assert all(some == whole[first][: len(some)] for first, some in found.items())
        assert sum(some not in ([], whole[first]) for first, some in found.items()) <= 1  # the last one drawn is cut
    assert len({tuple(sample(chains, 5, seed)) for seed in range(20)}) > 1


def test_prompts_share_what_they_are_said_to() -> None:
    chats = drawn(name="chat", n=40, turns=4, question=20, answer=30, at_once=3)
    last: dict[tuple[int, ...], Prompt] = {}
    for prompt in chats:
        before = last.get(tuple(prompt[:20]), [])
        assert prompt[: len(before)] == before and len(prompt) == (len(before) + 50 if before else 20)
        last[tuple(prompt[:20])] = prompt
    assert 3 < len(last) <= 13 and {len(prompt) for prompt in chats} == {20, 70, 120, 170}
    assert any(one[:20] != other[:20] and len(other) > 20 for one, other in itertools.pairwise(chats))  # interleaved
    asked = drawn(name="system_prompt", n=30, systems=2, system=48, shortest=3, longest=20)
    assert {n_common(*pair) for pair in itertools.combinations(asked, 2)} == {0, 48}
    assert {51, 68} >= {min(map(len, asked)), max(map(len, asked))} and sum(known_tokens(asked)) == 28 * 48
    mixed = drawn(name="mixed", n=200, systems=2, system=48, shortest=3, longest=20, new=0.3, repeated=0.2)
    kinds = Counter(
        "repeated" if one == before else "new" if len(one) <= 20 else "asked"
        for before, one in itertools.pairwise(mixed)
    )
    assert 20 < kinds["repeated"] < 60 < kinds["asked"] and 30 < kinds["new"] < 90
    alone = drawn(name="nothing_shared", n=50, length=40)
    assert len({tuple(prompt[:BLOCK]) for prompt in alone}) == 50 and {len(prompt) for prompt in alone} == {40}


def test_the_support_desks_stream_is_the_same_everywhere() -> None:
    """A changed phrase or setting changes this sum and every figure measured on the stream."""
    stream = support_desk()
    lines = "\n".join(f"{request.label}\t{request.text}" for request in stream)
    assert hashlib.sha256(lines.encode()).hexdigest() == CHECKSUM_SEED_0
    assert {request.label for request in stream} == set(INTENTS)
    assert support_desk(50, seed=1) != support_desk(50, seed=2)
    assert support_desk(1000, seed=3)[:300] == support_desk(300, seed=3)


FRESH = np.arange(400 * 8).reshape(400, 8)  # unique tokens show each row's source


@settings(deadline=None, max_examples=20)
@given(
    shares=st.tuples(*[st.floats(0, 0.33)] * 3),
    replaced=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_windows_come_back_as_said(shares: tuple[float, float, float], replaced: float, seed: int) -> None:
    named = dict(zip(("whole", "prefix", "changed"), shares, strict=True))
    repeats = Repeats.make({**named, "share_replaced": replaced, "seed": seed}, "repeats")
    rows, kinds, sources = repeat(FRESH, repeats, len(FRESH))
    n_replaced = max(1, round(replaced * 8))
    unused = iter(FRESH)
    for number, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        same = (rows[:number] == row).sum(axis=1) if number else np.zeros(1)
        if kind == "new":
            assert (row == next(unused)).all()
        elif kind == "prefix":
            assert (rows[:number, :4] == row[:4]).all(axis=1).any() and (row[4:] == next(unused)[4:]).all()
        else:
            assert same.max() == 8 if kind == "whole" else 8 - n_replaced in same
    assert all(kinds.count(kind) / 400 == pytest.approx(share, abs=0.13) for kind, share in named.items())
    assert (repeat(FRESH, repeats, 150)[0] == rows[:150]).all() and {kinds[source] for source in sources} == {"new"}


def test_traffic_is_seeded_and_skewed_and_comes_in_phases_or_bursts() -> None:
    pool = [(intent, number) for intent in range(10) for number in range(40)]
    steady, shifting = (draw(pool, Traffic(n=4000, skew=1.2, phases=phases)) for phases in (1, 2))
    assert steady == draw(pool, Traffic(n=4000, skew=1.2)) and steady.count(max(set(steady), key=steady.count)) > 200
    first, second = (max(set(half), key=half.count) for half in (shifting[:2000], shifting[2000:]))
    assert first != second
    bursts, shuffled, repeats = (
        arrange(pool, lambda one: one[0], Arrival(name=name, length=20, at_once=2), seed=1)
        for name in ("bursts", "shuffled", "repeats")
    )
    assert sorted(bursts) == sorted(shuffled) == pool and bursts != shuffled
    n_bursts, n_shuffled = (len({intent for intent, _ in stream[:40]}) for stream in (bursts, shuffled))
    assert n_bursts <= 6 < n_shuffled and len(repeats) == 400
    assert repeats.count(max(set(repeats), key=repeats.count)) > 40
