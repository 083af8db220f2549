"""Every store keeps the rules (`check_store`); and what is special about memory."""

import pytest
import torch

from llmcache.banks.stores import STORES, Entry, Store
from llmcache.banks.stores.memory import BLOCK_BYTES, SMALL_BYTES, MemoryStore
from llmcache.conformance import check_store
from tests.conformance.outside import Files


def small(value: float) -> Entry:
    return Entry({"h": torch.full((2, 8), value), "mask": torch.tensor([True, value > 0])})


def large(value: float) -> Entry:
    return Entry({"h": torch.full((SMALL_BYTES // 2 + 1,), value, dtype=torch.float16), "n": torch.tensor(value)})


def assert_same(a: Entry, b: Entry) -> None:
    """Bit for bit, types and shapes included."""
    assert a.nbytes == b.nbytes
    assert a.tensors.keys() == b.tensors.keys()
    for name, x in a.tensors.items():
        assert x.dtype == b.tensors[name].dtype
        assert torch.equal(x, b.tensors[name])


@pytest.mark.parametrize("make", [*STORES.values(), pytest.param(Files, marks=pytest.mark.slow)])
def test_every_store_keeps_the_rules(make: type[Store]) -> None:
    for seed in range(3):
        check_store(make, seed)


def test_small_entries_and_views_are_copies() -> None:
    store = MemoryStore()
    mine, whole = small(1), torch.ones(2, SMALL_BYTES)
    store["small"], store["view"] = mine, Entry({"h": whole[0]})
    for x in (*mine.tensors.values(), whole):
        x.zero_()
    assert_same(store["small"], small(1))
    assert_same(store["view"], Entry({"h": torch.ones(SMALL_BYTES)}))
    assert store["view"].tensors["h"].untyped_storage().nbytes() == whole[0].nbytes  # the rest is not kept alive


@pytest.mark.parametrize("n", [4, 200])
def test_what_is_returned_is_contiguous(n: int) -> None:
    store, x = MemoryStore(), torch.ones(n, n)
    store["a"] = Entry({"turned": x.T, "some": x[::2, 1:], "spread": x[:1].expand(n, n)})
    assert all(got.is_contiguous() for got in store["a"].tensors.values())


def test_entries_are_not_compared_by_value() -> None:
    entry = small(1)
    assert entry == entry and entry != small(1)
    assert len({entry, small(1)}) == 2


def addresses(store: MemoryStore) -> set[int]:
    return {x.data_ptr() for slab in store._slabs.values() for block in slab._blocks for x in block.values()}


def test_slots_are_used_again() -> None:
    store, n = MemoryStore(), 3 * BLOCK_BYTES // 1536
    x = torch.arange(n)[:, None].expand(n, 768).half()
    for i in range(n):
        store[f"{i}"] = Entry({"h": x[i]})
    before = addresses(store)
    assert len(before) == 4  # three full blocks, and a rest
    for i in range(0, n, 2):
        del store[f"{i}"]
    for i in range(0, n, 2):
        store[f"{i}"] = Entry({"h": -x[i]})
    assert addresses(store) == before
    for i in range(n):
        assert torch.equal(store[f"{i}"].tensors["h"], x[i] if i % 2 else -x[i])


def test_overwriting_takes_no_more_memory() -> None:
    store = MemoryStore()
    for _ in range(BLOCK_BYTES // 1024 + 1):
        store["a"] = Entry({"h": torch.ones(1024, dtype=torch.uint8)})
    assert len(addresses(store)) == 1


def test_the_last_entry_of_a_kind_releases_its_memory() -> None:
    store = MemoryStore()
    for n in range(1, 50):
        store["a"] = Entry({"h": torch.ones(n)})
    assert len(addresses(store)) == 1
    del store["a"]
    assert addresses(store) == set()


@pytest.mark.parametrize(("n_bytes", "is_shared"), [(SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
def test_only_small_entries_are_copied_to_shared_blocks(n_bytes: int, is_shared: bool) -> None:
    store, mine = MemoryStore(), torch.ones(n_bytes, dtype=torch.uint8)
    store["a"] = Entry({"h": mine})
    assert bool(addresses(store)) == is_shared
    got = [store["a"].tensors["h"] for _ in range(2)]
    assert len({x.data_ptr() for x in (mine, *got)}) == (3 if is_shared else 1)


def test_names_are_kept_apart() -> None:
    """Same shapes, other names or another order of names: nothing is mixed up."""
    store, x, y = MemoryStore(), torch.ones(3), torch.zeros(3)
    entries = {"a": Entry({"k": x, "v": y}), "b": Entry({"v": y, "k": x}), "c": Entry({"k": x, "w": y})}
    for key, entry in entries.items():
        store[key] = entry
    for key, entry in entries.items():
        assert_same(store[key], entry)


def test_a_failed_put_keeps_the_old_entry() -> None:
    store = MemoryStore()
    for make, wrong in (small, torch.ones(4, device="meta")), (large, torch.ones(SMALL_BYTES, device="meta")):
        store["a"] = make(1)
        with pytest.raises((NotImplementedError, RuntimeError)):
            store["a"] = Entry({"h": wrong})
        assert_same(store["a"], make(1))
        assert sum(len(slab) for slab in store._slabs.values()) == (make is small)
