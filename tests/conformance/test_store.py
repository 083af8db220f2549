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


KEYS = ("key/a", "key/b", "key/c")
STEPS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from([*KINDS, "delete"]), st.integers(-5, 5)), min_size=8, max_size=20
)


def assert_same(a: Entry, b: Entry) -> None:
    """Bit for bit, types and shapes included."""
    assert a.nbytes == b.nbytes
    assert a.tensors.keys() == b.tensors.keys()
    for name, x in a.tensors.items():
        assert x.dtype == b.tensors[name].dtype
        assert torch.equal(x, b.tensors[name])


ALL = {**STORES, "outside": Files}


@pytest.fixture(params=sorted(ALL))
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = ALL[request.param](torch.device("cpu"))
    yield opened
    opened.close()


@pytest.mark.parametrize("make_store", [*STORES.values(), pytest.param(Files, marks=pytest.mark.slow)])
@settings(deadline=None)
@given(steps=STEPS)
def test_any_sequence_is_that_of_a_dict(make_store: type[Store], steps: list[tuple[str, str, int]]) -> None:
    store, oracle = make_store(torch.device("cpu")), dict[str, Entry]()  # type: ignore[call-arg]
    for key, kind, value in steps:
        if kind in KINDS:
            store[key] = oracle[key] = KINDS[kind](value)
        elif oracle.pop(key, None) is not None:
            del store[key]
        for held in oracle:
            assert_same(store[held], oracle[held])
        for absent in {*KEYS} - {*oracle}:
            with pytest.raises(KeyError, match=absent):
                store[absent]
            with pytest.raises(KeyError, match=absent):
                del store[absent]
    store.close()


@pytest.fixture
def _switches_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
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
            for i in range(400 if isinstance(store, MemoryStore) else 100):
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


def test_small_entries_and_views_are_copies(store: Store) -> None:
    mine, whole = small(1), torch.ones(2, SMALL_BYTES)
    store["small"], store["view"] = mine, Entry({"h": whole[0]})
    for x in (*mine.tensors.values(), whole):
        x.zero_()
    assert_same(store["small"], small(1))
    assert_same(store["view"], Entry({"h": torch.ones(SMALL_BYTES)}))
    assert store["view"].tensors["h"].untyped_storage().nbytes() == whole[0].nbytes  # the rest is not kept alive


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
