"""Streams of prompts: prompts share exactly the stated tokens with earlier ones."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data.streams.prompts import BLOCK, STREAMS, Pieces, Prompt, known_tokens, make_stream, sample
from experiments.data.traces import read_trace
from experiments.support.files import Folders
from llmcache.errors import ConfigError
from tests.tiny_prompts import TRACE, write_trace

TEXT = range(200_000)
NOWHERE = Folders()


def drawn(seed: int = 0, folders: Folders = NOWHERE, **settings: Any) -> list[Prompt]:
    made = make_stream(settings, "stream")
    return STREAMS[made.name].draw(made, Pieces(TEXT, seed), folders, seed)


def n_common(one: Prompt, other: Prompt) -> int:
    """Return the length of the prefix that two prompts share."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.fixture
def trace(tmp_path: Path) -> Folders:
    write_trace(tmp_path)
    return Folders(data=tmp_path)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, BLOCK - 1)), min_size=1, max_size=8))
def test_known_are_the_whole_blocks_that_an_earlier_prompt_begins_with(parts: list[tuple[list[int], int]]) -> None:
    prompts = [[block for block in blocks for _ in range(BLOCK)] + [9] * rest for blocks, rest in parts]
    for number, n_known in enumerate(known_tokens(prompts)):
        longest = max((n_common(prompts[number], earlier) for earlier in prompts[:number]), default=0)
        assert n_known == longest // BLOCK * BLOCK


def test_a_trace_is_read_in_order_of_arrival_from_a_folder(trace: Folders, tmp_path: Path) -> None:
    assert read_trace(trace.data) == [tuple(ids) for _, ids in TRACE]
    with pytest.raises(ConfigError, match=r"not on the hub; give a folder with mooncake/.*--data-dir"):
        read_trace(None)
    with pytest.raises(FileNotFoundError, match=r"conversation_trace\.jsonl"):
        read_trace(tmp_path / "none")


def test_conversations_stay_whole_and_in_order() -> None:
    chains = [(*ids, 100 + number) for number, (_, ids) in enumerate(TRACE)]
    whole = {first: [chain for chain in chains if chain[1] == first] for first in (1, 5, 8)}
    orders = set()
    for seed in range(20):
        taken = sample(chains, 5, seed)
        assert taken == [chain for chain in chains if chain in taken]
        by_first = {first: [chain for chain in taken if chain[1] == first] for first in whole}
        cut = [first for first, found in by_first.items() if found not in ([], whole[first])]
        assert all(found == whole[first][: len(found)] for first, found in by_first.items())
        assert len(taken) == 5 and len(cut) <= 1
        orders.add(tuple(taken))
    assert len(orders) > 1
    assert sample(chains, len(chains), 3) == chains


def test_blocks_of_a_trace_are_the_same_tokens_everywhere(trace: Folders) -> None:
    prompts = drawn(name="mooncake", n=8, blocks=3, folders=trace)
    tokens: dict[int, tuple[int, ...]] = {}
    for prompt, (_, ids) in zip(prompts, TRACE, strict=True):
        assert len(prompt) == BLOCK * min(3, len(ids))
        for place, block in enumerate(ids[:3]):
            part = tuple(prompt[place * BLOCK : (place + 1) * BLOCK])
            assert tokens.setdefault(block, part) == part
    assert len(set(tokens.values())) == len(tokens)
    # [0, 1, 2] new; 0 of [0, 5]; all of [0, 1, 2]; 0 of [0, 8, 9]; [0, 5]; [0, 1]; [0, 8, 9]; [0, 5, 6]
    assert known_tokens(prompts) == [BLOCK * n for n in (0, 1, 3, 1, 2, 2, 3, 3)]


def test_a_chat_grows_by_question_and_answer() -> None:
    prompts = drawn(name="chat", n=40, turns=4, question=20, answer=30, at_once=3)
    assert len(prompts) == 40
    assert {len(prompt) for prompt in prompts} == {20, 70, 120, 170}
    last: dict[tuple[int, ...], Prompt] = {}
    for prompt in prompts:
        before = last.get(tuple(prompt[:20]), [])
        assert prompt[: len(before)] == before and len(prompt) == (len(before) + 50 if before else 20)
        last[tuple(prompt[:20])] = prompt
    assert 3 < len(last) <= 13
    # Turns of different conversations alternate.
    assert any(one[:20] != other[:20] and len(other) > 20 for one, other in itertools.pairwise(prompts))


def test_users_share_a_system_prompt() -> None:
    prompts = drawn(name="system_prompt", n=30, systems=2, system=48, shortest=3, longest=20)
    assert len({tuple(prompt[:48]) for prompt in prompts}) == 2
    assert {n_common(*pair) for pair in itertools.combinations(prompts, 2)} == {0, 48}
    assert min(map(len, prompts)) >= 51 and max(map(len, prompts)) <= 68
    assert sorted(known_tokens(prompts)) == [0, 0, *[48] * 28]


def test_nothing_is_shared_not_even_the_first_block() -> None:
    prompts = drawn(name="nothing_shared", n=50, length=40)
    assert len({tuple(prompt[:BLOCK]) for prompt in prompts}) == 50
    assert sum(known_tokens(prompts)) == 0 and {len(prompt) for prompt in prompts} == {40}
