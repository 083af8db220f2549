"""Chains of blocks name exactly what they share; the store keeps its budget and never a block without its parent."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcache.policies import FIFO, LFU, LRU, TTL, Staleness
from llmcache.request.prefill import Link
from llmcache.request.rows import Row, Scope
from llmcache.reuse.prefix.block_hash import links
from llmcache.reuse.prefix.block_pool import Block, BlockPool

SCOPE = Scope("default", "weights", "torch.float32", "sdpa")
CPU = torch.device("cpu")
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def row(ids: list[int], start: int = 0) -> Row:
    packed = np.array(ids, dtype=np.uint16).tobytes()
    return Row(0, "", packed, slice(0, len(ids)), len(ids), start)


def n_shared(first: list[int], second: list[int]) -> int:
    """Tokens that two lists begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def block(link: Link, scope: Scope = SCOPE) -> Block:
    """A block of 8 bytes."""
    return Block(link.ids, scope, torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.zeros(0))


@given(IDS, IDS, st.integers(1, 4))
def test_equal_leading_keys_are_shared_blocks(first: list[int], second: list[int], size: int) -> None:
    one, other = (links(SCOPE, row(ids), size) for ids in (first, second))
    assert (len(one), len(other)) == (len(first) // size, len(second) // size)
    equal = [a == b for a, b in zip(one, other, strict=False)]
    assert sum(equal) == n_shared(first, second) // size
    assert equal == sorted(equal, reverse=True)


def test_the_root_takes_in_scope_position_and_size() -> None:
    ids = [1, 1, 1, 1]
    tenant = Scope("tenant", "weights", "torch.float32", "sdpa")
    tuned = Scope("default", "other weights", "torch.float32", "sdpa")
    roots = [(SCOPE, 0, 2), (SCOPE, 1, 2), (SCOPE, 0, 1), (tenant, 0, 2), (tuned, 0, 2)]
    assert len({links(scope, row(ids, start), size)[0].key for scope, start, size in roots}) == len(roots)


@given(st.lists(st.tuples(st.booleans(), IDS), max_size=30), st.integers(0, 60))
def test_budget_and_parents_whatever_is_asked(steps: list[tuple[bool, list[int]]], max_bytes: int) -> None:
    blocks = BlockPool(2, max_bytes, CPU, LRU())
    parents: dict[str, str] = {}
    for puts, ids in steps:
        chain = links(SCOPE, row(ids), 2)
        parents |= {after.key: before.key for before, after in pairwise(chain)}
        if puts:
            blocks.put(chain, {link.key: block(link) for link in chain})
        reached, n_tokens = blocks.reach(chain, row(ids).ids, 2)
        found = blocks.match(chain)
        assert reached[: len(found)] == found and 0 <= n_tokens - 2 * len(found) < 2
        assert {key: before for before, after in blocks._after.items() for key in after} == blocks._before
        assert blocks._before == {key: parents[key] for key in blocks._held if key in parents}
        assert [one.ids for one in found] == [link.ids for link in chain[: len(found)]]
        assert blocks.nbytes == sum(one.nbytes for one in blocks._held.values()) <= max_bytes
        assert all(parents[key] in blocks._held for key in blocks._held if key in parents)
        assert not puts or len(found) == min(len(chain), max_bytes // 8)


@given(st.lists(st.tuples(IDS, st.integers(0, 40)), max_size=30), st.integers(40, 80))
def test_a_request_is_whole_or_not_held_whatever_leaves(steps: list[tuple[list[int], int]], max_bytes: int) -> None:
    spent = [0]
    blocks = BlockPool(2, max_bytes, CPU, LRU(), lambda: spent[0])
    for ids, others in steps:
        packed = row(ids).ids
        chain = links(SCOPE, row(ids), 2)
        tail = Link(f"end of {ids}", packed[4 * len(chain) :])
        made = {link.key: block(link) for link in chain}
        is_held = blocks.put((*chain, tail), made | {tail.key: replace(block(tail), is_tail=True)})
        held = blocks.whole(tail.key, packed)
        assert bool(held) == is_held == (8 * (len(chain) + 1) <= max_bytes - spent[0])
        assert b"".join(one.ids for one in held) == (packed if held else b"")
        assert [one.is_tail for one in held] == ([False] * len(chain) + [True] if held else [])
        assert blocks.whole(tail.key, packed + packed) == blocks.whole("another", packed) == []
        assert (blocks.whole(chain[-1].key, packed) if chain else []) == []  # what begins a request does not end it
        spent[0] = others
        blocks.make_way()
        assert blocks.nbytes == sum(one.nbytes for one in blocks._held.values()) <= max_bytes - others
        assert blocks.n_tails == sum(one.is_tail for one in blocks._held.values()) == len(blocks._held) - len(blocks)
        assert {key: before for before, after in blocks._after.items() for key in after} == blocks._before
        assert all(before in blocks._held for before in blocks._before.values())
        again = BlockPool(2, max_bytes, CPU, LRU())
        for record in blocks.records():
            again.adopt(record)
        assert (again.nbytes, again.n_tails, again._before) == (blocks.nbytes, blocks.n_tails, blocks._before)


@given(st.lists(IDS, max_size=12), IDS, st.integers(1, 4))
def test_as_many_tokens_are_found_as_any_stored_request_shares(
    stored: list[list[int]], ids: list[int], size: int
) -> None:
    blocks = BlockPool(size, 10**6, CPU, LRU())
    for one in stored:
        chain = links(SCOPE, row(one), size)
        blocks.put(chain, {link.key: block(link) for link in chain})
    found, n_tokens = blocks.reach(links(SCOPE, row(ids), size), row(ids).ids, 2)
    kept = [one[: len(one) // size * size] for one in stored]
    most = max((n_shared(one, ids) for one in kept), default=0)
    assert n_tokens == (most if most >= size else 0)  # what begins no block alike is not looked for
    assert len(found) == -(-n_tokens // size)
    assert b"".join(one.ids for one in found)[: 2 * n_tokens] == row(ids).ids[: 2 * n_tokens]


def test_the_least_recently_used_end_leaves_first() -> None:
    blocks = BlockPool(1, 4 * 8, CPU, LRU())
    old, new = links(SCOPE, row([0, 1]), 1), links(SCOPE, row([2, 0]), 1)
    for chain in (old, new):
        blocks.put(chain, {link.key: block(link) for link in chain})
    blocks.match(old)
    third = links(SCOPE, row([1]), 1)
    blocks.put(third, {link.key: block(link) for link in third})
    assert [len(blocks.match(chain)) for chain in (old, new, third)] == [2, 1, 1]
    assert blocks.n_evicted == 1


@pytest.mark.parametrize("policy", [LRU, LFU, FIFO, partial(Staleness, 60.0)])
def test_a_full_pool_takes_a_new_chain_as_a_whole(policy: Any) -> None:
    blocks = BlockPool(1, 6 * 8, CPU, policy())
    for number in range(5):
        chain = links(SCOPE, row([number, 0, 1]), 1)
        blocks.put(chain, {link.key: block(link) for link in chain})
        assert len(blocks.match(chain)) == 3


def test_of_a_chain_whose_beginning_the_policy_names_the_end_leaves() -> None:
    blocks = BlockPool(1, 3 * 8, CPU, FIFO())
    old, new = links(SCOPE, row([0, 1]), 1), links(SCOPE, row([2, 0]), 1)
    for chain in (old, new):
        blocks.put(chain, {link.key: block(link) for link in chain})
    assert [len(blocks.match(chain)) for chain in (old, new)] == [1, 2]


def test_blocks_that_have_expired_leave_with_all_that_follows() -> None:
    clock = [0.0]
    blocks = BlockPool(1, 100, CPU, TTL(10.0, now=lambda: clock[0]))
    chain = links(SCOPE, row([0, 1]), 1)
    blocks.put(chain[:1], {chain[0].key: block(chain[0])})
    clock[0] = 6.0
    blocks.put(chain, {chain[1].key: block(chain[1])})
    assert len(blocks.match(chain)) == 2
    clock[0] = 11.0
    assert len(blocks.match(chain)) == len(blocks) == blocks.nbytes == 0
    assert blocks.n_evicted == 2


def test_what_follows_a_block_that_left_is_not_held() -> None:
    """Another thread let the middle of a chain go between a match and the put of what follows it."""
    blocks = BlockPool(1, 100, CPU, LRU())
    chain = links(SCOPE, row([0, 1, 2]), 1)
    blocks.put(chain[:1], {chain[0].key: block(chain[0])})
    blocks.put(chain, {chain[2].key: block(chain[2])})
    assert len(blocks) == 1


def test_equal_keys_with_other_tokens_do_not_match() -> None:
    blocks = BlockPool(1, 100, CPU, LRU())
    chain = links(SCOPE, row([0]), 1)
    blocks.put(chain, {chain[0].key: block(Link(chain[0].key, b"other"))})
    assert blocks.match(chain) == []


@pytest.mark.parametrize("how", ["purge", "clear"])
def test_forgetting(how: str) -> None:
    blocks = BlockPool(1, 100, CPU, LRU())
    scopes = [Scope(name, "", "", "") for name in ("a", "b")]
    mine, theirs = (links(scope, row([0, 1]), 1) for scope in scopes)
    for scope, chain in zip(scopes, (mine, theirs), strict=True):
        blocks.put(chain, {link.key: block(link, scope) for link in chain})
    blocks.purge("a") if how == "purge" else blocks.clear()
    left = 2 if how == "purge" else 0
    assert [len(blocks.match(chain)) for chain in (mine, theirs)] == [0, left]
    assert blocks.nbytes == 8 * left
