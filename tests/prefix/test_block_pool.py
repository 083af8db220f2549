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
from torch import Tensor

from llmcache.memory import purges
from llmcache.memory.blocks.block import NAMES, Block, Link, Slab, first_tokens, links, runs
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.blocks.slabs import SLAB_TOKENS, slab_blocks
from llmcache.memory.policies import FIFO, GDSF, LFU, LRU, S3FIFO, TTL, Policy, Staleness
from llmcache.request.rows import Row, Scope

SCOPE = Scope("default", "weights", "torch.float32", "sdpa")
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def row(ids: list[int], start: int = 0) -> Row:
    packed = np.array(ids, dtype=np.uint16).tobytes()
    return Row(0, "", packed, slice(0, len(ids)), len(ids), start)


def chain_of(*ids: int, size: int = 1) -> tuple[Link, ...]:
    return links(SCOPE, row([*ids]), size, 0)


def n_shared(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def block(link: Link, is_tail: bool = False, n_numbers: int = 2) -> Block:
    """Return a block of `n_numbers` numbers of 4 bytes."""
    tensors = {"keys": torch.zeros(1, n_numbers), "values": torch.zeros(1, 0), "states": torch.zeros(1, 0)}
    return Block.of(link.ids, SCOPE, tensors, is_tail, b"")


def pool(n_blocks: int = 100, policy: Callable[[], Policy] = LRU, size: int = 1) -> BlockPool:
    return BlockPool(size, 8 * n_blocks, torch.device("cpu"), policy)


def put(blocks: BlockPool, *chains: Sequence[Link]) -> None:
    for chain in chains:
        blocks.put(chain, {link.key: block(link) for link in chain})


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
    assert len({links(scope, row([1] * 4), size, start)[0].key for scope, start, size in roots}) == len(roots)


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
def test_the_longest_shared_prefix_is_found(stored: list[list[int]], ids: list[int], size: int) -> None:
    blocks = pool(10**5, size=size)
    put(blocks, *(chain_of(*one, size=size) for one in stored))
    found, n_tokens = blocks.reach(chain_of(*ids, size=size), row(ids).ids, 2)
    kept = [one[: len(one) // size * size] for one in stored]
    most = max((n_shared(one, ids) for one in kept), default=0)
    assert n_tokens == (most if most >= size else 0)  # less than a block is not searched
    assert len(found) == -(-n_tokens // size)
    assert b"".join(one.ids for one in found)[: 2 * n_tokens] == row(ids).ids[: 2 * n_tokens]


def test_the_end_of_the_chain_that_the_policy_names_leaves_first() -> None:
    old, new, third = chain_of(0, 1), chain_of(2, 0), chain_of(1)
    for policy, held in ((LRU, [2, 1, 1]), (FIFO, [1, 2, 1])):
        blocks = pool(4, policy)
        put(blocks, old, new)
        blocks.match(old)
        put(blocks, third)
        assert n_found(blocks, old, new, third) == held
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


def test_what_does_not_fit_is_not_held() -> None:
    """Neither what follows a block that another thread evicted, nor what is too large, nor another's tokens."""
    blocks, chain, (large,), (link,) = pool(2), chain_of(0, 1, 2), chain_of(1), chain_of(3)
    put(blocks, chain[:1])
    blocks.put(chain, {chain[2].key: block(chain[2])})
    assert len(blocks) == 1
    assert not blocks.put([large], {large.key: block(large, n_numbers=5)})
    assert n_found(blocks, chain, [large]) == [1, 0]
    blocks.put([link], {link.key: block(Link(link.key, b"other"))})
    assert n_found(blocks, [link]) == [0]


def test_what_was_purged_since_a_call_began_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call that began before a purge, a chain is refused if one of its blocks was purged."""
    monkeypatch.setattr(purges, "_MOST_FORGOTTEN", 2)
    blocks, (one, other) = pool(), (chain_of(1, 2), chain_of(3))
    put(blocks, one, other)
    assert (blocks.clear("another"), blocks.nbytes) == (0, 24)
    assert (blocks.clear(SCOPE.namespace), blocks.nbytes) == (0, 0)

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


# -- slabs -------------------------------------------------------------------------------------------------------------

SIZE = 16
NBYTES = SIZE * (2 * 2 * 2 + 4) * 4  # of a block of two layers, heads of two, and states of four
PER_SLAB = SLAB_TOKENS // SIZE


def numbers(n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(2, 1, n_tokens, 2), torch.rand(2, 1, n_tokens, 2), torch.rand(1, n_tokens, 4)


def chain_named(names: Sequence[int]) -> list[Link]:
    return [Link(str([*names[: n + 1]]), bytes([name])) for n, name in enumerate(names)]


def stored_together(chain: Sequence[Link]) -> dict[str, Block]:
    """Blocks of a chain in one slab."""
    slab = Slab(*numbers(SIZE * len(chain)))
    return {link.key: Block(link.ids, SCOPE, slab, n * SIZE, (n + 1) * SIZE) for n, link in enumerate(chain)}


def slabs_pool(n_blocks: int = 100) -> BlockPool:
    return BlockPool(SIZE, n_blocks * NBYTES, torch.device("cpu"), LRU)


def nbytes_kept(blocks: BlockPool) -> int:
    """Return the bytes of all storages that blocks lie in."""
    storages = [tensor.untyped_storage() for one in blocks._held.values() for tensor in one.tensors.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_kept(blocks: BlockPool, made: dict[str, Block]) -> None:
    """Assert that held blocks are as stored, and take as many bytes as counted."""
    assert nbytes_kept(blocks) == blocks.nbytes == len(blocks) * NBYTES <= blocks.max_bytes
    assert all(block.is_equal(made[key]) for key, block in blocks._held.items())
    assert not any(block.slab.keys.is_inference() for block in blocks._held.values())


def test_a_run_is_one_piece() -> None:
    chain = chain_named(range(5))
    made = [*stored_together(chain[:3]).values(), *stored_together(chain[3:]).values()]
    whole = [torch.cat(pieces, dim=-2) for pieces in zip(*runs(made), strict=True)]
    assert [piece[0].shape[-2] for piece in runs(made)] == [48, 32]
    assert all(torch.equal(x, torch.cat([b.tensors[n] for b in made], -2)) for n, x in zip(NAMES, whole, strict=True))
    assert [piece[0].shape[-2] for piece in runs([made[0], made[2], made[1]])] == [16, 16, 16]  # one by one
    begun = runs(first_tokens(made, 41))
    assert [piece[0].shape[-2] for piece in begun] == [41]
    assert all(torch.equal(x, y[..., :41, :]) for x, y in zip(begun[0], whole, strict=True))


@pytest.mark.parametrize("n_left", [1, 4])
def test_blocks_that_leave_are_let_go(n_left: int) -> None:
    blocks, old, new = slabs_pool(6), chain_named(range(6)), chain_named([9] * (6 - n_left))
    made, added = stored_together(old), stored_together(new)
    blocks.put(old, made)
    with torch.inference_mode():
        blocks.put(new, added)
    check_kept(blocks, made | added)
    assert all(block is added[link.key] for link, block in zip(new, blocks.match(new), strict=True))  # none is copied
    assert len(runs(blocks.match(old))) == 1 == len(runs(blocks.match(new)))
    assert len(blocks.match(old)) == n_left


def test_bytes_are_let_go_however_blocks_leave() -> None:
    now, spent, chain = [0.0], [0], chain_named(range(6))
    blocks = BlockPool(SIZE, 6 * NBYTES, torch.device("cpu"), lambda: TTL(60.0, now=lambda: now[0]), lambda: spent[0])
    made = stored_together(chain)
    blocks.put(chain[:2], made)
    now[0] = 10.0
    blocks.put(chain, made)
    check_kept(blocks, made)
    spent[0] = NBYTES
    blocks.make_way()
    check_kept(blocks, made)
    assert len(blocks) == 5
    now[0] = 65.0  # the first two expire, and their successors leave with them
    assert blocks.match(chain) == []
    for let_go in (blocks.clear, lambda: blocks.clear("default")):
        assert not blocks._slabs._keys and not blocks._slabs._changed
        blocks.put(chain[:5], stored_together(chain[:5]))
        assert len(blocks) == 5
        let_go()
    assert not blocks._slabs._keys and not blocks._slabs._changed


def test_a_slab_has_one_block_at_least() -> None:
    assert [slab_blocks(size) for size in (1, SIZE, 100, 1000)] == [SLAB_TOKENS, PER_SLAB, 1, 1]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=20))
def test_bytes_counted_are_bytes_kept(steps: list[tuple[bool, list[int]]]) -> None:
    blocks, made = slabs_pool(7), {}
    for puts, names in steps:
        chain = chain_named(names)
        held = len(blocks.match(chain))
        if puts and held < len(chain):
            new = stored_together(chain[held:])
            made |= {key: block for key, block in new.items() if key not in blocks}
            blocks.put(chain, new)
        check_kept(blocks, made)
        assert blocks._before == {after: before for before, then in blocks._after.items() for after in then}


def test_saved_blocks_are_laid_together_again() -> None:
    blocks, again, stem, n = slabs_pool(), slabs_pool(), [0] * 3, PER_SLAB
    chains = [chain_named([*stem, *range(1, n + 1)]), chain_named([*stem, 7, 8])]
    made = {}
    for chain in chains:
        new = stored_together([link for link in chain if link.key not in blocks])
        made |= new
        blocks.put(chain, new)
    again.restore(*blocks.state("weights"))
    check_kept(again, made)
    found = [again.match(chain) for chain in chains]
    assert [[piece[0].shape[-2] // SIZE for piece in runs(one)] for one in found] == [[n, 3], [3, 2]]
    assert all(a.slab is b.slab for a, b in pairwise(found[0][:n]))
