"""Blocks stored together are read as one piece; evicted blocks free all their bytes."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llmcache.memory.blocks.block import NAMES, Block, Link, Slab, first_tokens, runs
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.blocks.slabs import SLAB_TOKENS, slab_blocks
from llmcache.memory.policies import LRU, TTL
from llmcache.request.rows import Scope

SCOPE = Scope("default", "weights", "torch.float32", "sdpa")
SIZE = 16
NBYTES = SIZE * (2 * 2 * 2 + 4) * 4  # of a block of two layers, heads of two, and states of four
PER_SLAB = SLAB_TOKENS // SIZE


def numbers(n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(2, 1, n_tokens, 2), torch.rand(2, 1, n_tokens, 2), torch.rand(1, n_tokens, 4)


def chain_of(names: Sequence[int]) -> list[Link]:
    return [Link(str([*names[: n + 1]]), bytes([name])) for n, name in enumerate(names)]


def stored_together(chain: Sequence[Link]) -> dict[str, Block]:
    """Blocks of a chain in one slab."""
    slab = Slab(*numbers(SIZE * len(chain)))
    return {link.key: Block(link.ids, SCOPE, slab, n * SIZE, (n + 1) * SIZE) for n, link in enumerate(chain)}


def pool(n_blocks: int = 100) -> BlockPool:
    return BlockPool(SIZE, n_blocks * NBYTES, torch.device("cpu"), LRU)


def nbytes_kept(blocks: BlockPool) -> int:
    """Return the bytes of all storages that blocks lie in."""
    storages = [tensor.untyped_storage() for one in blocks._held.values() for tensor in one.tensors.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check(blocks: BlockPool, made: dict[str, Block]) -> None:
    """Assert that held blocks are as stored, and take as many bytes as counted."""
    assert nbytes_kept(blocks) == blocks.nbytes == len(blocks) * NBYTES <= blocks.max_bytes
    assert all(block.is_equal(made[key]) for key, block in blocks._held.items())
    assert not any(block.slab.keys.is_inference() for block in blocks._held.values())


def test_a_run_is_one_piece() -> None:
    chain = chain_of(range(5))
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
    blocks, old, new = pool(6), chain_of(range(6)), chain_of([9] * (6 - n_left))
    made, added = stored_together(old), stored_together(new)
    blocks.put(old, made)
    with torch.inference_mode():
        blocks.put(new, added)
    check(blocks, made | added)
    assert all(block is added[link.key] for link, block in zip(new, blocks.match(new), strict=True))  # none is copied
    assert len(runs(blocks.match(old))) == 1 == len(runs(blocks.match(new)))
    assert len(blocks.match(old)) == n_left


def test_bytes_are_let_go_however_blocks_leave() -> None:
    now, spent, chain = [0.0], [0], chain_of(range(6))
    blocks = BlockPool(SIZE, 6 * NBYTES, torch.device("cpu"), lambda: TTL(60.0, now=lambda: now[0]), lambda: spent[0])
    made = stored_together(chain)
    blocks.put(chain[:2], made)
    now[0] = 10.0
    blocks.put(chain, made)
    check(blocks, made)
    spent[0] = NBYTES
    blocks.make_way()
    check(blocks, made)
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


def test_blocks_that_are_not_held_are_let_go() -> None:
    """Another thread stored the first blocks, and the last do not fit."""
    blocks, chain = pool(4), chain_of(range(6))
    first, made = stored_together(chain[:2]), stored_together(chain)
    blocks.put(chain[:2], first)
    assert not blocks.put(chain, made)
    check(blocks, made | first)
    assert [piece[0].shape[-2] for piece in runs(blocks.match(chain))] == [32, 32]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=20))
def test_bytes_counted_are_bytes_kept(steps: list[tuple[bool, list[int]]]) -> None:
    blocks, made = pool(7), {}
    for puts, names in steps:
        chain = chain_of(names)
        held = len(blocks.match(chain))
        if puts and held < len(chain):
            new = stored_together(chain[held:])
            made |= {key: block for key, block in new.items() if key not in blocks}
            blocks.put(chain, new)
        check(blocks, made)
        assert blocks._before == {after: before for before, then in blocks._after.items() for after in then}


def test_saved_blocks_are_laid_together_again() -> None:
    blocks, again, stem, n = pool(), pool(), [0] * 3, PER_SLAB
    chains = [chain_of([*stem, *range(1, n + 1)]), chain_of([*stem, 7, 8])]
    made = {}
    for chain in chains:
        new = stored_together([link for link in chain if link.key not in blocks])
        made |= new
        blocks.put(chain, new)
    again.restore(*blocks.state("weights"))
    check(again, made)
    found = [again.match(chain) for chain in chains]
    assert [[piece[0].shape[-2] // SIZE for piece in runs(one)] for one in found] == [[n, 3], [3, 2]]
    assert all(a.slab is b.slab for a, b in pairwise(found[0][:n]))
