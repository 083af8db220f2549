"""Chains share exactly the blocks of a common prefix; the pool keeps its budget, and no block without its parent."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcache.memory import purges
from llmcache.memory.blocks.block import Block, Link, links
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.policies import FIFO, GDSF, LFU, LRU, S3FIFO, Policy, Staleness
from llmcache.request.rows import Row, Scope

SCOPE = Scope("default", "weights", "torch.float32", "sdpa")
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def row(ids: list[int], start: int = 0) -> Row:
    packed = np.array(ids, dtype=np.uint16).tobytes()
    return Row(0, "", packed, slice(0, len(ids)), len(ids), start)


def chain_of(*ids: int, size: int = 1, scope: Scope = SCOPE) -> tuple[Link, ...]:
    return links(scope, row([*ids]), size)


def n_shared(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def block(link: Link, scope: Scope = SCOPE, is_tail: bool = False, n_numbers: int = 2) -> Block:
    """Return a block of `n_numbers` numbers of 4 bytes."""
    tensors = {"keys": torch.zeros(1, n_numbers), "values": torch.zeros(1, 0), "states": torch.zeros(1, 0)}
    return Block.of(link.ids, scope, tensors, is_tail, b"")


def pool(n_blocks: int = 100, policy: Callable[[], Policy] = LRU, size: int = 1) -> BlockPool:
    return BlockPool(size, 8 * n_blocks, torch.device("cpu"), policy)


def put(blocks: BlockPool, *chains: Sequence[Link], scope: Scope = SCOPE) -> None:
    for chain in chains:
        blocks.put(chain, {link.key: block(link, scope) for link in chain})


def n_found(blocks: BlockPool, *chains: Sequence[Link]) -> list[int]:
    return [len(blocks.match(chain)) for chain in chains]


def check_links(blocks: BlockPool) -> None:
    """Assert that each held block has its parent, and that counts match the held blocks."""
    assert {key: before for before, after in blocks._after.items() for key in after} == blocks._before
    assert all(before in blocks._held for before in blocks._before.values())
    assert blocks.nbytes == sum(one.nbytes for one in blocks._held.values())
    assert blocks.n_tails == sum(one.is_tail for one in blocks._held.values()) == len(blocks._held) - len(blocks)


def test_blocks_are_counted_while_another_thread_stores_tails() -> None:
    class Growing(dict[str, Block]):
        def __len__(self) -> int:  # another thread's turn
            n_held = super().__len__()
            blocks.n_tails += 1
            return n_held

    blocks = pool()
    blocks._held = Growing()
    assert len(blocks) == 0


def test_the_root_takes_in_scope_position_and_size() -> None:
    tenant, tuned = replace(SCOPE, namespace="tenant"), replace(SCOPE, weights="other weights")
    roots = [(SCOPE, 0, 2), (SCOPE, 1, 2), (SCOPE, 0, 1), (tenant, 0, 2), (tuned, 0, 2)]
    assert len({links(scope, row([1] * 4, start), size)[0].key for scope, start, size in roots}) == len(roots)


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), IDS), max_size=30), st.integers(0, 60))
def test_budget_and_parents_whatever_is_asked(steps: list[tuple[bool, list[int]]], max_bytes: int) -> None:
    blocks = BlockPool(2, max_bytes, torch.device("cpu"), LRU)
    parents: dict[str, str] = {}
    for puts, ids in steps:
        chain = chain_of(*ids, size=2)
        parents |= {after.key: before.key for before, after in pairwise(chain)}
        if puts:
            put(blocks, chain)
        reached, n_tokens = blocks.reach(chain, row(ids).ids, 2)
        found = blocks.match(chain)
        assert reached[: len(found)] == found and 0 <= n_tokens - 2 * len(found) < 2
        assert [one.ids for one in found] == [link.ids for link in chain[: len(found)]]
        check_links(blocks)
        assert blocks._before == {key: parents[key] for key in blocks._held if key in parents}
        assert blocks.nbytes <= max_bytes
        assert not puts or len(found) == min(len(chain), max_bytes // 8)


@pytest.mark.slow
@given(st.lists(st.tuples(IDS, st.integers(0, 40)), max_size=30), st.integers(40, 80))
def test_a_request_is_whole_or_not_held_whatever_leaves(steps: list[tuple[list[int], int]], max_bytes: int) -> None:
    spent = [0]
    blocks = BlockPool(2, max_bytes, torch.device("cpu"), LRU, lambda: spent[0])
    for ids, others in steps:
        packed, chain = row(ids).ids, chain_of(*ids, size=2)
        tail = Link(f"end of {ids}", packed[4 * len(chain) :])
        made = {link.key: block(link) for link in chain}
        is_held = blocks.put((*chain, tail), made | {tail.key: block(tail, is_tail=True)})
        held = blocks.whole(tail.key, packed)
        assert bool(held) == is_held == (8 * (len(chain) + 1) <= max_bytes - spent[0])
        assert b"".join(one.ids for one in held) == (packed if held else b"")
        assert [one.is_tail for one in held] == ([False] * len(chain) + [True] if held else [])
        assert blocks.whole(tail.key, packed + packed) == blocks.whole("another", packed) == []
        assert (blocks.whole(chain[-1].key, packed) if chain else []) == []  # a request's inner block does not end it
        spent[0] = others
        blocks.make_way()
        check_links(blocks)
        assert blocks.nbytes <= max_bytes - others


@given(st.lists(IDS, max_size=12), IDS, st.integers(1, 4))
def test_as_many_tokens_are_found_as_any_stored_request_shares(
    stored: list[list[int]], ids: list[int], size: int
) -> None:
    blocks = pool(10**5, size=size)
    put(blocks, *(chain_of(*one, size=size) for one in stored))
    found, n_tokens = blocks.reach(chain_of(*ids, size=size), row(ids).ids, 2)
    kept = [one[: len(one) // size * size] for one in stored]
    most = max((n_shared(one, ids) for one in kept), default=0)
    assert n_tokens == (most if most >= size else 0)  # less than a block is not searched
    assert len(found) == -(-n_tokens // size)
    assert b"".join(one.ids for one in found)[: 2 * n_tokens] == row(ids).ids[: 2 * n_tokens]


def test_the_least_recently_used_end_leaves_first() -> None:
    blocks, old, new, third = pool(4), chain_of(0, 1), chain_of(2, 0), chain_of(1)
    put(blocks, old, new)
    blocks.match(old)
    put(blocks, third)
    assert n_found(blocks, old, new, third) == [2, 1, 1]
    assert blocks.n_evicted == 1


@pytest.mark.parametrize("policy", [LRU, LFU, FIFO, S3FIFO, GDSF, partial(Staleness, 60.0)])
def test_a_full_pool_takes_a_new_chain_as_a_whole(policy: Any) -> None:
    blocks = pool(6, policy)
    for number in range(5):
        put(blocks, chain_of(number, 0, 1))
        assert n_found(blocks, chain_of(number, 0, 1)) == [3]


def test_a_scan_of_prompts_asked_once_drives_out_no_prompt_that_is_asked_again() -> None:
    blocks, again = pool(6, S3FIFO), chain_of(0, 1, 2)
    for number in range(9):
        put(blocks, again, chain_of(number, 4))
        assert n_found(blocks, again) == [3]
        check_links(blocks)
    assert blocks.n_evicted > 9


def test_of_a_chain_whose_beginning_the_policy_names_the_end_leaves() -> None:
    blocks, old, new = pool(3, FIFO), chain_of(0, 1), chain_of(2, 0)
    put(blocks, old, new)
    assert n_found(blocks, old, new) == [1, 2]


def test_what_follows_a_block_that_left_is_not_held() -> None:
    """Another thread evicted the middle of a chain between a match and the put of the rest."""
    blocks, chain = pool(), chain_of(0, 1, 2)
    put(blocks, chain[:1])
    blocks.put(chain, {chain[2].key: block(chain[2])})
    assert len(blocks) == 1


def test_what_is_larger_than_the_budget_sends_nobody_away() -> None:
    blocks, held, (large,) = pool(1), chain_of(0), chain_of(1)
    put(blocks, held)
    assert not blocks.put([large], {large.key: block(large, n_numbers=3)})
    assert n_found(blocks, held, [large]) == [1, 0]


def test_equal_keys_with_other_tokens_do_not_match() -> None:
    blocks, (link,) = pool(), chain_of(0)
    blocks.put([link], {link.key: block(Link(link.key, b"other"))})
    assert n_found(blocks, [link]) == [0]


def test_forgetting() -> None:
    blocks = pool()
    scopes = [replace(SCOPE, namespace=name) for name in ("a", "b")]
    mine, theirs = (chain_of(0, 1, scope=scope) for scope in scopes)
    for scope, chain in zip(scopes, (mine, theirs), strict=True):
        put(blocks, chain, scope=scope)
    blocks.clear("a")
    assert (n_found(blocks, mine, theirs), blocks.nbytes) == ([0, 2], 16)
    blocks.clear()
    assert (n_found(blocks, mine, theirs), blocks.nbytes) == ([0, 0], 0)


def test_what_was_purged_since_a_call_began_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call that began before a purge, a chain is refused if one of its blocks was purged."""
    monkeypatch.setattr(purges, "_MOST_FORGOTTEN", 2)
    blocks, (one, other) = pool(), (chain_of(1, 2), chain_of(3))

    def n_stored_after(purge: Callable[[], object]) -> list[int]:
        generation = blocks.purges.generation
        purge()
        for chain in (one, other):
            blocks.put(chain, {link.key: block(link) for link in chain}, generation)
        found = n_found(blocks, one, other)
        blocks.clear()
        return found

    assert n_stored_after(lambda: blocks.forget([one[0].key])) == [0, 1]
    assert n_stored_after(lambda: blocks.clear("another")) == [2, 1]
    assert n_stored_after(lambda: blocks.clear(SCOPE.namespace)) == n_stored_after(blocks.clear) == [0, 0]
    assert n_stored_after(lambda: blocks.forget(["x", "y", "z"])) == [0, 0]  # too many to remember: all are refused
