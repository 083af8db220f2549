"""Every store gives back what was put, also to many readers at once; and what is special about memory."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmcache.banks.stores import STORES, Entry, Store
from llmcache.banks.stores.memory import BLOCK_BYTES, SMALL_BYTES, MemoryStore
from tests.conformance.outside import Files


def small(value: float) -> Entry:
    return Entry({"h": torch.full((2, 8), value), "mask": torch.tensor([True, value > 0])})


def large(value: float) -> Entry:
    return Entry({"h": torch.full((SMALL_BYTES // 2 + 1,), value, dtype=torch.float16), "n": torch.tensor(value)})


def odd(value: float) -> Entry:
    return Entry({"none": torch.empty(0, 3), "whole": torch.tensor(int(value)), "half": torch.tensor([value]).half()})


KINDS: dict[str, Callable[[float], Entry]] = {
    "small": small,
    "large": large,
    "odd": odd,
    "nothing": lambda value: Entry({}),
}


def assert_same(a: Entry, b: Entry) -> None:
    """Bit for bit, types and shapes included."""
    assert a.nbytes == b.nbytes
    assert a.tensors.keys() == b.tensors.keys()
    for name, x in a.tensors.items():
        assert x.dtype == b.tensors[name].dtype
        assert torch.equal(x, b.tensors[name])


def check_store(store: Store, entries: dict[str, Entry]) -> None:
    """An empty store gives back of these entries (three at least) what was put last, and nothing that was deleted."""
    first, second, third, *_ = entries
    for forbidden in store.__getitem__, store.__delitem__:
        with pytest.raises(KeyError, match=first):
            forbidden(first)
    for key, entry in entries.items():
        store[key] = entry
    for _ in range(2):
        for key, entry in entries.items():
            assert_same(store[key], entry)

    store[first] = entries[second]
    assert_same(store[first], entries[second])
    store[first] = entries[first]
    del store[second]
    for forbidden in store.__getitem__, store.__delitem__:
        with pytest.raises(KeyError, match=second):
            forbidden(second)
    assert_same(store[first], entries[first])
    assert_same(store[third], entries[third])
    store[second] = entries[second]
    assert_same(store[second], entries[second])


ALL = {**STORES, "outside": Files}


@pytest.fixture(params=sorted(ALL))
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = ALL[request.param](torch.device("cpu"))
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gives_back_what_was_put(store: Store, kind: str) -> None:
    check_store(store, {f"key/{i}": KINDS[kind](i) for i in range(5)})


def test_gives_back_mixed_entries(store: Store) -> None:
    check_store(store, {f"{kind}{i}": make(i) for i in range(3) for kind, make in KINDS.items()})


@pytest.mark.parametrize("make_store", ALL.values(), ids=ALL)
@settings(deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([*KINDS, "delete"]), st.integers(-5, 5))))
def test_any_sequence_is_that_of_a_dict(make_store: type[Store], steps: list[tuple[str, str, int]]) -> None:
    store, oracle = make_store(torch.device("cpu")), dict[str, Entry]()  # type: ignore[call-arg]
    for key, kind, value in steps:
        if kind in KINDS:
            store[key] = oracle[key] = KINDS[kind](value)
        elif oracle.pop(key, None) is not None:
            del store[key]
    for key in "abc":
        if key in oracle:
            assert_same(store[key], oracle[key])
        else:
            with pytest.raises(KeyError):
                store[key]
    store.close()


@pytest.fixture
def _switches_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switches_often")
@pytest.mark.parametrize("n", [8, SMALL_BYTES])
def test_what_is_read_while_others_come_and_go_is_the_keys_own(store: Store, n: int) -> None:
    """Readers hold no lock; puts and deletes come one at a time, as from a bank."""
    chance, has_ended, held = random.Random(0), threading.Event(), set[int]()

    def read() -> int:
        n_read = 0
        while not has_ended.is_set():
            for number in range(4):
                with suppress(KeyError):
                    x = store[f"{number}"].tensors["h"]
                    assert (x == x[0]).all() and x[0] % 4 == number
                    n_read += 1
        return n_read

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for i in range(400):
                number = chance.randrange(4)
                if number in held and chance.random() < 0.7:
                    del store[f"{number}"]
                    held.remove(number)
                else:
                    store[f"{number}"] = Entry({"h": torch.full((n,), float(number + 4 * i))})
                    held.add(number)
        finally:
            has_ended.set()
        assert sum(reader.result() for reader in readers) > 0


def test_the_callers_tensors_are_not_kept_of_a_small_entry(store: Store) -> None:
    mine = small(1)
    store["a"] = mine
    for x in mine.tensors.values():
        x.zero_()
    assert_same(store["a"], small(1))


def test_views_do_not_keep_what_they_are_of_alive(store: Store) -> None:
    whole = torch.ones(2, SMALL_BYTES)
    store["a"] = Entry({"h": whole[0]})
    assert store["a"].tensors["h"].untyped_storage().nbytes() == whole[0].nbytes
    whole.zero_()
    assert_same(store["a"], Entry({"h": torch.ones(SMALL_BYTES)}))


def test_what_was_got_stays_when_its_place_is_used_again(store: Store) -> None:
    for make in small, large:
        store["a"] = make(1)
        got = store["a"]
        store["a"] = make(2)
        del store["a"]
        store["b"] = make(3)
        assert_same(got, make(1))
        assert_same(store["b"], make(3))
        del store["b"]


@pytest.mark.parametrize("make", [small, large])
def test_inference_mode_leaves_no_trace(store: Store, make: Callable[[float], Entry]) -> None:
    """An inference tensor could not be written to outside; and none may come back inside."""
    with torch.inference_mode():
        mine = make(1)
        assert all(x.is_inference() for x in mine.tensors.values())
        store["a"] = mine
        inside = store["a"]
    outside = store["a"]
    for got in inside, outside:
        assert not any(x.is_inference() for x in got.tensors.values())
        assert_same(got, make(1))
    store["b"] = mine  # put outside, made inside
    assert_same(store["b"], make(1))
    with torch.no_grad():
        outside.tensors["h"].clone().add_(1)
        store["a"] = make(3)
    with torch.inference_mode():
        store["b"] = make(4)
    assert_same(store["a"], make(3))
    assert_same(store["b"], make(4))


@pytest.mark.parametrize("n", [8, SMALL_BYTES])
@pytest.mark.parametrize("is_inference", [False, True])
def test_gradients_do_not_come_in(store: Store, n: int, is_inference: bool) -> None:
    x = torch.ones(n, requires_grad=True)
    with torch.inference_mode(is_inference):
        store["a"] = Entry({"h": x})
        store["b"] = Entry({"h": x * 2})
        got = store["a"], store["b"]
    for entry in (*got, store["a"], store["b"]):
        assert not entry.tensors["h"].requires_grad
        assert entry.tensors["h"].is_leaf
    x.sum().backward()
    assert torch.equal(store["b"].tensors["h"], torch.full((n,), 2.0))


@pytest.mark.parametrize("n", [4, 200])
def test_layout_does_not_matter(store: Store, n: int) -> None:
    x = torch.arange(n * n, dtype=torch.float32).reshape(n, n)
    views: dict[str, Tensor] = {"turned": x.T, "some": x[::2, 1:], "spread": x[:1].expand(n, n)}
    store["a"] = Entry(views)
    assert_same(store["a"], Entry(views))
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
    for value in range(2 * BLOCK_BYTES // small(0).nbytes):
        store["a"] = small(value)
    assert len(addresses(store)) == len(small(0).tensors)


def test_the_last_entry_of_a_kind_releases_its_memory() -> None:
    store = MemoryStore()
    for n in range(1, 50):
        store["a"] = Entry({"h": torch.ones(n)})
    assert len(addresses(store)) == 1
    del store["a"]
    assert addresses(store) == set()


@pytest.mark.parametrize(("n_bytes", "is_shared"), [(SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
def test_only_small_entries_share_blocks(n_bytes: int, is_shared: bool) -> None:
    store = MemoryStore()
    store["a"] = Entry({"h": torch.ones(n_bytes, dtype=torch.uint8)})
    assert bool(addresses(store)) == is_shared
    assert (store["a"].tensors["h"].data_ptr() == store["a"].tensors["h"].data_ptr()) != is_shared


def test_large_entries_are_not_copied() -> None:
    store, mine = MemoryStore(), large(1)
    store["a"] = mine
    assert store["a"].tensors["h"].data_ptr() == mine.tensors["h"].data_ptr()


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
