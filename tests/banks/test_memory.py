"""The memory of a bank: entries come back as they were put, and small ones share blocks."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from llmcache.banks.entry import Entry
from llmcache.banks.memory import BLOCK_BYTES, SMALL_BYTES, Memory


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


def kind(number: int) -> Entry:
    """The next of several kinds; of one number always the same values."""
    n = (4, 40_000, 0, 1)[number % 4]
    made = {
        "h": torch.full((2, n), float(number)),
        "half": torch.tensor([number % 7]).half(),
        "whole": torch.tensor(number),
        "mask": torch.tensor([True, number % 3 > 0]),
    }
    return Entry({} if n == 1 else made)


def test_it_is_a_dict() -> None:
    chance, memory, held = random.Random(0), Memory(), dict[str, int]()
    for number in range(200):
        key = f"key/{chance.randrange(4)}"
        if chance.random() < 0.7:
            memory[key], held[key] = kind(number), number
        elif held.pop(key, None) is not None:
            del memory[key]
        for name in (f"key/{i}" for i in range(4)):
            if name in held:
                assert_same(memory[name], kind(held[name]))
                continue
            with pytest.raises(KeyError):
                memory[name]
            with pytest.raises(KeyError):
                del memory[name]


@pytest.mark.parametrize("n", [4, 40_000])
def test_what_is_returned_is_normal_and_stays_when_its_place_is_used_again(n: int) -> None:
    memory = Memory()
    memory["a"] = Entry({"h": torch.ones(n, requires_grad=True) * 2})
    got = memory["a"]
    for key in "bacd":  # "a" makes way while others of its kind are held
        if key == "c":
            del memory["a"]
        memory[key] = Entry({"h": torch.zeros(n)})
    assert_same(got, Entry({"h": torch.full((n,), 2.0)}))
    with torch.inference_mode():
        memory["b"] = Entry({"h": torch.ones(n)})
        inside = memory["b"]
    assert_same(inside, Entry({"h": torch.ones(n)}))
    for entry in (got, inside, memory["b"]):
        assert not entry.tensors["h"].requires_grad and not entry.tensors["h"].is_inference()


def test_readers_beside_a_writer_get_whole_entries_of_their_key() -> None:
    memory, has_ended, interval = Memory(), threading.Event(), sys.getswitchinterval()

    def read() -> None:
        while not has_ended.is_set():
            for number in range(4):
                with suppress(KeyError):
                    h = memory[f"{number}"].tensors["h"]
                    assert bool((h == h[0]).all()) and int(h[0]) % 4 == number

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            try:
                for i in range(100):
                    number = i * 7 % 4
                    memory[f"{number}"] = Entry({"h": torch.full(((8, 40_000)[i % 2],), float(number + 4 * i))})
                    if i % 5 < 2:
                        del memory[f"{number}"]
            finally:
                has_ended.set()
            for reader in readers:
                reader.result()
    finally:
        sys.setswitchinterval(interval)


def test_small_entries_and_views_are_copies() -> None:
    memory = Memory()
    mine, whole = small(1), torch.ones(2, SMALL_BYTES)
    memory["small"], memory["view"] = mine, Entry({"h": whole[0]})
    for x in (*mine.tensors.values(), whole):
        x.zero_()
    assert_same(memory["small"], small(1))
    assert_same(memory["view"], Entry({"h": torch.ones(SMALL_BYTES)}))
    assert memory["view"].tensors["h"].untyped_storage().nbytes() == whole[0].nbytes  # the rest is not kept alive


@pytest.mark.parametrize("n", [4, 200])
def test_what_is_returned_is_contiguous(n: int) -> None:
    memory, x = Memory(), torch.ones(n, n)
    memory["a"] = Entry({"turned": x.T, "some": x[::2, 1:], "spread": x[:1].expand(n, n)})
    assert all(got.is_contiguous() for got in memory["a"].tensors.values())


def test_entries_are_not_compared_by_value() -> None:
    entry = small(1)
    assert entry == entry and entry != small(1)
    assert len({entry, small(1)}) == 2


def addresses(memory: Memory) -> set[int]:
    return {x.data_ptr() for slab in memory._slabs.values() for block in slab._blocks for x in block.values()}


def test_slots_are_used_again() -> None:
    memory, n = Memory(), 3 * BLOCK_BYTES // 1536
    x = torch.arange(n)[:, None].expand(n, 768).half()
    for i in range(n):
        memory[f"{i}"] = Entry({"h": x[i]})
    before = addresses(memory)
    assert len(before) == 4  # three full blocks, and a rest
    for i in range(0, n, 2):
        del memory[f"{i}"]
    for i in range(0, n, 2):
        memory[f"{i}"] = Entry({"h": -x[i]})
    assert addresses(memory) == before
    for i in range(n):
        assert torch.equal(memory[f"{i}"].tensors["h"], x[i] if i % 2 else -x[i])


def test_overwriting_takes_no_more_memory() -> None:
    memory = Memory()
    for _ in range(BLOCK_BYTES // 1024 + 1):
        memory["a"] = Entry({"h": torch.ones(1024, dtype=torch.uint8)})
    assert len(addresses(memory)) == 1


def test_the_last_entry_of_a_kind_releases_its_memory() -> None:
    memory = Memory()
    for n in range(1, 50):
        memory["a"] = Entry({"h": torch.ones(n)})
    assert len(addresses(memory)) == 1
    del memory["a"]
    assert addresses(memory) == set()


@pytest.mark.parametrize(("n_bytes", "is_shared"), [(SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
def test_only_small_entries_are_copied_to_shared_blocks(n_bytes: int, is_shared: bool) -> None:
    memory, mine = Memory(), torch.ones(n_bytes, dtype=torch.uint8)
    memory["a"] = Entry({"h": mine})
    assert bool(addresses(memory)) == is_shared
    got = [memory["a"].tensors["h"] for _ in range(2)]
    assert len({x.data_ptr() for x in (mine, *got)}) == (3 if is_shared else 1)


def test_names_are_kept_apart() -> None:
    """Same shapes, other names or another order of names: nothing is mixed up."""
    memory, x, y = Memory(), torch.ones(3), torch.zeros(3)
    entries = {"a": Entry({"k": x, "v": y}), "b": Entry({"v": y, "k": x}), "c": Entry({"k": x, "w": y})}
    for key, entry in entries.items():
        memory[key] = entry
    for key, entry in entries.items():
        assert_same(memory[key], entry)


def test_a_failed_put_keeps_the_old_entry() -> None:
    memory = Memory()
    for make, wrong in (small, torch.ones(4, device="meta")), (large, torch.ones(SMALL_BYTES, device="meta")):
        memory["a"] = make(1)
        with pytest.raises((NotImplementedError, RuntimeError)):
            memory["a"] = Entry({"h": wrong})
        assert_same(memory["a"], make(1))
        assert sum(len(slab) for slab in memory._slabs.values()) == (make is small)
